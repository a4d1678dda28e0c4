// transient_gradients.cc — a gradient that one op makes and the optimizer step takes in the same step is a value that
// comes and goes, not a state: it lies where activations of the same step lay before.
//
//   before   state %66: bf16[32768] u0.grad step
//            micro_batch:  %495: bf16[512,64] into %66+0 = aten.mm(..)     update:  update.adamw(%25, %66, ..)
//   after    micro_batch:  %495: bf16[512,64] = aten.mm(..)                gives (%495)
//            update:       takes (%t)   %v: bf16[32768] in %t+0 = view(%t)   update.adamw(%25, %v, ..)
//
// Where the parameter does not fill its unit, grad.begin makes the value, and what is behind is 0. So it is with one
// micro-batch a step and nobody to add up gradients with; others stay states, and all where something goes out of
// memory. Source: PyTorch's zero_grad(set_to_none=True).
//
// True when a state went. Runs last: other passes know gradients as states. No errors.
#include <unordered_map>
#include <vector>

#include "ir/residency.h"
#include "ir/touches.h"
#include "passes/passes.h"

namespace interlace {
namespace {

struct Gradient {
  ValueId made = kNone;  // the op's result
  int32_t at = -1;       // index of that op
  bool read_here = false, read_later = false;
  bool stays = false;
};

class Transient {
 public:
  Transient(Program& program, Phase& micro, Phase& update) : program_(program), micro_(micro), update_(update) {}

  bool Run() {
    for (const State& state : program_.states) {
      if (state.role == "grad" && !state.persistent && !state.out) found_.emplace(state.value, Gradient());
    }
    Look();
    std::erase_if(found_, [&](const auto& entry) { return entry.second.stays || !IsWhole(entry.first, entry.second); });
    if (found_.empty()) return false;
    for (const State& state : program_.states) {  // in the order of states, not of a hash
      const auto entry = found_.find(state.value);
      if (entry != found_.end()) Change(entry->first, entry->second);
    }
    std::erase_if(program_.states, [&](const State& state) { return found_.contains(state.value); });
    micro_.ops = Woven(micro_);
    update_.ops.insert(update_.ops.begin(), first_.begin(), first_.end());
    return true;
  }

 private:
  using How = Touch::How;

  void Look() {
    ForEachTouch(std::as_const(program_), micro_, [&](const Touch& touch) {
      const auto entry = found_.find(touch.root);
      if (entry == found_.end()) return;
      Gradient& gradient = entry->second;
      if (touch.how == How::kMakes && gradient.made == kNone) {
        gradient.made = touch.value, gradient.at = touch.at;
      } else {
        const bool plain = touch.how == How::kReads || touch.how == How::kMakes;
        gradient.stays = gradient.stays || !plain || gradient.made == kNone || touch.at <= gradient.at;
        gradient.read_here = gradient.read_here || touch.value == touch.root;
      }
    });
    ForEachTouch(std::as_const(program_), update_, [&](const Touch& touch) {
      const auto entry = found_.find(touch.root);
      if (entry == found_.end()) return;
      entry->second.stays = entry->second.stays || touch.how != How::kReads;
      entry->second.read_later = true;
    });
  }

  // Whether the op writes all of the state.
  bool IsWhole(ValueId state, const Gradient& gradient) {
    if (gradient.made == kNone) return false;
    const Value &made = std::as_const(program_).value(gradient.made), &all = std::as_const(program_).value(state);
    return made.offset == Dim(0) && made.type.dtype == all.type.dtype &&
           program_.NumElements(made.type) == all.type.sizes[0];
  }

  void Change(ValueId state, const Gradient& gradient) {
    const Type made = std::as_const(program_).value(gradient.made).type;
    Value& value = program_.value(gradient.made);
    value.root = gradient.made;
    value.placed = false;
    if (gradient.read_here) behind_[gradient.at].push_back(Flat(micro_, state, gradient.made));
    Rename(micro_, state, gradient.made);
    if (!gradient.read_later) return;
    micro_.gives.push_back(gradient.made);
    const ValueId take = program_.AddValue(ValueKind::kTake, made).id;
    update_.takes.push_back(take);
    if (made == std::as_const(program_).value(state).type) {
      ReplaceUses(program_, update_, state, take);
    } else {
      first_.push_back(Flat(update_, state, take));
    }
    Rename(update_, state, take);
  }

  // A view of the value as its ops know the state, which they take from here on.
  OpId Flat(Phase& phase, ValueId state, ValueId of) {
    Op& view = program_.AddOp(OpKind::kView);
    view.part = Part::kUpdate;
    view.args = {Arg::Of(of)};
    const OpId id = view.id;
    const ValueId flat = program_.AddView(view, std::as_const(program_).value(state).type, of, Dim(0));
    ReplaceUses(program_, phase, state, flat);
    return id;
  }

  // Views of the state lie in the value now.
  void Rename(const Phase& phase, ValueId state, ValueId root) {
    for (OpId op : phase.ops) {
      for (ValueId result : std::as_const(program_).op(op).results) {
        if (result != kNone && program_.RootOf(result) == state) program_.value(result).root = root;
      }
    }
  }

  std::vector<OpId> Woven(const Phase& phase) const {
    std::vector<OpId> ops;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      ops.push_back(phase.ops[i]);
      const auto more = behind_.find(static_cast<int32_t>(i));
      if (more != behind_.end()) ops.insert(ops.end(), more->second.begin(), more->second.end());
    }
    return ops;
  }

  Program& program_;
  Phase &micro_, &update_;
  std::unordered_map<ValueId, Gradient> found_;  // by the state's value
  std::unordered_map<int32_t, std::vector<OpId>> behind_;  // by index in the micro-batch
  std::vector<OpId> first_;                                // of the update
};

}  // namespace

Result<bool> TransientGradients(Program& program, const PassOptions&) {
  Phase* const micro = program.MicroBatchPhase();
  Phase* const update = program.UpdatePhase();
  if (micro == nullptr || update == nullptr || program.stage || program.phases.size() != 2) return false;
  bool moves = false;  // then memory is no arena, and the limit was planned for with gradients as states
  ForEachOp(std::as_const(program), [&](const Op& op) { moves = moves || MoveOf(op) != nullptr; });
  if (moves) return false;
  const std::vector<Program::StepRun> runs = program.RunsOfStep();
  const bool once = runs.size() == 2 && runs[0].phase == micro && runs[0].count == 1 && runs[1].phase == update;
  return once && Transient(program, *micro, *update).Run();
}

}  // namespace interlace
