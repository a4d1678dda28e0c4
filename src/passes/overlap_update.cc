// overlap_update.cc — the optimizer step of a unit runs as soon as its gradient is complete, in the last micro-batch,
// while other gradients are still being reduced.
//
//   before   micro_batch:  ... reduce.wait(%r7)  reduce.wait(%r8)
//            update:       update(u7)  update(u8)
//   after    micro_batch:  ... reduce.wait(%r7)  update(u7)  reduce.wait(%r8)  update(u8)
//            update:       (empty)
//
// Clipping and skipping need the norm of all gradients before the first update: then everything stays where it is.
// Source: what PyTorch calls an optimizer fused into backward; the order of work changes, no bit does.
//
// True when an update moved. Runs after accumulate and update, and after the schedule passes. No errors.
#include <algorithm>

#include "ir/touches.h"
#include "passes/passes.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// The index of the op behind which nothing of the phase reads or writes a storage any more, by root (-1: it touches it
// nowhere).
std::vector<int32_t> LastTouches(const Program& program, const Phase& phase) {
  std::vector<int32_t> last(static_cast<size_t>(program.num_values()), -1);
  ForEachTouch(program, phase, [&](const Touch& touch) {
    if (touch.how != Touch::How::kLeaves) last[touch.root] = touch.at;
  });
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
    int32_t index = -1;
    bool states = true;
    ForEachOperand(std::as_const(program).op(id), [&](ValueId operand) {
      const ValueId root = program.RootOf(operand);
      states = states && std::as_const(program).value(root).kind == ValueKind::kState;
      index = std::max(index, last[root]);
    });
    if (!states || index < 0) {
      stay.push_back(id);
    } else {
      after[index].push_back(id);
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
