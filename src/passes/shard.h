// shard.h — ZeRO-3: a rank keeps its shard of every parameter; a unit is gathered before each stretch of uses (forward,
// backward) and released after it; gradients are reduced to shards as soon as they are complete.
//   before: %9 = aten.mm(%x, %w) {fwd}                        grad(%w, %dw) {bwd}
//   after:  %f = gather.start(%shard) {fwd units=[u0]}         %r into %grad+0 = reduce.start(%g) {bwd units=[u0]}
//           gather.wait(%f) {fwd}                              ... just before the next reduce.start:
//           %w2 in %f+0 = view(%f) {fwd}                       reduce.wait(%r) {bwd}
//           %9 = aten.mm(%x, %w2) {fwd}                        release(%g) {bwd}
//           release(%f) {fwd}
// A unit whose uses `precision` marked is cast before it is gathered: %s: bf16[512] = copy(%shard), gather.start(%s).
// With ranks=1 parameters are resident and gradients are written into the state: no collective at all.
// Runs on a captured program, before accumulate and update. Sources: ZeRO (Rajbhandari et al.), DeepCompile
// section 4.1.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: axis (dp), ranks, wait=next|now, ahead (1): so many gathers start before the one that is waited for.
// Error: the program has units, a parameter has symbolic sizes or gaps, or is changed in place.
Result<bool> Shard(Program& program, const PassOptions& options = {});

}  // namespace interlace
