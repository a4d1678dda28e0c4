// touches.h — who touches which storage when, in the order of a phase's ops. A transfer touches its sources, and what
// it brings, from its start to its wait; a result of a coalesced one that has been waited for is left alone.
//
// Every question of how long a storage is needed is answered by this walk (liveness.h among them).
//
//   0  %4 = reduce.start(%g)     %g kReads at 0, %4 kMakes at 0
//   1  %5 = aten.mm(..)
//   2  reduce.wait(%4)           %4 kReads at 2; %g and %4 kWaits at 2, since 0
#pragma once

#include <unordered_map>
#include <vector>

#include "ir/op_table.h"

namespace interlace {

struct Touch {
  // kMakes: a result that is no view. kLeaves: a transfer that started at `since` goes on into the next phase.
  enum class How : uint8_t { kReads, kWrites, kMakes, kWaits, kLeaves };
  How how = How::kReads;
  ValueId root = kNone, value = kNone;
  int32_t at = 0, since = 0;  // indices in the phase's ops
};

// Calls `visit` for every touch by an op that is not skipped.
template <typename Skip, typename Visit>
void ForEachTouch(const Program& program, const Phase& phase, Skip&& skip, Visit&& visit) {
  using How = Touch::How;
  struct Started {
    int32_t at;
    std::vector<ValueId> roots;
  };
  std::unordered_map<ValueId, Started> started;  // by result of a transfer under way
  const auto count = static_cast<int32_t>(phase.ops.size());
  for (int32_t i = 0; i < count; ++i) {
    const Op& op = program.op(phase.ops[i]);
    if (skip(op)) continue;
    const bool starts = IsStart(op), waits = IsWait(op);
    std::vector<ValueId> roots;
    ForEachOperand(op, [&](ValueId id) {
      const ValueId root = program.RootOf(id);
      visit(Touch{How::kReads, root, id, i, i});
      if (starts) roots.push_back(root);
      const auto found = waits ? started.find(id) : started.end();
      if (found == started.end()) return;
      for (ValueId of : found->second.roots) visit(Touch{How::kWaits, of, of, i, found->second.at});
      started.erase(found);
    });
    for (ValueId id : WrittenOperands(program, op)) visit(Touch{How::kWrites, program.RootOf(id), id, i, i});
    for (ValueId id : op.results) {
      if (id == kNone || (program.RootOf(id) != id && !program.value(id).placed)) continue;
      visit(Touch{How::kMakes, program.RootOf(id), id, i, i});
    }
    if (!starts) continue;
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      Started& transfer = started[id] = {i, roots};
      transfer.roots.push_back(program.RootOf(id));
    }
  }
  for (const auto& [result, transfer] : started) {
    for (ValueId root : transfer.roots) visit(Touch{How::kLeaves, root, root, count, transfer.at});
  }
}

// By every op.
template <typename Visit>
void ForEachTouch(const Program& program, const Phase& phase, Visit&& visit) {
  ForEachTouch(
      program, phase, [](const Op&) { return false; }, visit);
}

}  // namespace interlace
