#include "passes/overlap_update.h"

#include <algorithm>
#include <unordered_map>

#include "ir/op_table.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// The place behind which nothing of the phase reads or writes a storage any more, by root (-1: it touches it nowhere):
// a transfer reads its source until its wait.
std::vector<int32_t> LastTouches(const Program& program, const Phase& phase) {
  std::vector<int32_t> last(static_cast<size_t>(program.num_values()), -1);
  std::unordered_map<ValueId, std::vector<ValueId>> sources;  // by result of a transfer under way
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    const Op& op = program.op(phase.ops[i]);
    const auto here = static_cast<int32_t>(i);
    const bool waits = IsWait(op);
    ForEachOperand(op, [&](ValueId id) {
      last[program.RootOf(id)] = here;
      if (!waits) return;
      auto started = sources.find(id);
      if (started == sources.end()) return;
      for (ValueId source : started->second) last[source] = here;
    });
    for (ValueId id : op.results) {
      if (id != kNone) last[program.RootOf(id)] = here;
    }
    if (!IsStart(op)) continue;
    std::vector<ValueId> read;
    ForEachOperand(op, [&](ValueId id) { read.push_back(program.RootOf(id)); });
    for (ValueId id : op.results) {
      if (id != kNone) sources[id] = read;
    }
  }
  return last;
}

}  // namespace

Result<bool> OverlapUpdate(Program& program, const PassOptions&) {
  Phase* update = program.UpdatePhase();
  const std::vector<Phase*> micro_batches = MicroBatches(program);
  if (update == nullptr || micro_batches.empty()) return false;
  for (OpId id : update->ops) {
    if (!IsUpdate(std::as_const(program).op(id))) return false;  // a norm, or parameters that are gathered afterwards
  }
  Phase& phase = *micro_batches.back();
  const std::vector<int32_t> last = LastTouches(program, phase);
  // What still flows into the next phase may be read there.
  if (!phase.gives.empty()) return false;
  std::vector<std::vector<OpId>> after(phase.ops.size());
  std::vector<OpId> stay;
  for (OpId id : update->ops) {
    int32_t place = -1;
    bool states = true;
    ForEachOperand(std::as_const(program).op(id), [&](ValueId operand) {
      const ValueId root = program.RootOf(operand);
      states = states && std::as_const(program).value(root).kind == ValueKind::kState;
      place = std::max(place, last[root]);
    });
    if (!states || place < 0) {
      stay.push_back(id);
    } else {
      after[place].push_back(id);
    }
  }
  if (stay.size() == update->ops.size()) return false;
  std::vector<OpId> ops;
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    ops.push_back(phase.ops[i]);
    ops.insert(ops.end(), after[i].begin(), after[i].end());
  }
  phase.ops = std::move(ops);
  update->ops = std::move(stay);
  return true;
}

}  // namespace interlace
