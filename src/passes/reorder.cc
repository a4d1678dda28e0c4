#include "passes/reorder.h"

#include <algorithm>
#include <limits>

#include "passes/transfers.h"

namespace interlace {
namespace {

constexpr int64_t kEndOfGap = std::numeric_limits<int64_t>::max() / 2;

void ReorderGathers(Transfers& transfers, bool before_forward, bool before_backward) {
  const Gather* last = nullptr;
  int64_t order = 0;
  for (Gather& gather : transfers.gathers) {        // by need
    if (gather.need >= transfers.size()) continue;  // another phase waits for it
    const bool backward = gather.need >= transfers.backward_begin();
    const bool first = last == nullptr || (last->need >= transfers.backward_begin()) != backward;
    if (!first) {
      const bool before = backward ? before_backward : before_forward;
      gather.at = before ? last->need : std::min(last->need + 1, gather.need);
      // Just before the wait is behind all else in the gap; just after it is before all else.
      gather.order = before || gather.at == last->need ? kEndOfGap + ++order : -kEndOfGap + ++order;
    }
    last = &gather;
  }
}

void ReorderReductions(Transfers& transfers) {
  Reduce* last = nullptr;
  for (Reduce& reduce : transfers.reduces) {  // as issued
    if (last != nullptr && !last->tail.empty()) {
      last->wait = std::min(reduce.at, last->latest);
      last->wait_order = last->wait == reduce.at ? reduce.order - 1 : kEndOfGap;
    }
    last = &reduce;
  }
  if (last != nullptr && !last->tail.empty()) {
    last->wait = last->latest;
    last->wait_order = kEndOfGap;
  }
}

}  // namespace

Result<bool> Reorder(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(std::string forward, options.Choice("forward", {"before", "after"}));
  INTERLACE_ASSIGN(std::string backward, options.Choice("backward", {"after", "before"}));
  bool changed = false;
  for (Phase* phase : MicroBatches(program)) {
    const std::vector<OpId> before = phase->ops;
    INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phase));
    ReorderGathers(transfers, forward == "before", backward == "before");
    ReorderReductions(transfers);
    INTERLACE_TRY(transfers.Write());
    changed = changed || phase->ops != before;
  }
  return changed;
}

}  // namespace interlace
