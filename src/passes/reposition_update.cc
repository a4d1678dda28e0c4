// reposition_update.cc — the optimizer step of a unit runs in the next step, just before the unit is first needed
// there.
//
//   micro_batch:                            ->   micro_batch:
//                                                  update(u0) {pending=true}
//     gather(u0)  gather(u1)                       gather(u0)                      the wire works from here on
//                                                  update(u1) {pending=true}
//                                                  gather(u1)
//     wait u0  layer 0  wait u1  layer 1           wait u0  layer 0  wait u1  layer 1
//     backward, reductions                         backward, reductions
//   update:                                      update:
//     norm.coef                                    norm.coef into the state `coef`
//     update(u0)  update(u1)
//
// Norm, clip coefficient, learning rates and step numbers are those of the step that made the gradients, and a norm
// that is not finite leaves nothing pending (ir/pending.h). Gradients lie in their states from one step to the next,
// which have memory between steps anyway. Parameters that are whole on every rank (zero1) are gathered after their part
// was updated, `ahead` first uses before they are needed. Source: Mist, section 5.1; the order of work changes, no bit
// does.
//
// With `share` below 1 only some units' updates move, evenly over their first uses; overlap_update may put the others
// beside the backward part then. So with offload states stream through the whole step, and not through one half of it.
//
// True when updates moved; a second run moves none. Options: ahead (1), share (1: of the bytes of the parameters). Runs
// after update and the schedule passes, before overlap_update and offload. Error: no optimizer step; overlap_update or
// offload ran before; an operand that does not last until the next step.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/residency.h"
#include "ir/touches.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// The ops that bring one unit up to date: its update with the view of its part and, where other ranks have the rest,
// the gather.
struct Moved {
  std::vector<OpId> ops;  // up to gather.start
  OpId wait = kNone;
  int32_t first = 0;  // place of the first op of the micro-batch that needs it done
};

class Repositioner {
 public:
  Repositioner(Program& program, Phase& update, Phase& first, int64_t ahead, double share)
      : program_(program), update_(update), first_(first), ahead_(ahead), share_(share) {}

  Result<bool> Run() {
    const std::unordered_map<ValueId, int32_t> touches = FirstTouches();
    INTERLACE_TRY(Collect(ChosenUpdates(touches)));
    if (moved_.empty()) return false;
    for (Moved& m : moved_) {
      m.first = static_cast<int32_t>(first_.ops.size());
      auto touch = [&](ValueId id) {
        auto found = touches.find(program_.RootOf(id));
        if (found != touches.end()) m.first = std::min(m.first, found->second);
      };
      for (OpId id : m.ops) {
        ForEachOperand(std::as_const(program_).op(id), touch);
        for (ValueId result : program_.op(id).results) touch(result);
      }
    }
    KeepCoefficient();
    Place();
    std::erase_if(update_.ops, [&](OpId id) { return taken_.contains(id); });
    return true;
  }

 private:
  // What an update of matrices takes in between lasts for this step only (update_matrices.h).
  bool OfStates(const Op& op) const {
    bool states = true;
    for (size_t i = 0; i < std::min(op.args.size(), FlatOperands(op)); ++i)
      states = states && program_.value(program_.RootOf(op.args[i].value)).kind != ValueKind::kResult;
    return states;
  }

  // Evenly over the order in which the next step needs them, so that what streams for them comes at an even rate.
  std::unordered_set<OpId> ChosenUpdates(const std::unordered_map<ValueId, int32_t>& touches) const {
    struct Candidate {
      int32_t first;
      OpId id;
      double bytes;
    };
    std::vector<Candidate> all;
    for (OpId id : update_.ops) {
      const Op& op = std::as_const(program_).op(id);
      if (!IsUpdate(op) || !OfStates(op)) continue;
      Candidate& c = all.emplace_back(Candidate{static_cast<int32_t>(first_.ops.size()), id, 0});
      ForEachOperand(op, [&](ValueId operand) {
        if (auto found = touches.find(program_.RootOf(operand)); found != touches.end())
          c.first = std::min(c.first, found->second);
      });
      if (!op.units.empty()) c.bytes = static_cast<double>(program_.units[static_cast<size_t>(op.units[0])].numel);
    }
    std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.first < b.first; });
    std::unordered_set<OpId> chosen;
    double owed = 0;
    for (const Candidate& c : all) {
      owed += share_ * c.bytes;
      if (share_ < 1 && owed < 0.5 * c.bytes) continue;
      owed -= c.bytes;
      chosen.insert(c.id);
    }
    return chosen;
  }

  // Takes the updates out of the phase, in order. Error: one of them, or what belongs to it, cannot wait for the next
  // step.
  Status Collect(const std::unordered_set<OpId>& chosen) {
    std::unordered_map<ValueId, OpId> views;         // of states, by result
    std::unordered_map<ValueId, size_t> by_weights;  // updated part -> its place in moved_
    std::unordered_map<ValueId, size_t> gathered;    // result of a gather -> likewise
    for (OpId id : update_.ops) {
      const Op& op = program_.op(id);
      if (MoveOf(op) != nullptr) {
        return MakeError(
            "offload has planned its copies around the optimizer step where it is; run reposition_update before "
            "offload");
      }
      if (op.kind == OpKind::kView && IsState(op.args[0].value)) {
        views[op.results[0]] = id;
      } else if (IsUpdate(op) && chosen.contains(id)) {
        INTERLACE_TRY(CheckOperands(op));
        Moved& m = moved_.emplace_back();
        const ValueId weights = op.args[0].value;
        ForEachOperand(op, [&](ValueId operand) {
          if (auto view = views.find(operand); view != views.end() && taken_.insert(view->second).second)
            m.ops.push_back(view->second);
        });
        Take(m, id);
        by_weights[weights] = moved_.size() - 1;
      } else if (op.kind == OpKind::kGatherStart && op.args.size() == 1 && by_weights.contains(op.args[0].value)) {
        const size_t index = by_weights[op.args[0].value];
        Take(moved_[index], id);
        gathered[op.results[0]] = index;
      } else if (op.kind == OpKind::kGatherWait && op.args.size() == 1 && gathered.contains(op.args[0].value)) {
        moved_[gathered[op.args[0].value]].wait = id;
        taken_.insert(id);
      } else {
        INTERLACE_TRY(CheckStays(op));
      }
    }
    return Ok{};
  }

  void Take(Moved& m, OpId id) {
    m.ops.push_back(id);
    taken_.insert(id);
  }

  bool IsState(ValueId id) const { return program_.value(program_.RootOf(id)).kind == ValueKind::kState; }

  // What an update reads must be there in the next step: states, and the result of norm.coef, which becomes one.
  Status CheckOperands(const Op& op) {
    Status status = Ok{};
    ForEachOperand(op, [&](ValueId id) {
      if (IsState(id) || !status.ok()) return;
      const OpId def = program_.value(id).def;
      if (def != kNone && program_.op(def).kind == OpKind::kNormCoef && (coef_ == kNone || coef_ == id)) {
        coef_ = id;
        return;
      }
      status = MakeError(op.name, " of u", op.units.empty() ? kNone : op.units[0], " reads %", id,
                         ", which ends with the step");
    });
    return status;
  }

  // What stays runs at the end of its step: it must not look at parameters that are still to be updated.
  Status CheckStays(const Op& op) {
    Status status = Ok{};
    auto check = [&](ValueId id) {
      if (!status.ok() || !IsState(id)) return;
      for (const Moved& m : moved_) {
        const Op& update =
            program_.op(*std::find_if(m.ops.begin(), m.ops.end(), [&](OpId o) { return IsUpdate(program_.op(o)); }));
        if (program_.RootOf(update.args[0].value) != program_.RootOf(id)) continue;
        status = MakeError(op.name, " in the phase update uses %", program_.RootOf(id),
                           " after its optimizer step, which would still be pending there");
      }
    };
    ForEachOperand(op, check);
    for (ValueId id : op.results) {
      if (id != kNone) check(id);
    }
    return status;
  }

  // By storage: the place of the first op of the micro-batch that touches it.
  std::unordered_map<ValueId, int32_t> FirstTouches() const {
    std::unordered_map<ValueId, int32_t> out;
    ForEachTouch(program_, first_, [&](const Touch& touch) { out.try_emplace(touch.root, touch.since); });
    return out;
  }

  void KeepCoefficient() {
    if (coef_ == kNone) return;
    const ValueId state = program_.AddState(kNone, "coef", program_.value(coef_).type, /*persistent=*/false);
    Value& value = program_.value(coef_);
    value.root = state;
    value.placed = true;
    value.offset = Dim(0);
    for (const Moved& m : moved_) {
      for (OpId id : m.ops) {
        ForEachOperand(program_.op(id), [&](ValueId& operand) { operand = operand == coef_ ? state : operand; });
      }
    }
  }

  void Place() {
    std::vector<int32_t> steps;  // places of first needs of what is gathered here
    for (const Moved& m : moved_) {
      if (m.wait != kNone) steps.push_back(m.first);
    }
    std::sort(steps.begin(), steps.end());
    steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
    std::stable_sort(moved_.begin(), moved_.end(), [](const Moved& a, const Moved& b) { return a.first < b.first; });
    PhaseEditor edit(program_, first_);
    auto place = [&](int32_t at, OpId id) {
      program_.op(id).SetAttr("pending", Arg::Bool(true));
      if (at < edit.size()) {
        edit.Before(at, id);
      } else {
        edit.AtEnd(id);  // the first micro-batch never touches it
      }
    };
    for (const Moved& m : moved_) {
      int32_t at = m.first;
      if (m.wait != kNone) {
        const auto step = std::lower_bound(steps.begin(), steps.end(), at) - steps.begin();
        at = steps[static_cast<size_t>(step - std::min<int64_t>(ahead_, step))];
      }
      for (OpId id : m.ops) place(at, id);
    }
    for (const Moved& m : moved_) {
      if (m.wait != kNone) place(m.first, m.wait);
    }
    edit.Finish();
  }

  Program& program_;
  Phase& update_;
  Phase& first_;
  int64_t ahead_;
  double share_;
  ValueId coef_ = kNone;
  std::vector<Moved> moved_;
  std::unordered_set<OpId> taken_;
};

}  // namespace

Result<bool> RepositionUpdate(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const int64_t ahead, options.Int("ahead", 1, 0));
  INTERLACE_ASSIGN(const double share, options.Number("share", 1));
  if (share > 1) return MakeError("option share: ", share, " is more than all; give 0 to 1");
  Phase* update = program.UpdatePhase();
  const auto order = program.RunOrder();
  if (program.level == Level::kCaptured || update == nullptr || order[0].first == update) {
    return MakeError(
        "the program has no optimizer step; run shard, replicate or zero1, and update, before reposition_update");
  }
  if (!PendingOps(program).empty()) return false;
  int64_t runs = 0;  // of the phase that would make the steps that wait
  for (const auto& [phase, count] : order) runs += phase == order[0].first ? count : 0;
  if (runs > 1 && program.stage)
    return MakeError("stage ", program.stage->index, " of a pipeline runs its first phase ", runs,
                     " times in a step; leave it out: without clipping overlap_update makes the optimizer steps beside "
                     "the last backward part");
  if (runs > 1) return MakeError("the first micro-batch is no phase of its own; run accumulate");
  for (const auto& [phase, count] : order) {
    if (phase == update) continue;
    const bool overlapped =
        std::any_of(phase->ops.begin(), phase->ops.end(), [&](OpId id) { return IsUpdate(program.op(id)); });
    if (overlapped) {
      return MakeError("overlap_update has put optimizer steps into the phase ", phase->name,
                       ", where their gradients are complete; use overlap_update or reposition_update");
    }
  }
  return Repositioner(program, *update, *program.FindPhase(order[0].first->name), ahead, share).Run();
}

}  // namespace interlace
