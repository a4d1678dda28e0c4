// zero1.h — every rank keeps whole parameters; gradients and optimizer states live in shards (ZeRO-1 and 2).
//   before: grad(%w, %dw) {bwd}
//   after:  %r into %grad+0 = reduce.start(%g) {bwd units=[u0]}
// and in the update phase, which `update` adds: a rank updates its own part of u0.full and gathers the others' parts in
// place.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: axis (dp), ranks, wait=next|now. Errors: as for shard.
Result<bool> Zero1(Program& program, const PassOptions& options = {});

}  // namespace interlace
