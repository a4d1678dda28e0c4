// step_recorder.h — the observer that fills a StepRecord (recorder.h): what every op and every transfer of a step did.
// On devices ops are issued, not carried out, by the thread that runs this: times are those of the streams, by events.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device_times.h"
#include "runtime/learned_arena.h"
#include "runtime/recorder.h"
#include "runtime/step_runner.h"
#include "runtime/stream.h"

namespace interlace {

class PhaseGraphs;

class StepRecorder : public NoObserver {
 public:
  // `arena`: learns from the step that is recorded, and says what lives in it.
  StepRecorder(const Program& program, const std::map<std::string, std::shared_ptr<Comm>>& comms, LearnedArena& arena)
      : program_(program), comms_(comms), arena_(arena) {}

  // Steps run on a device with these lanes, where they are not recorded as `graphs` says.
  void SetDevice(c10::Device device, std::shared_ptr<LaneStreams> lanes, const PhaseGraphs* graphs);
  // On a device: bytes of tensors now; the most of them since TakeDeviceBytes, which tells them and begins anew.
  int64_t DeviceBytes() const;
  int64_t DevicePeak() const;
  // Around what counts. The framework has one peak for all that runs on a device: other programs raise it between two
  // steps of this one, or begin anew. So this one's is what it was seen to be raised to.
  void BeginOnDevice();
  void EndOnDevice();
  int64_t TakeDeviceBytes();

  // Around a step; `instructions`: how many there will be; `live_before`: counted bytes that are not the step's.
  void Begin(TraceMode mode, size_t instructions, int64_t persistent_bytes, int64_t live_before);
  void End();
  bool on() const { return record_.mode != TraceMode::kOff; }
  const StepRecord& record() const { return record_; }

  // As an observer.
  void BeginPhase(const Plan& plan, const PlanVariant* variant, size_t micro_batch);
  Status Before(const Instruction& at);
  void Run(const Instruction& at, Frame& frame);
  bool After(const Plan& plan, const Instruction& at, const Frame& frame);
  Status Ended(const Instruction& at);

 private:
  // Serial mode: waits until every rank has come here, then runs a collective's start, its transfer and its sum. What
  // goes along the stages of a pipeline is left as it is: each of them comes to other ops at other times.
  bool IsAlongStages(const std::string& axis) const { return comms_.contains(MessagesAlong(axis)); }
  void RunAlone(const Instruction& at, Frame& frame, OpSample& sample);
  void RememberTransfers(const Instruction& at, const Frame& frame, size_t first);
  void FindLiveBytes(const Phase& phase);
  void RunOnDevice(const Instruction& at, Frame& frame, OpSample& sample);
  void MeetPeers(const Op& op, const Frame& frame);
  static void FinishTransfer(Transfer& transfer);
  void ReadTimes();

  const Program& program_;
  const std::map<std::string, std::shared_ptr<Comm>>& comms_;
  LearnedArena& arena_;
  StepRecord record_;
  int64_t live_before_ = 0;
  // Of the phase that runs: its number, when its last op ended, and bytes in the arena by place, before the op and
  // while it runs (empty: no arena).
  int32_t run_ = 0;
  int64_t now_ = 0;
  std::vector<std::pair<int64_t, int64_t>> live_;
  std::vector<int64_t> through_;  // by run: bytes in the arena that are saved across it
  // On devices.
  struct Marks {
    int32_t begin = 0, end = 0;
    bool with_next = false;
  };
  void ShareTimes(size_t first, size_t last);
  std::optional<DeviceTimes> times_;
  void FindMarkCost();
  const PhaseGraphs* graphs_ = nullptr;
  MarkCost mark_cost_;
  int64_t saved_by_graphs_ns_ = 0;
  std::shared_ptr<LaneStreams> lanes_;
  c10::Device device_{c10::kCPU};
  std::vector<Marks> marks_;  // by sample
  int64_t device_peak_bytes_ = 0;  // of the steps so far
  int64_t peak_before_ = 0;        // the framework's, when this step began
};

}  // namespace interlace
