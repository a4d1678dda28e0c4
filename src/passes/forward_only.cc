// forward_only.cc — what the outputs need and nothing else: the program that evaluates a model on the parameters of a
// training run.
//
//   micro_batch: gather u0  fwd  release u0  gather u1  fwd  output(%loss)  bwd  reduce ..    update: update(u0) ..
//   ->           gather u0  fwd  release u0  gather u1  fwd  output(%loss)  release u1        update:
//
// Units and states that last stay declared, so the program runs on the memory of the one that trains; those of one step
// go. Buffers do not change. Runs after `update`, before the schedule passes.
//
// Option: out=u0.exp_avg+u3.exp_avg (or all): these states, as far as nothing here uses them, lie in the tier, as they
// may between steps of the program that trains. Errors: several micro-batch phases, values that are under way between
// steps, no such state.
#include <algorithm>
#include <string>
#include <vector>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/program.h"
#include "passes/passes.h"
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

}  // namespace

Result<bool> ForwardOnly(Program& program, const PassOptions& options) {
  const std::vector<Phase*> micro_batches = MicroBatches(program);
  if (micro_batches.size() != 1) {
    return MakeError("forward_only runs before accumulate: the program has ", micro_batches.size(),
                     " micro-batch phases");
  }
  Phase& phase = *micro_batches[0];
  if (!phase.takes.empty()) {
    return MakeError("a transfer is under way when a step begins; run forward_only before the schedule passes");
  }
  std::vector<char> used(program.num_values(), 0);  // by root
  const auto use = [&](ValueId id) { used[program.RootOf(id)] = 1; };
  const auto is_used = [&](ValueId id) { return id != kNone && used[program.RootOf(id)] != 0; };

  std::vector<OpId> kept;
  std::vector<char> is_kept(phase.ops.size(), 0);
  for (size_t i = phase.ops.size(); i-- > 0;) {
    const Op& op = std::as_const(program).op(phase.ops[i]);
    if (op.kind == OpKind::kRelease || op.kind == OpKind::kGrad || op.kind == OpKind::kAssign) continue;
    bool keep = op.kind == OpKind::kOutput || std::any_of(op.results.begin(), op.results.end(), is_used) ||
                std::any_of(op.writes.begin(), op.writes.end(), is_used);
    if (IsWait(op)) ForEachOperand(op, [&](ValueId id) { keep = keep || is_used(id); });
    if (!keep) continue;
    is_kept[i] = 1;
    ForEachOperand(op, use);
  }
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    Op& op = program.op(phase.ops[i]);
    if (op.kind == OpKind::kRelease) std::erase_if(op.args, [&](const Arg& arg) { return !is_used(arg.value); });
    if (is_kept[i] != 0 || (op.kind == OpKind::kRelease && !op.args.empty())) kept.push_back(op.id);
  }
  bool changed = kept.size() != phase.ops.size() || !phase.gives.empty();
  phase.ops = std::move(kept);
  phase.gives.clear();
  if (Phase* update = program.UpdatePhase(); update != nullptr) {
    changed = changed || !update->ops.empty();
    update->takes.clear();
    update->gives.clear();
    update->ops.clear();
  }
  INTERLACE_ASSIGN(const bool out, LeaveOut(program, options.Text("out", "none"), used));
  // Gradients and what else lasts for one step: nothing of it is left to be used.
  const auto gone =
      std::erase_if(program.states, [&](const State& state) { return !state.persistent && !is_used(state.value); });
  return changed || out || gone > 0;
}

}  // namespace interlace
