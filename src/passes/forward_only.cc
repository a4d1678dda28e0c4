// forward_only.cc — what the outputs need and nothing else: the program that evaluates a model on the parameters of a
// training run.
//
//   micro_batch: gather u0  fwd  release u0  gather u1  fwd  output(%loss)  bwd  reduce ..    update: update(u0) ..
//   ->           gather u0  fwd  release u0  gather u1  fwd  output(%loss)  release u1        update:
//
// Units and states that last stay declared, so the program runs on the memory of the one that trains; those of one step
// go. Buffers do not change. Runs after `update`, before the schedule passes.
//
// Of a stage of a pipeline its forward phases stay, which wait themselves for what they send.
//
// Option: out=u0.exp_avg+u3.exp_avg (or all): these states, as far as nothing here uses them, lie in the tier, as they
// may between steps of the program that trains. Errors: several micro-batch phases, values that are under way between
// steps, no such state.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/program.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

std::string NameOf(const State& state) {
  return state.unit == kNone ? state.role : "u" + std::to_string(state.unit) + "." + state.role;
}

// States that `names` (joined by +, or all) lists, without those in `used`, are out between steps.
Result<bool> LeaveOut(Program& program, const std::string& names, const std::vector<char>& used) {
  if (names == "none") return false;
  std::vector<std::string> all;
  for (const State& state : program.states) all.push_back(NameOf(state));
  const std::vector<std::string_view> wanted = Split(names, '+');
  for (std::string_view name : wanted) {
    if (names == "all" || std::find(all.begin(), all.end(), name) != all.end()) continue;
    return MakeError("the program has no state '", name, "'", DidYouMean(name, {all.begin(), all.end()}));
  }
  bool changed = false;
  for (size_t i = 0; i < all.size(); ++i) {
    State& state = program.states[i];
    if (!state.persistent || state.unit == kNone || state.out || program.RootOf(state.value) != state.value ||
        used[state.value] != 0)
      continue;
    if (names != "all" && std::find(wanted.begin(), wanted.end(), all[i]) == wanted.end()) continue;
    state.out = changed = true;
  }
  return changed;
}

// Keeps of a phase what its outputs, its messages and what later phases load need; `used`: storages, by root.
class Kept {
 public:
  Kept(Program& program, std::vector<char>& used) : program_(program), used_(used) {}

  // `wanted`: names that kept phases behind this one load; those that this one loads when it is done. Whether ops went.
  bool Reduce(Phase& phase, std::set<std::string>& wanted) {
    const size_t before = phase.ops.size();
    std::erase_if(phase.saves, [&](const Carried& save) { return !wanted.contains(save.name); });
    for (const Carried& save : phase.saves) Use(save.value);
    std::vector<char> kept(phase.ops.size(), 0);
    std::set<ValueId> waited;
    for (size_t i = phase.ops.size(); i-- > 0;) {
      const Op& op = std::as_const(program_).op(phase.ops[i]);
      if (op.kind == OpKind::kRelease || op.kind == OpKind::kGrad || op.kind == OpKind::kAssign) continue;
      const bool message = TraitsOf(op).family == OpFamily::kPeer;  // the other end has its part of it
      bool keep = op.kind == OpKind::kOutput || message || AnyUsed(op.results) || AnyUsed(op.writes);
      if (IsWait(op)) ForEachOperand(op, [&](ValueId id) { keep = keep || IsUsed(id), waited.insert(id); });
      if (!keep) continue;
      kept[i] = 1;
      ForEachOperand(op, [&](ValueId id) { Use(id); });
    }
    std::vector<OpId> ops;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      Op& op = program_.op(phase.ops[i]);
      if (op.kind == OpKind::kRelease) std::erase_if(op.args, [&](const Arg& arg) { return !IsUsed(arg.value); });
      if (kept[i] != 0 || (op.kind == OpKind::kRelease && !op.args.empty())) ops.push_back(op.id);
    }
    bool changed = ops.size() != before || !phase.gives.empty();
    for (OpId id : std::vector<OpId>(ops)) {  // what the backward part would wait for
      const Op& op = std::as_const(program_).op(id);
      if (op.kind != OpKind::kSendStart || waited.contains(op.results[0])) continue;
      ops.push_back(AddLike(program_, op, OpKind::kSendWait, {op.results[0]}).id);
      changed = true;
    }
    phase.ops = std::move(ops);
    phase.gives.clear();
    std::erase_if(phase.loads, [&](const Carried& load) { return !IsUsed(load.value); });
    wanted.clear();
    for (const Carried& load : phase.loads) wanted.insert(load.name);
    return changed;
  }

 private:
  void Use(ValueId id) { used_[program_.RootOf(id)] = 1; }
  bool IsUsed(ValueId id) const { return id != kNone && used_[program_.RootOf(id)] != 0; }
  bool AnyUsed(const std::vector<ValueId>& ids) const {
    return std::any_of(ids.begin(), ids.end(), [&](ValueId id) { return IsUsed(id); });
  }

  Program& program_;
  std::vector<char>& used_;
};

}  // namespace

Result<bool> ForwardOnly(Program& program, const PassOptions& options) {
  if (program.accumulation > 1 || (!program.stage && MicroBatches(program).size() != 1)) {
    return MakeError("forward_only runs before accumulate: the program has ", MicroBatches(program).size(),
                     " micro-batch phases");
  }
  // Of a stage the phases with a backward part go as they are.
  const size_t phases = program.phases.size();
  if (program.stage) {
    std::erase_if(program.phases, [&](const Phase& phase) {
      return phase.kind == PhaseKind::kMicroBatch && std::any_of(phase.ops.begin(), phase.ops.end(), [&](OpId id) {
               return program.op(id).part == Part::kBackward;
             });
    });
    std::erase_if(program.order, [&](const OrderEntry& entry) { return program.FindPhase(entry.phase) == nullptr; });
  }
  std::vector<char> used(static_cast<size_t>(program.num_values()), 0);
  std::set<std::string> wanted;
  bool changed = program.phases.size() != phases;
  const std::vector<Phase*> micro_batches = MicroBatches(program);
  for (auto phase = micro_batches.rbegin(); phase != micro_batches.rend(); ++phase) {
    if (!(*phase)->takes.empty())
      return MakeError("a transfer is under way when a step begins; run forward_only before the schedule passes");
    changed = Kept(program, used).Reduce(**phase, wanted) || changed;
  }
  used.resize(static_cast<size_t>(program.num_values()), 0);
  if (Phase* update = program.UpdatePhase(); update != nullptr) {
    changed = changed || !update->ops.empty();
    update->takes.clear();
    update->gives.clear();
    update->ops.clear();
  }
  INTERLACE_ASSIGN(const bool out, LeaveOut(program, options.Text("out", "none"), used));
  // Gradients and what else lasts for one step: nothing of it is left to be used.
  const auto gone = std::erase_if(
      program.states, [&](const State& state) { return !state.persistent && used[program.RootOf(state.value)] == 0; });
  return changed || out || gone > 0;
}

}  // namespace interlace
