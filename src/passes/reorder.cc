// reorder.cc — gathers and waits for reductions take the places that SimpleFSDP gives them (3.2.2, Tables 5 and 6).
//
//   forward=before        forward=after        backward
//   gather.start(i+1)     wait(i)              reduce.wait(i)
//   wait(i)               gather.start(i+1)    reduce.start(i+1)
//
// Within one part of a phase, gather i+1 is issued just before or just after the wait for gather i, in the order of
// first uses; the first keeps its place. The wait for reduction i goes just before the start of reduction i+1, that for
// the last one to the end. The defaults are the paper's best row: forward=before, backward=after. Runs after shard,
// accumulate and bucket.
#include <algorithm>
#include <limits>

#include "passes/passes.h"
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
