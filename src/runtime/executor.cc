// What callers ask of an executor: steps, looks at its states. How it comes to be: executor_create.cc.
#include "runtime/executor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/suggest.h"
#include "ir/text.h"
#include "runtime/allocator.h"
#include "runtime/step_heap.h"
#include "runtime/step_inputs.h"
#include "runtime/step_scope.h"
#include "runtime/stream.h"

namespace interlace {

Status Executor::Settle() {
  // States that move give up their memory before the update: what a snapshot has not copied of them is copied now.
  if (!moving_.empty() && runner_.frame.before_update) runner_.frame.before_update();
  return moving_.Settle();
}

Result<at::Tensor> Executor::TensorOf(ValueId id) {
  if (!program_.HasValue(id)) return MakeError("the program has no value %", id);
  if (!fixed_[id].defined())
    return MakeError("%", id, " is no state, parameter, buffer or constant; it lives only within a step");
  INTERLACE_TRY(moving_.BringIn(id));
  return fixed_[id];
}

Result<bool> Executor::Flush() {
  Frame& frame = runner_.frame;
  if (!frame.pending.on) return false;
  StepScope scope(device_);
  MemoryScope memory;
  const StepHeap::Serving serving(on_heap_);
  const int64_t live_before = MemoryScope::Use().live_bytes;
  recorder_.BeginOnDevice();
  Status status = Ok{};
  try {
    if (!pending_plan_) {
      INTERLACE_ASSIGN(pending_plan_, BuildPhase(pending_phase_, fixed_, /*keep_operands=*/false, nullptr));
    }
    PendingStates observer(moving_, *pending_plan_);
    status = runner_.RunPhase(*pending_plan_, observer);
  } catch (const std::exception& error) {
    status = MakeError("cannot prepare the pending optimizer step: ", MessageOf(error));
  }
  JoinLanes();
  recorder_.EndOnDevice();
  frame.transfers.clear();
  frame.pending.on = false;
  if (status.ok() && !moving_.empty()) status = Settle();  // what came into memory was changed: the tier gets it
  use_.peak_bytes = std::max(use_.peak_bytes, MemoryScope::Use().peak_bytes - live_before - arena_.top());
  if (status.ok()) return true;
  runner_.DropTemporaries(arena_.slots_of_turn());
  return status.error();
}

void Executor::JoinLanes() {
  if (lanes_) lanes_->Join();
}

Error Executor::DeviceFailure(const std::exception& error) const {
  return MakeError(
      "the device ", device_.str(), " reported an error by the end of the step: ", MessageOf(error),
      "\n  lane:   any; it may be of any op of the step. Config(debug=True) runs op by op; checkpoints that "
      "were written stay, and `load` goes on from them in a new process");
}

void Executor::JoinTransfers() {
  if (device_.is_cpu()) return;
  for (Transfer& transfer : runner_.frame.transfers) {
    if (transfer.ticket != 0) (void)transfer.comm->Wait(std::exchange(transfer.ticket, 0));
  }
}

size_t Executor::CountInstructions() const {
  size_t instructions = 0, entry = 0;
  for (const auto& [phase, count] : program_.RunOrder()) {
    const size_t index = PlanIndexOf(program_, arena_.plan(), phase, entry++, 0);
    instructions += plans_[index].instructions.size() * static_cast<size_t>(count);
  }
  return instructions;
}

Status Executor::RunObserved(MicroBatches& micro_batches, int64_t step, DebugObserver* inspector) {
  if (inspector != nullptr) {
    Inspection observer(program_, *inspector, /*update=*/true, lanes_.get());
    return runner_.RunStep(debug_plans_, nullptr, micro_batches, step, /*update=*/true, observer);
  }
  const auto run = [&](auto&& observer) {
    return runner_.RunStep(plans_, arena_.plan(), micro_batches, step, /*update=*/true, observer);
  };
  if (recorder_.on()) return run(recorder_);
  if (arena_.learning()) return run(arena_);
  if (graphs_.ready()) return run(graphs_);
  return run(NoObserver{});
}

Result<StepResult> Executor::Step(MicroBatches micro_batches, const std::vector<std::vector<double>>& hyper,
                                  int64_t step) {
  INTERLACE_TRY(CheckInputs(program_, geometry_, device_, micro_batches));
  INTERLACE_TRY(CheckHyper(program_, hyper));
  Frame& frame = runner_.frame;
  const at::ThreadLocalState outer;
  StepScope scope(device_);
  MemoryScope memory;
  const StepHeap::Serving serving(on_heap_);
  INTERLACE_TRY(Settle());
  use_.settled_bytes = store_.bytes();
  // Receive buffers that earlier steps made belong to this one as much: only what callers still hold of those does not.
  int64_t kept = 0;
  for (const auto& [name, comm] : comms_) kept += comm->stats().receive_buffer_peak_bytes;
  const int64_t live_before = std::max<int64_t>(MemoryScope::Use().live_bytes - kept, 0);
  const Result<bool> moved = arena_.TakeTheFloor();
  if (!moved.ok()) return WithMemory(moved.error());
  if (*moved) INTERLACE_TRY(RenewArena(/*moved=*/true));
  if (!device_.is_cpu() && use_.device_bytes < 0) {  // the peak is of this program's settled steps, not of what ran before
    use_.device_bytes = recorder_.TakeDeviceBytes();
  }
  recorder_.BeginOnDevice();
  const TraceMode trace = trace_mode_;
  recorder_.Begin(trace, trace == TraceMode::kOff ? 0 : CountInstructions(), store_.bytes() + const_bytes_,
                  live_before);
  frame.hyper = &hyper;
  frame.outer = &outer;
  std::optional<DebugObserver> inspector;
  if (options_.debug) {
    if (debug_plans_.empty()) INTERLACE_TRY(BuildPlans(/*keep_operands=*/true, debug_plans_));
    inspector.emplace(program_, /*record_all=*/false, "");
  }
  arena_.BeginStep();
  Status status = RunObserved(micro_batches, step, inspector ? &*inspector : nullptr);
  try {
    JoinLanes();
    arena_.StopServing();
    recorder_.EndOnDevice();
    recorder_.End();
  } catch (const std::exception& error) {  // of a device that is gone: what an op has told names it better
    if (status.ok()) status = DeviceFailure(error);
  }
  if (!status.ok()) {
    arena_.StopServing();
    JoinTransfers();
    (void)moving_.bank()->Drain();  // the failure that stopped the step is the one to tell
    runner_.DropTemporaries(arena_.slots_of_turn());
    frame.pending.on = false;  // some of it was made
    return runner_.out_of_memory() ? WithMemory(status.error()) : status.error();
  }
  INTERLACE_TRY(moving_.bank()->Drain());  // steps on the host that nothing has waited for
  ++frame.counters.steps;
  frame.transfers.clear();
  if (!pending_phase_.ops.empty()) {
    const bool counts = !frame.has_norm || frame.finite || !options_.skip_nonfinite;
    frame.pending = {counts, frame.coef, hyper};
  }
  const MemoryUse use = MemoryScope::Use();
  if (use.peak_bytes - live_before > use_.peak_bytes) {
    use_.peak_bytes = use.peak_bytes - live_before;
    use_.peak_op = use.peak_op;
  }
  use_.live_bytes = use.live_bytes - live_before;
  if (!device_.is_cpu()) use_.peak_bytes = recorder_.DevicePeak() - use_.device_bytes;
  const bool learned = arena_.learning();
  const bool again = arena_.EndStep(use_.peak_bytes);
  if (learned) {
    use_.peak_bytes = 0;
    use_.device_bytes = -1;
  }
  graphs_.PlansRan();
  if (again) INTERLACE_TRY(RenewArena(/*moved=*/false));
  StepResult result;
  try {
    result = ResultOfStep();
  } catch (const std::exception& error) {
    return DeviceFailure(error);
  }
  if (inspector) result.nonfinite = std::move(inspector->culprit);
  return result;
}

StepResult Executor::ResultOfStep() {
  Frame& frame = runner_.frame;
  StepResult result;
  for (auto& [name, by_micro_batch] : std::exchange(frame.outputs, {})) {
    for (auto& [micro_batch, tensor] : by_micro_batch) result.outputs[name].push_back(std::move(tensor));
  }
  result.has_norm = frame.has_norm;
  result.norm = frame.norm;
  result.finite = !frame.has_norm || frame.finite;
  result.note = graphs_.TakeNote();
  if (result.has_norm && !device_.is_cpu()) return result;  // the host has waited for the norm, which tells as much
  for (const auto& [name, tensors] : result.outputs) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() == 1 && tensor.is_floating_point() && !std::isfinite(tensor.item<double>()))
        result.finite = false;
    }
  }
  return result;
}

Result<DebugReport> Executor::DebugStep(MicroBatches micro_batches, int64_t step, const std::string& stop_at) {
  INTERLACE_TRY(CheckInputs(program_, geometry_, device_, micro_batches));
  if (!stop_at.empty()) {
    std::vector<std::string_view> paths;
    for (const Module& module : program_.modules) paths.push_back(module.path);
    if (std::find(paths.begin(), paths.end(), stop_at) == paths.end()) {
      return MakeError("the program has no module \"", stop_at, "\"", DidYouMean(stop_at, paths));
    }
  }
  INTERLACE_TRY(Flush());  // gradients are made anew where those of the last step lie
  const at::ThreadLocalState outer;
  StepScope scope(device_);
  Frame& frame = runner_.frame;
  frame.outer = &outer;
  INTERLACE_TRY(Settle());
  if (debug_plans_.empty()) INTERLACE_TRY(BuildPlans(/*keep_operands=*/true, debug_plans_));
  runner_.ResetSlots(nullptr);  // not those in the arena; DropTemporaries puts them back
  std::vector<std::pair<at::Tensor, at::Tensor>> saved;
  for (const Buffer& buffer : program_.buffers) {
    const at::Tensor& tensor = fixed_[buffer.value];
    saved.emplace_back(tensor, tensor.clone());
  }
  DebugObserver inspector(program_, /*record_all=*/true, stop_at);
  Inspection observer(program_, inspector, /*update=*/false, lanes_.get());
  Status status = runner_.RunStep(debug_plans_, nullptr, micro_batches, step, /*update=*/false, observer);
  JoinLanes();
  for (Transfer& transfer : frame.transfers) {
    if (!status.ok() || transfer.ticket == 0) continue;
    status = transfer.comm->Wait(transfer.ticket);  // stopped half-way: what is under way must still arrive
  }
  for (auto& [tensor, copy] : saved) tensor.copy_(copy);
  if (const Status drained = moving_.bank()->Drain(); status.ok()) status = drained;
  runner_.DropTemporaries(arena_.slots_of_turn());
  if (!status.ok()) return status.error();
  return std::move(inspector.report);
}

}  // namespace interlace
