#include "runtime/step_recorder.h"

#include <ATen/ops/zeros.h>

#include "ir/carried_places.h"
#include "ir/liveness.h"
#include "ir/op_table.h"
#include "runtime/allocator.h"

namespace interlace {

void StepRecorder::Begin(TraceMode mode, size_t instructions, int64_t persistent_bytes, int64_t live_before) {
  record_.mode = mode;
  if (mode == TraceMode::kOff) return;
  record_.phases.clear();
  record_.samples.clear();
  record_.transfers.clear();
  record_.samples.reserve(instructions);
  record_.persistent_bytes = persistent_bytes;
  live_before_ = live_before;
  through_.clear();
  if (arena_.on()) {
    if (Result<std::vector<int64_t>> through = BytesThroughRuns(program_); through.ok()) through_ = std::move(*through);
  }
  for (const auto& [axis, comm] : comms_) comm->SetRecording(true);
  record_.begin_ns = NanosNow();
}

void StepRecorder::End() {
  if (!on()) return;
  record_.end_ns = NanosNow();
  for (TransferSample& sample : record_.transfers) {
    if (sample.comm != nullptr) sample.times = sample.comm->TakeTimes(sample.ticket);
  }
  std::erase_if(record_.transfers, [](const TransferSample& sample) { return sample.times.end_ns == 0; });
  for (const auto& [axis, comm] : comms_) comm->SetRecording(false);
}

void StepRecorder::BeginPhase(const Plan& plan, const PlanVariant* variant, size_t micro_batch) {
  if (arena_.on()) arena_.BeginPhase(plan, variant, micro_batch);
  run_ = static_cast<int32_t>(record_.phases.size());
  record_.phases.push_back(plan.phase);
  FindLiveBytes(*plan.phase);
  MemoryScope::TakePeak();
  now_ = NanosNow();
}

void StepRecorder::FindLiveBytes(const Phase& phase) {
  live_.clear();
  if (!arena_.on()) return;
  const Result<PhaseLiveness> liveness = ComputeLiveness(program_, phase);
  if (!liveness.ok()) return;
  for (size_t i = 0; i < phase.ops.size(); ++i) live_.emplace_back(liveness->live_before[i], liveness->live_before[i]);
  for (const StorageLife& life : liveness->storages) {
    if (life.first >= 0) live_[life.first].second += life.bytes;
  }
  const int64_t through = through_.empty() ? 0 : through_[run_];
  for (size_t i = 0; i < live_.size(); ++i) {
    live_[i].first += through;
    live_[i].second += through + arena_.WorkspaceOf(&phase, i);
  }
}

Status StepRecorder::Before(const Instruction& at) {
  OpSample& sample = record_.samples.emplace_back();
  sample.op = at.op;
  sample.run = run_;
  sample.begin_ns = now_;
  sample.live_before = MemoryScope::Use().live_bytes - live_before_;
  return Ok{};
}

void StepRecorder::Run(const Instruction& at, Frame& frame) {
  OpSample& sample = record_.samples.back();
  const bool serial = record_.mode == TraceMode::kSerial;
  const Op& op = program_.op(at.op);
  if (serial && IsStart(op) && !IsAlongStages(std::string(AxisOf(program_, op)))) return RunAlone(at, frame, sample);
  const size_t transfers = frame.transfers.size();
  const int64_t cpu = serial ? NanosOf(CLOCK_THREAD_CPUTIME_ID) : 0;
  at.run(at.data, frame);
  if (serial) sample.cpu_ns = NanosOf(CLOCK_THREAD_CPUTIME_ID) - cpu;
  RememberTransfers(at, frame, transfers);
}

bool StepRecorder::After(const Plan& plan, const Instruction& at, const Frame& frame) {
  if (arena_.learning()) arena_.After(plan, at, frame);
  OpSample& sample = record_.samples.back();
  sample.peak_bytes = MemoryScope::TakePeak() - live_before_;
  if (!live_.empty()) {
    sample.live_before += live_[at.index].first;
    sample.peak_bytes += live_[at.index].second;
  }
  return true;
}

Status StepRecorder::Ended(const Instruction&) {
  record_.samples.back().end_ns = now_ = NanosNow();
  return Ok{};
}

// The transfers that an op has just started: those of the frame from `first` on.
void StepRecorder::RememberTransfers(const Instruction& at, const Frame& frame, size_t first) {
  for (size_t i = first; i < frame.transfers.size(); ++i) {
    TransferSample& sample = record_.transfers.emplace_back();
    sample.op = at.op;
    sample.run = run_;
    sample.comm = frame.transfers[i].comm;
    sample.ticket = frame.transfers[i].ticket;
  }
}

void StepRecorder::RunAlone(const Instruction& at, Frame& frame, OpSample& sample) {
  const auto wait = [](Comm* comm, Result<Ticket> ticket) {
    if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
    const Status status = comm->Wait(*ticket);
    if (!status.ok()) TORCH_CHECK(false, status.error().ToString());
  };
  for (const auto& [axis, comm] : comms_) {
    if (comm->spec().messages || IsAlongStages(axis)) continue;
    wait(comm.get(), comm->StartAllReduce(at::zeros({1}, at::kInt), "meeting before " + program_.op(at.op).name));
  }
  const size_t first = frame.transfers.size();
  sample.begin_ns = NanosNow();
  const int64_t cpu = NanosOf(CLOCK_PROCESS_CPUTIME_ID);
  at.run(at.data, frame);
  RememberTransfers(at, frame, first);
  for (size_t i = first; i < frame.transfers.size(); ++i) {
    Transfer& transfer = frame.transfers[i];
    wait(transfer.comm, std::exchange(transfer.ticket, 0));
    if (transfer.landed) std::exchange(transfer.landed, {})();
  }
  sample.cpu_ns = NanosOf(CLOCK_PROCESS_CPUTIME_ID) - cpu;
}

}  // namespace interlace
