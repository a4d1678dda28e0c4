// unshard.h — units stay gathered through a whole step where memory allows, those that save most time per byte first
// (DeepCompile 4.3, selective unsharding).
//
//   before: forward: gather u0 .. release   backward: gather u0 .. release    the same in every micro-batch
//   after:  the first forward gathers u0, the last backward releases it
//
// `units=auto`: ranked by T(B)/B, the largest first; one is taken if the peak with it stays under `limit`, else it is
// skipped and the next is tried. A unit counts only where it is not gathered already. `all`, `none`, or a list such as
// `u0+u3`: those, whatever the limit. Runs after shard and accumulate, best after prefetch. Options: limit, units,
// cluster, profile. Errors: units that do not exist or are not gathered more than once.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

Result<bool> Unshard(Program& program, const PassOptions& options);

}  // namespace interlace
