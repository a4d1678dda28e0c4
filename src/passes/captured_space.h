// captured_space.h — the variants of a captured program that a search goes through: what runs again in the backward
// part, and how many micro-batches run side by side.
#pragma once

#include <vector>

#include "passes/decisions.h"

namespace interlace {

// No, selective, and a quarter to full recomputation where `recompute`; where `breadth_first`, and gradients are
// reduced once a step, also 2 and 4 micro-batches side by side, which hides transfers behind all of them: without
// recomputation and, because it takes the memory of their activations, with what takes least time to give it back and
// with all of it. The first is the program as it is. `sharded`: what the strategy made of it.
std::vector<CapturedDecisions> CapturedSpace(const Program& captured, const Program& sharded, bool recompute,
                                             bool breadth_first);
// An eighth more and an eighth less recomputation than `chosen`, where that is a number of blocks and not among `all`.
std::vector<CapturedDecisions> NeighboursOf(const Program& captured, const CapturedDecisions& chosen,
                                            const std::vector<CapturedDecisions>& all);

}  // namespace interlace
