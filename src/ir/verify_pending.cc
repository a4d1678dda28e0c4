// Ops of the step before (pending.h): they stand where a step begins, work on states only, and nothing looks at a
// storage before the pending ops are done with it.
#include <unordered_map>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/residency.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

template <typename F>
void ForEachTouched(const Program& program, const Op& op, F f) {
  ForEachOperand(op, f);
  for (ValueId id : op.writes) f(id);
  for (ValueId id : op.results) {
    if (id != kNone && program.RootOf(id) != id) f(id);
  }
}

bool MayBePending(const Op& op) {
  return IsUpdate(op) || op.kind == OpKind::kView || op.kind == OpKind::kGatherStart || op.kind == OpKind::kGatherWait;
}

}  // namespace

void VerifyPending(const Program& program, VerifyReport& report) {
  const auto order = program.RunOrder();
  for (const Phase& phase : program.phases) {
    // By storage: the last pending op that touches it.
    std::unordered_map<ValueId, int32_t> last;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      const Op& op = program.op(phase.ops[i]);
      const Arg* attr = op.Attr("pending");
      if (attr == nullptr) continue;
      if (!IsPending(op) || !MayBePending(op)) {
        report.AtOp(
            op, "pending=true marks view, update.*, gather.start and gather.wait of the optimizer step, tagged upd");
        continue;
      }
      if (order.empty() || &phase != order[0].first || order[0].second != 1 || phase.kind == PhaseKind::kStep) {
        report.AtOp(
            op, "pending ops stand in the one micro-batch that a step begins with, not in phase '" + phase.name + "'");
        continue;
      }
      ForEachTouched(program, op, [&](ValueId id) {
        const ValueId root = program.RootOf(id);
        last[root] = static_cast<int32_t>(i);
        if (program.value(root).kind == ValueKind::kState) return;
        report.AtOp(
            op, "%" + std::to_string(id) + " does not last from the step before; pending ops work on states only", id);
      });
      for (ValueId id : op.results) {
        if (id != kNone && program.RootOf(id) == id)
          report.AtOp(
              op, "the result of a pending op lies in a state: elsewhere a step that has nothing pending lacks it", id);
      }
    }
    if (last.empty()) continue;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      const Op& op = program.op(phase.ops[i]);
      if (op.Attr("pending") != nullptr || MoveOf(op) != nullptr) continue;
      ForEachTouched(program, op, [&](ValueId id) {
        auto found = last.find(program.RootOf(id));
        if (found == last.end() || found->second < static_cast<int32_t>(i)) return;
        report.AtOp(op,
                    "%" + std::to_string(id) + " is touched before " + program.op(phase.ops[found->second]).name +
                        " of the step before is done with %" + std::to_string(program.RootOf(id)),
                    id);
      });
    }
  }
}

}  // namespace interlace
