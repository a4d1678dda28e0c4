// Executor, second half: steps.
#include "runtime/executor.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "runtime/allocator.h"
#include "runtime/step_heap.h"
#include "runtime/step_scope.h"

namespace interlace {

namespace {

std::string PeakOpOf(const Program& program, const MemoryPlan& plan) {
  for (const PlanVariant& v : plan.variants) {
    const int64_t place = int64_t{plan.packing.live_at} - v.axis - 1;
    if (place >= 0 && place < static_cast<int64_t>(v.phase->ops.size()))
      return PrintOp(program, program.op(v.phase->ops[place]));
  }
  return "";
}

size_t HyperCount(const std::string& optimizer) {
  return optimizer == "adamw" || optimizer == "adam" || optimizer == "sgd" ? 7 : 0;
}

}  // namespace

Status Executor::Settle() {
  // States that move give up their memory before the update: what a snapshot has not copied of them is copied now.
  if (!moving_.empty() && frame_.before_update) frame_.before_update();
  INTERLACE_TRY(bank_->Drain());
  for (const bool out : {true, false}) {  // room is made before it is taken
    for (const auto& [id, wanted_out] : moving_) {
      const c10::Storage& storage = fixed_[id].storage();
      if (wanted_out != out || IsOut(storage, geometry_[id].end_bytes()) == out) continue;
      INTERLACE_TRY(out ? bank_->Out(id, storage) : bank_->In(id, storage));
    }
  }
  return Ok{};
}

Status Executor::PutBack(ValueId id) {
  for (const auto& [state, out] : moving_) {
    const c10::Storage& storage = fixed_[state].storage();
    if (state != id || !out || IsOut(storage, geometry_[id].end_bytes())) continue;
    INTERLACE_TRY(bank_->StartOut(id, storage, /*clean=*/true));
    return bank_->FinishOut(id, storage);
  }
  return Ok{};
}

Result<at::Tensor> Executor::TensorOf(ValueId id) {
  if (!program_.HasValue(id)) return MakeError("the program has no value %", id);
  if (!fixed_[id].defined())
    return MakeError("%", id, " is no state, parameter, buffer or constant; it lives only within a step");
  const ValueId root = program_.RootOf(id);
  if (bank_->Has(root) && IsOut(fixed_[root].storage(), geometry_[root].end_bytes())) {
    MemoryScope counted;
    INTERLACE_TRY(bank_->In(root, fixed_[root].storage()));
  }
  return fixed_[id];
}

Result<bool> Executor::Flush() {
  if (!frame_.pending.on) return false;
  StepScope scope(device_);
  MemoryScope memory;
  const StepHeap::Serving serving(on_heap_);
  const int64_t live_before = MemoryScope::Use().live_bytes;
  Status status = Ok{};
  try {
    if (!pending_plan_) {
      INTERLACE_ASSIGN(pending_plan_, BuildPhase(pending_phase_, fixed_, /*keep_operands=*/false, nullptr));
    }
    status = RunPending(*pending_plan_);
  } catch (const std::exception& error) {
    status = MakeError("cannot prepare the pending optimizer step: ", MessageOf(error));
  }
  frame_.transfers.clear();
  frame_.pending.on = false;
  if (status.ok() && !moving_.empty()) status = Settle();  // what came into memory was changed: the tier gets it
  peak_extra_ =
      std::max(peak_extra_, MemoryScope::Use().peak_bytes - live_before - (arena_ ? arena_->plan().top() : 0));
  if (status.ok()) return true;
  DropTemporaries();
  return status.error();
}

// By itself, without the program's reloads and offloads: a state that lies out comes in for the ops that touch it and
// leaves behind the last of them, so that there are never more of them in memory than a step has.
Status Executor::RunPending(const Plan& plan) {
  std::unordered_map<ValueId, OpId>
      last;  // by root: the op behind which it may leave; kNone: a transfer may still read it
  const auto touched = [&](OpId id, const auto& visit) {
    const Op& op = std::as_const(program_).op(id);
    size_t lying = StepsOnHost(op) ? FlatOperands(op) : 0;  // what is stepped where it lies stays there
    ForEachOperand(op, [&](ValueId operand) { lying > 0 ? static_cast<void>(--lying) : visit(operand); });
    for (ValueId result : op.results) {
      if (result != kNone && fixed_[result].defined()) visit(result);
    }
  };
  for (const Instruction& at : plan.instructions) {
    const bool starts = program_.op(at.op).name.ends_with(".start");
    touched(at.op, [&](ValueId id) {
      OpId& op = last.try_emplace(program_.RootOf(id), at.op).first->second;
      op = starts || op == kNone ? kNone : at.op;
    });
  }
  for (const Instruction& at : plan.instructions) {
    Status status = Ok{};
    touched(at.op, [&](ValueId id) {
      if (!status.ok() || !fixed_[id].defined()) return;
      if (Result<at::Tensor> in_memory = TensorOf(id); !in_memory.ok()) status = in_memory.error();
    });
    const Op& op = std::as_const(program_).op(at.op);
    for (size_t i = 0; StepsOnHost(op) && i < FlatOperands(op) && status.ok(); ++i) {
      const c10::Storage& storage = fixed_[op.args[i].value].storage();
      if (!IsOut(storage, geometry_[op.args[i].value].end_bytes())) status = bank_->Out(op.args[i].value, storage);
    }
    INTERLACE_TRY(status);
    try {
      AtOp(at.op);
      at.run(at.data, frame_);
    } catch (const std::exception& error) {
      return OpFailure(at.op, MessageOf(error));
    }
    for (int32_t i = at.free_begin; i < at.free_end; ++i) frame_.slots[plan.frees[i]].reset();
    MoveTransfers();
    for (const auto& [id, out] : moving_) {
      const auto found = last.find(id);
      if (!out || found == last.end() || found->second != at.op) continue;
      INTERLACE_TRY(bank_->Out(id, fixed_[id].storage()));
    }
  }
  frame_.counters.ops += static_cast<int64_t>(plan.instructions.size());
  return Ok{};
}

Status Executor::CheckInputs(std::vector<std::vector<at::Tensor>>& micro_batches) const {
  if (static_cast<int64_t>(micro_batches.size()) != program_.accumulation) {
    return MakeError("the program takes ", program_.accumulation, " micro-batches a step, got ", micro_batches.size());
  }
  const auto width = static_cast<size_t>(program_.width);
  const size_t count = program_.inputs.size() / width;  // of one micro-batch
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    std::vector<at::Tensor>& inputs = micro_batches[m];
    if (inputs.size() != count) {
      std::string names;
      for (size_t i = 0; i < count; ++i) names += (names.empty() ? "" : ", ") + program_.inputs[i].name;
      return MakeError("micro-batch ", m, " has ", inputs.size(), " inputs, the program takes ", count, ": ", names);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Geometry& g = geometry_[program_.inputs[m % width * count + i].value];
      at::Tensor& tensor = inputs[i];
      const bool defined = tensor.defined();
      if (!defined || !SameSizes(tensor, g) || tensor.device() != device_ || tensor.layout() != c10::Layout::Strided) {
        return MakeError("input \"", program_.inputs[i].name, "\" of micro-batch ", m, ": expected ", Describe(g),
                         " on ", device_.str(), ", got ", Describe(tensor),
                         defined ? " on " + tensor.device().str() : "");
      }
      if (tensor.requires_grad() || tensor.is_conj() || tensor.is_neg())
        tensor = tensor.detach().resolve_conj().resolve_neg();
      // Views in the program count from the start of the storage.
      if (!SameStrides(tensor, g) || tensor.storage_offset() != 0) {
        at::Tensor own = Allocate(g, device_, false);
        own.copy_(tensor);
        tensor = std::move(own);
      }
    }
  }
  return Ok{};
}

Status Executor::CheckHyper(const std::vector<std::vector<double>>& hyper) const {
  if (hyper.size() != program_.groups.size()) {
    return MakeError("the program has ", program_.groups.size(), " optimizer groups, got numbers for ", hyper.size());
  }
  for (size_t i = 0; i < hyper.size(); ++i) {
    const size_t wanted = HyperCount(program_.groups[i].optimizer);
    if (hyper[i].size() != wanted) {
      return MakeError("optimizer group ", program_.groups[i].id, " (", program_.groups[i].optimizer, ") needs ",
                       wanted, " numbers, got ", hyper[i].size());
    }
  }
  return Ok{};
}

Error Executor::OpFailure(OpId id, const std::string& what) const {
  const Op& op = program_.op(id);
  std::string message = op.name + " failed: " + what + "\n  op:     " + PrintOp(program_, op);
  const std::string module = ModuleOf(program_, op), source = SourceOf(program_, op);
  if (!module.empty()) message += "\n  module: " + module + " (" + program_.modules[op.module].class_name + ")";
  if (!source.empty()) message += "\n  source: " + source;
  return Error{message, {}};
}

void Executor::AtOp(OpId op) {
  at_op_.store(op, std::memory_order_relaxed);
  MemoryScope::SetCurrentOp(op);
}

Executor::Place Executor::Where() const {
  Place place{.step = at_step_.load(std::memory_order_relaxed), .op = "", .units = "", .module = ""};
  const OpId id = at_op_.load(std::memory_order_relaxed);
  if (id == kNone) return place;
  const Op& op = program_.op(id);
  place.op = PrintOp(program_, op);
  for (UnitId unit : op.units) place.units += (place.units.empty() ? "u" : " u") + std::to_string(unit);
  place.module = ModuleOf(program_, op);
  return place;
}

Error Executor::KeptBlock(OpId id) const {
  return OpFailure(
      id,
      "it keeps memory that it gave back in the steps that the memory plan was made from; train without the arena "
      "(arena=False)");
}

Status Executor::RunPhase(const Plan& plan) {
  const Instruction* at = plan.instructions.data();
  const Instruction* const end = at + plan.instructions.size();
  try {
    for (; at != end; ++at) {
      AtOp(at->op);
      ArenaHook::Expect(at->op, plan.expected.data() + at->expect_begin, plan.expected.data() + at->expect_end);
      at->run(at->data, frame_);
      if (learning_) Learn(plan, *at);
      if (ArenaHook::Outstanding() != 0) return KeptBlock(at->op);
      for (int32_t i = at->free_begin; i < at->free_end; ++i) frame_.slots[plan.frees[i]].reset();
      MoveTransfers();
    }
  } catch (const std::exception& error) {
    return OpFailure(at->op, MessageOf(error));
  }
  frame_.counters.ops += static_cast<int64_t>(plan.instructions.size());
  return Ok{};
}

Status Executor::RunPhaseObserved(const Plan& plan, bool update, DebugObserver& observer) {
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction& at = plan.instructions[i];
    if (!update && program_.op(at.op).part == Part::kUpdate) continue;  // of a unit whose gradient is complete
    try {
      AtOp(at.op);
      at.run(at.data, frame_);
      if (!observer.AfterOp(at.index, at.op, frame_.slots)) {
        observer.stopped = true;
        return Ok{};
      }
      for (int32_t j = at.free_begin; j < at.free_end; ++j) frame_.slots[plan.frees[j]].reset();
      MoveTransfers();
    } catch (const std::exception& error) {
      return OpFailure(at.op, MessageOf(error));
    }
  }
  frame_.counters.ops += static_cast<int64_t>(plan.instructions.size());
  return Ok{};
}

Status Executor::EnterPhase(const Phase& phase, const PlanVariant* variant) {
  if (phase.takes.empty()) return Ok{};
  if (handed_on_.size() != phase.takes.size()) {
    return MakeError("the phase ", phase.name, " takes ", phase.takes.size(), " values, but the phase before gave ",
                     handed_on_.size());
  }
  for (size_t i = 0; i < phase.takes.size(); ++i) {
    at::Tensor& slot = frame_.slots[phase.takes[i]];
    auto& [given, transfer] = handed_on_[i];
    if (InArena(variant, phase.takes[i])) {
      if (given.const_data_ptr() != slot.const_data_ptr()) {  // made by another plan, or a view of something larger
        if (transfer >= 0 && frame_.transfers[transfer].ticket != 0) {
          INTERLACE_TRY(frame_.transfers[transfer].comm->Wait(std::exchange(frame_.transfers[transfer].ticket, 0)));
        }
        slot.copy_(given);
      }
    } else if (!fixed_[phase.takes[i]].defined()) {
      slot = std::move(given);
    }
    frame_.transfer_of[phase.takes[i]] = transfer;
  }
  handed_on_.clear();
  return Ok{};
}

void Executor::LeavePhase(const Phase& phase, const PlanVariant* variant) {
  for (ValueId id : phase.gives) {
    handed_on_.emplace_back(frame_.slots[id], frame_.transfer_of[id]);
    if (!fixed_[id].defined() && !InArena(variant, id)) frame_.slots[id].reset();
    frame_.transfer_of[id] = -1;
  }
}

void Executor::DropTemporaries() {
  ResetSlots();
  std::fill(frame_.transfer_of.begin(), frame_.transfer_of.end(), -1);
  frame_.stack.clear();
  frame_.transfers.clear();
  frame_.outputs.clear();
  handed_on_.clear();
}

Status Executor::RunStep(std::vector<std::vector<at::Tensor>>& micro_batches, const std::vector<Plan>& plans,
                         int64_t step, bool update, DebugObserver* observer) {
  frame_.outputs.clear();
  frame_.has_norm = false;
  frame_.finite = true;
  frame_.coef = 1;
  const auto width = static_cast<size_t>(program_.width);
  const size_t inputs = program_.inputs.size() / width;
  size_t micro_batch = 0;
  const bool in_arena = arena_ && observer == nullptr;
  size_t entry = 0;
  for (const auto& [phase, count] : program_.RunOrder()) {
    const size_t this_entry = entry++;
    const bool takes_inputs = phase->kind == PhaseKind::kMicroBatch;
    if (!takes_inputs && !update) continue;
    for (int64_t i = 0; i < count; ++i) {
      const size_t index = PlanIndex(phase, this_entry, i, in_arena);
      const Plan& plan = plans[index];
      const PlanVariant* variant = in_arena ? &arena_->plan().variants[index] : nullptr;
      if (variant != nullptr) UseTurn(variant->turn);
      INTERLACE_TRY(EnterPhase(*phase, variant));
      if (random_) random_->SetPosition(static_cast<uint64_t>(step), micro_batch);
      if (takes_inputs) {
        if (micro_batch + width > micro_batches.size())
          return MakeError("the program has more micro-batch phases than micro-batches");
        for (size_t j = 0; j < program_.inputs.size(); ++j)
          frame_.slots[program_.inputs[j].value] = std::move(micro_batches[micro_batch + j / inputs][j % inputs]);
      }
      for (ValueId id : plan.unused) frame_.slots[id].reset();
      if (observer) {
        observer->BeginPhase(*phase, static_cast<int64_t>(micro_batch));
        INTERLACE_TRY(RunPhaseObserved(plan, update, *observer));
        if (observer->stopped) return Ok{};
      } else {
        INTERLACE_TRY(record_.mode == TraceMode::kOff ? RunPhase(plan) : RunPhaseRecorded(plan));
      }
      LeavePhase(*phase, variant);
      if (takes_inputs) micro_batch += width;
    }
  }
  return Ok{};
}

Result<StepResult> Executor::Step(std::vector<std::vector<at::Tensor>> micro_batches,
                                  const std::vector<std::vector<double>>& hyper, int64_t step) {
  INTERLACE_TRY(CheckInputs(micro_batches));
  INTERLACE_TRY(CheckHyper(hyper));
  const at::ThreadLocalState outer;
  StepScope scope(device_);
  MemoryScope memory;
  const StepHeap::Serving serving(on_heap_);
  INTERLACE_TRY(Settle());
  settled_bytes_ = store_.bytes();
  // Receive buffers that earlier steps made belong to this one as much: only what callers still hold of those does not.
  int64_t kept = 0;
  for (const auto& [name, comm] : comms_) kept += comm->stats().receive_buffer_peak_bytes;
  const int64_t live_before = live_before_ = std::max<int64_t>(MemoryScope::Use().live_bytes - kept, 0);
  BeginRecord();
  at_step_.store(step, std::memory_order_relaxed);
  frame_.hyper = &hyper;
  frame_.outer = &outer;

  std::optional<DebugObserver> observer;
  if (options_.debug) {
    if (debug_plans_.empty()) INTERLACE_TRY(BuildPlans(/*keep_operands=*/true, debug_plans_));
    observer.emplace(program_, /*record_all=*/false, "");
  }
  TakeTheFloor();
  if (arena_) ArenaHook::Begin(learning_ ? &log_ : nullptr);
  const Status status =
      RunStep(micro_batches, observer ? debug_plans_ : plans_, step, /*update=*/true, observer ? &*observer : nullptr);
  ArenaHook::End();
  EndRecord();
  if (!status.ok()) {
    (void)bank_->Drain();  // the failure that stopped the step is the one to tell
    DropTemporaries();
    frame_.pending.on = false;  // some of it was made
    return status.error();
  }
  INTERLACE_TRY(bank_->Drain());  // steps on the host that nothing has waited for
  ++frame_.counters.steps;
  frame_.transfers.clear();
  if (!pending_phase_.ops.empty()) {
    const bool counts = !frame_.has_norm || frame_.finite || !options_.skip_nonfinite;
    frame_.pending = {counts, frame_.coef, hyper};
  }
  const MemoryUse use = MemoryScope::Use();
  if (use.peak_bytes - live_before > peak_extra_) {
    peak_extra_ = use.peak_bytes - live_before;
    peak_op_ = use.peak_op;
  }
  live_extra_ = use.live_bytes - live_before;
  INTERLACE_TRY(SettleArena());

  StepResult result;
  result.outputs = std::move(frame_.outputs);
  frame_.outputs.clear();
  result.has_norm = frame_.has_norm;
  result.norm = frame_.norm;
  result.finite = !frame_.has_norm || frame_.finite;
  for (const auto& [name, tensors] : result.outputs) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() == 1 && tensor.is_floating_point() && !std::isfinite(tensor.item<double>()))
        result.finite = false;
    }
  }
  if (observer) result.nonfinite = std::move(observer->culprit);
  return result;
}

Result<DebugReport> Executor::DebugStep(std::vector<std::vector<at::Tensor>> micro_batches, int64_t step,
                                        const std::string& stop_at) {
  INTERLACE_TRY(CheckInputs(micro_batches));
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
  frame_.outer = &outer;
  INTERLACE_TRY(Settle());
  if (debug_plans_.empty()) INTERLACE_TRY(BuildPlans(/*keep_operands=*/true, debug_plans_));
  frame_.slots = fixed_;  // not those in the arena; DropTemporaries puts them back
  std::vector<std::pair<at::Tensor, at::Tensor>> saved;
  for (const Buffer& buffer : program_.buffers) {
    const at::Tensor& tensor = fixed_[buffer.value];
    saved.emplace_back(tensor, tensor.clone());
  }
  DebugObserver observer(program_, /*record_all=*/true, stop_at);
  Status status = RunStep(micro_batches, debug_plans_, step, /*update=*/false, &observer);
  for (Transfer& transfer : frame_.transfers) {
    if (!status.ok() || transfer.ticket == 0) continue;
    status = transfer.comm->Wait(transfer.ticket);  // stopped half-way: what is under way must still arrive
  }
  for (auto& [tensor, copy] : saved) tensor.copy_(copy);
  if (const Status drained = bank_->Drain(); status.ok()) status = drained;
  DropTemporaries();
  if (!status.ok()) return status.error();
  return std::move(observer.report);
}

Result<at::Tensor> Executor::GatherUnit(UnitId id) {
  if (id < 0 || id >= static_cast<UnitId>(program_.units.size())) return MakeError("the program has no unit u", id);
  INTERLACE_TRY(Flush());
  const Unit& unit = program_.units[id];
  const ValueId full = program_.FindState(id, "full");
  if (full != kNone) return TensorOf(full);
  const ValueId shard = program_.FindState(id, "shard");
  if (shard == kNone) return MakeError("unit u", id, " has neither a shard nor a full buffer");
  const auto comm = comms_.find(unit.axis);
  INTERLACE_ASSIGN(const at::Tensor own, TensorOf(shard));
  if (comm == comms_.end()) return own;
  StepScope scope(device_);
  Geometry g = geometry_[shard];
  g.sizes = {unit.numel};
  g.strides = {1};
  g.elements = g.span = unit.numel;
  g.offset = 0;
  at::Tensor out = Allocate(g, device_, false);
  INTERLACE_ASSIGN(const Ticket ticket, comm->second->StartGather({own}, {out}, "gather_unit u" + std::to_string(id)));
  INTERLACE_TRY(comm->second->Wait(ticket));
  return out;
}

ExecutorStats Executor::stats() const {
  ExecutorStats stats;
  stats.counters = frame_.counters;
  stats.persistent_bytes = (frame_.counters.steps > 0 ? settled_bytes_ : store_.bytes()) + const_bytes_;
  if (bank_->tier() != nullptr) {
    stats.tier = bank_->tier()->stats();
    stats.heap_bytes = StepHeap::Bytes();
    stats.tier_note = bank_->tier()->note();
  }
  if (device_.is_cpu()) {
    stats.live_bytes = stats.persistent_bytes + live_extra_;
    stats.peak_bytes = stats.persistent_bytes + peak_extra_ + (arena_ ? arena_->plan().top() : 0);
    if (arena_) {
      stats.peak_op = PeakOpOf(program_, arena_->plan());
    } else if (peak_op_ != kNone)
      stats.peak_op = PrintOp(program_, program_.op(peak_op_));
  } else {
    const auto device =
        c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.has_index() ? device_.index() : 0);
    const auto& total = device.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    stats.live_bytes = total.current;
    stats.peak_bytes = total.peak;
  }
  std::map<std::string, int64_t> counts;
  for (size_t i = 0; i < plans_.size(); ++i) {
    const Plan& plan = plans_[i];
    if (arena_ && arena_->plan().variants[i].turn > 0) continue;  // the same phase again
    stats.instructions += static_cast<int64_t>(plan.instructions.size());
    for (const Instruction& instruction : plan.instructions) ++counts[program_.op(instruction.op).name];
  }
  stats.op_counts.assign(counts.begin(), counts.end());
  for (const auto& [name, comm] : comms_) {
    const Comm::Stats one = comm->stats();
    stats.comm.bytes_sent += one.bytes_sent;
    stats.comm.bytes_received += one.bytes_received;
    stats.comm.receive_buffer_peak_bytes =
        std::max(stats.comm.receive_buffer_peak_bytes, one.receive_buffer_peak_bytes);
    stats.comm.calls += one.calls;
  }
  return stats;
}

}  // namespace interlace
