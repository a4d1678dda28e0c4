// Executor, third part: steps that are recorded op by op (recorder.h).
#include <ATen/ops/zeros.h>

#include "ir/liveness.h"
#include "runtime/allocator.h"
#include "runtime/executor.h"
#include "runtime/step_scope.h"

namespace interlace {

void Executor::BeginRecord() {
  record_.mode = TraceMode::kOff;
  if (!device_.is_cpu()) return;
  record_.mode = trace_mode_ == TraceMode::kOff && options_.trace_memory ? TraceMode::kOn : trace_mode_;
  if (record_.mode == TraceMode::kOff) return;
  record_.phases.clear();
  record_.samples.clear();
  record_.transfers.clear();
  size_t instructions = 0;
  size_t entry = 0;
  for (const auto& [phase, count] : program_.RunOrder())
    instructions +=
        plans_[PlanIndex(phase, entry++, 0, arena_ != nullptr)].instructions.size() * static_cast<size_t>(count);
  record_.samples.reserve(instructions);
  record_.persistent_bytes = store_.bytes() + const_bytes_;
  for (const auto& [name, comm] : comms_) comm->SetRecording(true);
  record_.begin_ns = NanosOf(CLOCK_MONOTONIC);
}

void Executor::EndRecord() {
  if (record_.mode == TraceMode::kOff) return;
  record_.end_ns = NanosOf(CLOCK_MONOTONIC);
  for (TransferSample& sample : record_.transfers) {
    if (sample.comm != nullptr) sample.times = sample.comm->TakeTimes(sample.ticket);
  }
  std::erase_if(record_.transfers, [](const TransferSample& sample) { return sample.times.end_ns == 0; });
  for (const auto& [name, comm] : comms_) comm->SetRecording(false);
}

// The transfers that an op has just started: those of the frame from `first` on.
void Executor::RememberTransfers(const Instruction& at, int32_t run, size_t first) {
  for (size_t i = first; i < frame_.transfers.size(); ++i) {
    TransferSample& sample = record_.transfers.emplace_back();
    sample.op = at.op;
    sample.run = run;
    sample.comm = frame_.transfers[i].comm;
    sample.ticket = frame_.transfers[i].ticket;
  }
}

void Executor::RunAlone(const Instruction& at, OpSample& sample) {
  const auto wait = [](Comm* comm, Result<Ticket> ticket) {
    if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
    const Status status = comm->Wait(*ticket);
    if (!status.ok()) TORCH_CHECK(false, status.error().ToString());
  };
  for (const auto& [name, comm] : comms_)
    wait(comm.get(), comm->StartAllReduce(at::zeros({1}, at::kInt), "meeting before " + program_.op(at.op).name));
  const size_t first = frame_.transfers.size();
  sample.begin_ns = NanosOf(CLOCK_MONOTONIC);
  const int64_t cpu = NanosOf(CLOCK_PROCESS_CPUTIME_ID);
  at.run(at.data, frame_);
  RememberTransfers(at, sample.run, first);
  for (size_t i = first; i < frame_.transfers.size(); ++i)
    wait(frame_.transfers[i].comm, std::exchange(frame_.transfers[i].ticket, 0));
  sample.cpu_ns = NanosOf(CLOCK_PROCESS_CPUTIME_ID) - cpu;
}

// Bytes in the arena before each op of the phase, and while it runs.
Executor::ArenaLive Executor::LiveInArena(const Plan& plan) const {
  ArenaLive out;
  if (!arena_) return out;
  const Result<PhaseLiveness> liveness = ComputeLiveness(program_, *plan.phase);
  if (!liveness.ok()) return out;
  for (size_t i = 0; i < plan.phase->ops.size(); ++i)
    out.at.emplace_back(liveness->live_before[i], liveness->live_before[i]);
  for (const StorageLife& life : liveness->storages) {
    if (life.first >= 0) out.at[life.first].second += life.bytes;
  }
  const std::vector<OpNeeds>& needs = needs_[plan.phase - program_.phases.data()];
  for (size_t i = 0; i < out.at.size(); ++i) out.at[i].second += needs[i].workspace;
  return out;
}

Status Executor::RunPhaseRecorded(const Plan& plan) {
  const auto run = static_cast<int32_t>(record_.phases.size());
  record_.phases.push_back(plan.phase);
  const bool serial = record_.mode == TraceMode::kSerial;
  const ArenaLive live = LiveInArena(plan);
  MemoryScope::TakePeak();
  int64_t now = NanosOf(CLOCK_MONOTONIC);
  const Instruction* at = plan.instructions.data();
  const Instruction* const end = at + plan.instructions.size();
  try {
    for (; at != end; ++at) {
      OpSample& sample = record_.samples.emplace_back();
      sample.op = at->op;
      sample.run = run;
      sample.begin_ns = now;
      sample.live_before = MemoryScope::Use().live_bytes - live_before_;
      AtOp(at->op);
      ArenaHook::Expect(at->op, plan.expected.data() + at->expect_begin, plan.expected.data() + at->expect_end);
      if (serial && program_.op(at->op).name.ends_with(".start")) {
        RunAlone(*at, sample);
      } else {
        const size_t transfers = frame_.transfers.size();
        const int64_t cpu = serial ? NanosOf(CLOCK_THREAD_CPUTIME_ID) : 0;
        at->run(at->data, frame_);
        if (serial) sample.cpu_ns = NanosOf(CLOCK_THREAD_CPUTIME_ID) - cpu;
        RememberTransfers(*at, run, transfers);
      }
      if (learning_) Learn(plan, *at);
      if (ArenaHook::Outstanding() != 0) return KeptBlock(at->op);
      sample.peak_bytes = MemoryScope::TakePeak() - live_before_;
      if (!live.at.empty()) {
        sample.live_before += live.at[at->index].first;
        sample.peak_bytes += live.at[at->index].second;
      }
      for (int32_t i = at->free_begin; i < at->free_end; ++i) frame_.slots[plan.frees[i]].reset();
      MoveTransfers();
      sample.end_ns = now = NanosOf(CLOCK_MONOTONIC);
    }
  } catch (const std::exception& error) {
    return OpFailure(at->op, MessageOf(error));
  }
  frame_.counters.ops += static_cast<int64_t>(plan.instructions.size());
  return Ok{};
}

}  // namespace interlace
