// precision.h — what travels between ranks is narrower than the master weights: parameters are cast on their shards
// before the gather, gradients are reduced in a narrower dtype.
//   before: %c: bf16[8] = aten._to_copy(%w, dtype=bf16) {fwd}       %d: f32[8] = aten._to_copy(%g, dtype=f32) {bwd}
//           ... = aten.mm(%x, %c) {fwd}                              grad(%w, %d) {bwd}
//   after:  %c: bf16[8] = aten._to_copy(%w, dtype=bf16) {fwd on_shard=true}
//           ... = aten.mm(%x, %c) {fwd}                              grad(%w, %g) {bwd}
// and what shard makes of that (after replicate, zero1 and with one rank, the casts stay where they are used first):
//   %s: bf16[shard] = copy(%shard)                                  %g into %flat+0 = ...       flat is bf16[numel]
//   %f: bf16[numel] = gather.start(%s)                              %r: bf16[shard] = reduce.start(%flat)
//   gather.wait(%f)                                                 reduce.wait(%r)
//   ... = aten.mm(%x, view of %f)   release(%f)                     %p: f32[shard] into %grad+0 = copy(%r)
//
// A parameter's casts move when each of its uses, in forward and backward, is the same cast and nothing else; a
// parameter that is also used as it is keeps its wide gather. Casting before or after the gather gives the same bits.
// Reducing in a narrower dtype does not: each rank's gradient is rounded once (not at all when it was computed in that
// dtype), the sum over ranks is made in f32 and rounded once; shards are widened before they are added up over
// micro-batches. Runs on a captured program, before shard, replicate or zero1. Sources: SimpleFSDP section 3 and
// FSDP2's MixedPrecisionPolicy.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: param=none|bf16|f16|auto (casts to it move; auto: to either), reduce=none|f32|bf16|f16 (none and f32: as the
// gradient was captured). Error: the program has units already; param= is given, but no parameter is used through such
// casts alone.
Result<bool> Precision(Program& program, const PassOptions& options = {});

}  // namespace interlace
