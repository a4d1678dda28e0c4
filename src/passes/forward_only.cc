#include "passes/forward_only.h"

#include <algorithm>
#include <vector>

#include "ir/op_table.h"
#include "ir/program.h"
#include "passes/transfers.h"

namespace interlace {

Result<bool> ForwardOnly(Program& program, const PassOptions&) {
  const std::vector<Phase*> micro_batches = MicroBatches(program);
  if (micro_batches.size() != 1 || micro_batches[0]->name != "micro_batch") {
    return MakeError("forward_only runs before accumulate: the program has ", micro_batches.size(), " micro-batch phases");
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
    if (op.name == "release" || op.name == "grad" || op.name == "assign") continue;
    bool keep = op.name == "output" || std::any_of(op.results.begin(), op.results.end(), is_used) ||
                std::any_of(op.writes.begin(), op.writes.end(), is_used);
    if (op.name.ends_with(".wait")) ForEachOperand(op, [&](ValueId id) { keep = keep || is_used(id); });
    if (!keep) continue;
    is_kept[i] = 1;
    ForEachOperand(op, use);
  }
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    Op& op = program.op(phase.ops[i]);
    if (op.name == "release") std::erase_if(op.args, [&](const Arg& arg) { return !is_used(arg.value); });
    if (is_kept[i] != 0 || (op.name == "release" && !op.args.empty())) kept.push_back(op.id);
  }
  bool changed = kept.size() != phase.ops.size() || !phase.gives.empty();
  phase.ops = std::move(kept);
  phase.gives.clear();
  if (Phase* update = program.FindPhase("update"); update != nullptr) {
    changed = changed || !update->ops.empty();
    update->takes.clear();
    update->gives.clear();
    update->ops.clear();
  }
  return changed;
}

}  // namespace interlace
