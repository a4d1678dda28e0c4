// replicate.h — data parallelism: every rank keeps whole parameters, gradients and optimizer states.
//   before: grad(%w, %dw) {bwd}
//   after:  %r into %grad+shard*rank_dp = reduce.start(%g) {bwd units=[u0]}   its own part of the sum ...
//           reduce.wait(%r) {bwd}                                             ... one reduce later
//           %s into %grad+0 = gather.start(%r) {bwd units=[u0]}               and the others' parts, in place
// An all-reduce made of the two halves that shard and zero1 use, so the bits are theirs. Parameters lie in the state
// u0.full.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: axis (dp), ranks, wait=next|now. Errors: as for shard.
Result<bool> Replicate(Program& program, const PassOptions& options = {});

}  // namespace interlace
