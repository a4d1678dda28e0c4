// phase_graphs.h — micro-batch phases as device graphs: a settled phase is captured once, and from then on given to
// the device as one.
//
//   op by op     op op op ... op                                  host time for each op
//   as a graph   copy inputs in │ replay │ copy outputs out       host time for inputs and outputs alone
//
// Once the memory of a step has settled all values of a phase have their places (arena.h), in every step the same, so
// what the ops were given in one run is what they would be given in the next. Only inputs come from elsewhere: they are
// copied to places of the graph's before it runs; outputs leave as copies, as they do anyway. What the host decides
// anew in each step is in the other phases: learning rates, step numbers and the norm in the update. So nothing of it
// is an input of a graph.
//
// A graph must be whole: collectives that were started in it are waited for before it ends, and those under way when it
// begins before it does (the streams wait, never the host). Op by op they would go on beside the next phase.
//
// Plans that are made anew (places moved, another program swapped in) are captured anew, after one step op by op in
// which they do what they do only once. Steps that are looked at (recorded, debugged, while the arena learns) run op by
// op. The bits are the same.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/result.h"
#include "runtime/device_times.h"
#include "runtime/step_runner.h"

namespace interlace {

// A graph of the device, as torch has them. All may throw.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // What the current stream is given from here on is captured; memory comes from the pool ({0, 0}: a new one).
  virtual void Begin(c10::MempoolId_t pool) = 0;
  virtual void End() = 0;
  virtual void Replay() = 0;  // on the current stream
  virtual c10::MempoolId_t Pool() = 0;
};

struct GraphStats {
  bool on = false;
  std::string why_not;  // not on although it was asked for
  int64_t graphs = 0;   // that are there now
  int64_t captures = 0, replays = 0;
  int64_t bytes = 0;  // of the places of inputs and outputs
};

class PhaseGraphs : public NoObserver {
 public:
  static constexpr bool kGraphs = true;
  PhaseGraphs(const Program& program, c10::Device device);
  ~PhaseGraphs();

  // Whether micro-batches can be graphs; `planned`: their values have places. Error: they must be, and cannot.
  Status Decide(const RuntimeOptions& options, const std::map<std::string, std::shared_ptr<Comm>>& comms, bool planned);
  void TurnOff(std::string why);
  // Plans are about to be made anew.
  void Clear();
  // A step has run with the plans there are.
  void PlansRan() { warm_ = true; }
  bool ready() const { return on_ && warm_; }
  // Nanoseconds that a micro-batch's op is shorter for being in a graph; 0: it is in none. Error: none can be made.
  Result<int64_t> SavedNs(DeviceTimes& times) const;

  // As an observer. What cannot be captured runs op by op, and all that follows. Error: it must not, or an op failed.
  Status RunPhase(StepRunner& runner, const Plan& plan);

  GraphStats Statistics() const;
  // Why it was turned off while steps ran, once.
  std::string TakeNote() { return std::exchange(note_, {}); }

 private:
  struct Graph;
  void HoldInputs(Frame& frame);
  Result<std::unique_ptr<Graph>> Capture(StepRunner& runner, const Plan& plan);

  const Program& program_;
  const c10::Device device_;
  std::function<std::unique_ptr<DeviceGraph>()> make_;
  bool on_ = false, required_ = false, warm_ = false;
  std::string why_off_, note_;
  std::map<const Plan*, std::unique_ptr<Graph>> graphs_;
  std::map<ValueId, at::Tensor> held_;  // places of inputs, of all graphs
  std::optional<c10::Stream> stream_;   // where they are captured
  c10::MempoolId_t pool_{0, 0};         // of all of them: they run one after the other, and leave nothing there
  int64_t captures_ = 0, replays_ = 0;
};

}  // namespace interlace
