// replicate.h — data parallelism with whole parameters on every rank, in the state u0.full.
//   before: grad(%w, %dw) {bwd}
//   replicate:  %r into %grad+shard*rank_dp = reduce.start(%g) {bwd units=[u0]}   its own part of the sum ...
//               reduce.wait(%r) {bwd}                                             ... one reduce later
//               %s into %grad+0 = gather.start(%r) {bwd units=[u0]}               and the others' parts, in place
// An all-reduce made of the two halves that shard and zero1 use, so the bits are theirs.
//   zero1:      %r into %grad+0 = reduce.start(%g) {bwd units=[u0]}
// Gradients and optimizer states live in shards (ZeRO-1 and 2): in the update phase, which `update` adds, a rank
// updates its own part of u0.full and gathers the others' parts in place.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: axis (dp), ranks, wait=next|now. Errors: as for shard.
Result<bool> Replicate(Program& program, const PassOptions& options = {});
Result<bool> Zero1(Program& program, const PassOptions& options = {});

}  // namespace interlace
