#include "runtime/moving_states.h"

#include <algorithm>
#include <unordered_set>

#include "ir/op_table.h"
#include "ir/residency.h"
#include "runtime/allocator.h"
#include "runtime/state_store.h"

namespace interlace {

Status MovingStates::Find() {
  const Residency residency = ComputeResidency(program_);
  std::unordered_set<ValueId> copied;
  ForEachOp(program_, [&](const Op& op) {
    if (op.kind != OpKind::kOffloadStart || IsClean(op)) return;
    ForEachOperand(op, [&](ValueId operand) { copied.insert(operand); });
  });
  for (const State& state : program_.states) {
    if (program_.RootOf(state.value) != state.value) continue;
    const bool moves =
        std::find(residency.states.begin(), residency.states.end(), state.value) != residency.states.end();
    if (!moves && !Out(state.value)) continue;
    INTERLACE_TRY(bank_->Add(state.value, StateKey(state), geometry_[state.value].end_bytes(),
                             state.persistent || copied.contains(state.value)));
    states_.emplace_back(state.value, state.out);
  }
  return Ok{};
}

Status MovingStates::Settle() {
  INTERLACE_TRY(bank_->Drain());
  for (const bool out : {true, false}) {  // room is made before it is taken
    for (const auto& [id, wanted_out] : states_) {
      if (wanted_out != out || Out(id) == out) continue;
      const c10::Storage& storage = fixed_[id].storage();
      INTERLACE_TRY(out ? bank_->Out(id, storage) : bank_->In(id, storage));
    }
  }
  return Ok{};
}

Status MovingStates::BringIn(ValueId id) {
  const ValueId root = program_.RootOf(id);
  if (!bank_->Has(root) || !Out(root)) return Ok{};
  const MemoryScope counted;
  return bank_->In(root, fixed_[root].storage());
}

Status MovingStates::PutBack(ValueId id) {
  for (const auto& [state, out] : states_) {
    if (state != id || !out || Out(id)) continue;
    const c10::Storage& storage = fixed_[id].storage();
    INTERLACE_TRY(bank_->StartOut(id, storage, /*clean=*/true));
    return bank_->FinishOut(id, storage);
  }
  return Ok{};
}

template <typename Visit>
void PendingStates::ForEachTouched(OpId id, Visit&& visit) const {
  const Op& op = states_.program_.op(id);
  size_t lying = StepsOnHost(op) ? FlatOperands(op) : 0;
  ForEachOperand(op, [&](ValueId operand) { lying > 0 ? static_cast<void>(--lying) : visit(operand); });
  for (ValueId result : op.results) {
    if (result != kNone && states_.fixed_[result].defined()) visit(result);
  }
}

PendingStates::PendingStates(MovingStates& states, const Plan& plan) : states_(states) {
  for (const Instruction& at : plan.instructions) {
    const bool starts = IsStart(states_.program_.op(at.op));
    ForEachTouched(at.op, [&](ValueId id) {
      OpId& op = last_.try_emplace(states_.program_.RootOf(id), at.op).first->second;
      op = starts || op == kNone ? kNone : at.op;
    });
  }
}

Status PendingStates::Before(const Instruction& at) {
  Status status = Ok{};
  ForEachTouched(at.op, [&](ValueId id) {
    if (status.ok() && states_.fixed_[id].defined()) status = states_.BringIn(id);
  });
  const Op& op = states_.program_.op(at.op);
  for (size_t i = 0; StepsOnHost(op) && i < FlatOperands(op) && status.ok(); ++i) {
    const ValueId id = op.args[i].value;
    if (!states_.Out(id)) status = states_.bank_->Out(id, states_.fixed_[id].storage());
  }
  return status;
}

Status PendingStates::Ended(const Instruction& at) {
  for (const auto& [id, out] : states_.states_) {
    const auto found = last_.find(id);
    if (!out || found == last_.end() || found->second != at.op) continue;
    INTERLACE_TRY(states_.bank_->Out(id, states_.fixed_[id].storage()));
  }
  return Ok{};
}

}  // namespace interlace
