#include "runtime/step_runner.h"

#include <algorithm>

#include "ir/op_table.h"
#include "ir/text.h"
#include "runtime/debug.h"

namespace interlace {

void StepRunner::SetComms(const std::map<std::string, std::shared_ptr<Comm>>& comms) {
  comms_.clear();
  for (const auto& [axis, comm] : comms) comms_.push_back(comm);
}

void StepRunner::SetRandom(std::unique_ptr<KeyedRandom> random) {
  random_ = std::move(random);
  frame.random = random_.get();
}

void StepRunner::ResetSlots(const std::vector<std::vector<at::Tensor>>* of_turn) {
  turn_ = 0;
  frame.slots = of_turn != nullptr ? of_turn->front() : fixed_;
  parked_slots_ = of_turn != nullptr ? *of_turn : std::vector<std::vector<at::Tensor>>();
}

void StepRunner::UseTurn(int32_t turn) {
  if (turn == turn_) return;
  parked_slots_[turn_].swap(frame.slots);
  frame.slots.swap(parked_slots_[turn]);
  turn_ = turn;
}

void StepRunner::DropTemporaries(const std::vector<std::vector<at::Tensor>>* of_turn) {
  ResetSlots(of_turn);
  std::fill(frame.transfer_of.begin(), frame.transfer_of.end(), -1);
  frame.stack.clear();
  frame.transfers.clear();
  frame.outputs.clear();
  handed_on_.clear();
  saved_.clear();
}

std::vector<int32_t> StepRunner::UsesOfInputs(const std::vector<Program::StepRun>& runs) const {
  std::vector<int32_t> uses(static_cast<size_t>(program_.accumulation), 0);
  for (const Program::StepRun& run : runs) {
    if (run.phase->kind != PhaseKind::kMicroBatch) continue;
    const auto end = std::min<size_t>(uses.size(), static_cast<size_t>(run.first + run.count * program_.width));
    for (auto m = static_cast<size_t>(run.first); m < end; ++m) ++uses[m];
  }
  return uses;
}

Status StepRunner::BindInputs(MicroBatches& micro_batches, size_t first, std::vector<int32_t>& uses) {
  const auto width = static_cast<size_t>(program_.width);
  const size_t inputs = program_.inputs.size() / width;
  if (first + width > micro_batches.size())
    return MakeError("the program has more micro-batch phases than micro-batches");
  for (size_t m = 0; m < width; ++m) {
    const bool last = --uses[first + m] == 0;
    for (size_t j = 0; j < inputs; ++j) {
      at::Tensor& slot = frame.slots[program_.inputs[m * inputs + j].value];
      at::Tensor& given = micro_batches[first + m][j];
      slot = last ? std::move(given) : given;
    }
  }
  return Ok{};
}

Status StepRunner::EnterPhase(const Phase& phase, const PlanVariant* variant, size_t micro_batch) {
  if (!phase.takes.empty()) INTERLACE_TRY(Take(phase, variant));
  for (const Carried& load : phase.loads) {
    const bool here = InArena(variant, load.value);  // where it was saved
    auto saved = saved_.extract({load.name, micro_batch});
    if (saved.empty() && !here) {
      return MakeError("the phase ", phase.name, " loads ", load.name, " of micro-batch ", micro_batch,
                       ", which no run has saved");
    }
    if (!here) frame.slots[load.value] = std::move(saved.mapped().tensor);
    frame.transfer_of[load.value] = saved.empty() ? -1 : saved.mapped().transfer;
  }
  return Ok{};
}

Status StepRunner::Take(const Phase& phase, const PlanVariant* variant) {
  if (handed_on_.size() != phase.takes.size()) {
    return MakeError("the phase ", phase.name, " takes ", phase.takes.size(), " values, but the phase before gave ",
                     handed_on_.size());
  }
  for (size_t i = 0; i < phase.takes.size(); ++i) {
    at::Tensor& slot = frame.slots[phase.takes[i]];
    auto& [given, transfer] = handed_on_[i];
    if (InArena(variant, phase.takes[i])) {
      if (given.const_data_ptr() != slot.const_data_ptr()) {  // made by another plan, or a view of something larger
        if (transfer >= 0 && frame.transfers[transfer].ticket != 0) {
          INTERLACE_TRY(frame.transfers[transfer].comm->Wait(std::exchange(frame.transfers[transfer].ticket, 0)));
        }
        slot.copy_(given);
      }
    } else if (!IsFixed(phase.takes[i])) {
      slot = std::move(given);
    }
    frame.transfer_of[phase.takes[i]] = transfer;
  }
  handed_on_.clear();
  return Ok{};
}

void StepRunner::LeavePhase(const Phase& phase, const PlanVariant* variant, size_t micro_batch) {
  for (ValueId id : phase.gives) {
    handed_on_.emplace_back(frame.slots[id], frame.transfer_of[id]);
    if (!IsFixed(id) && !InArena(variant, id)) frame.slots[id].reset();
    frame.transfer_of[id] = -1;
  }
  for (const Carried& save : phase.saves) {
    Saved saved;
    if (!InArena(variant, save.value)) saved.tensor = std::move(frame.slots[save.value]);
    const int32_t transfer = frame.transfer_of[save.value];
    if (transfer >= 0 && frame.transfers[transfer].ticket != 0) saved.transfer = transfer;
    if (saved.tensor.defined() || saved.transfer >= 0) saved_[{save.name, micro_batch}] = std::move(saved);
  }
}

Error StepRunner::OpFailure(OpId id, const std::string& what) const {
  const Op& op = program_.op(id);
  std::string message = op.name + " failed: " + what + "\n  op:     " + PrintOp(program_, op);
  const std::string module = ModuleOf(program_, op), source = SourceOf(program_, op);
  if (!module.empty()) message += "\n  module: " + module + " (" + program_.modules[op.module].class_name + ")";
  if (!source.empty()) message += "\n  source: " + source;
  if (!frame.device.is_cpu()) {
    message += "\n  lane:   " + std::string(LaneName(LaneOf(op))) + " of " + frame.device.str() +
               "; an error of the device itself may be of an op before it";
  }
  return Error{message, {}};
}

Error StepRunner::KeptBlock(OpId id) const {
  return OpFailure(
      id,
      "it keeps memory that it gave back in the steps that the memory plan was made from; train without the arena "
      "(arena=False)");
}

StepRunner::Place StepRunner::Where() const {
  Place place{.step = at_step_.load(std::memory_order_relaxed), .op = "", .units = "", .module = ""};
  const OpId id = at_op_.load(std::memory_order_relaxed);
  if (id == kNone) return place;
  const Op& op = program_.op(id);
  place.op = PrintOp(program_, op);
  for (UnitId unit : op.units) place.units += (place.units.empty() ? "u" : " u") + std::to_string(unit);
  place.module = ModuleOf(program_, op);
  return place;
}

}  // namespace interlace
