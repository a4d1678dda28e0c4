// accumulate.h — gradient accumulation: the phase micro_batch becomes micro_batch.first, .middle (steps > 2) and .last.
//
//   reduce_each, in middle and last:                       reduce_last, in middle and last:
//     %r: f32[512] = reduce.start(%g) {units=[u0]}           %dw: f32[..] = aten.mm(...)
//     reduce.wait(%r)    release(%g)                         %v in %full_grad+0 = view(%full_grad)
//     %a in %grad+0 = aten.add_.Tensor(%grad, %r)            %a in %full_grad+0 = aten.add_.Tensor(%v, %dw)
//   in first the shard is reduced into the state;          in first the gradient is placed in the state u0.full_grad;
//   every micro-batch has its own flat buffer %g.          only last reduces it.
// Where the gradient is a matrix product that nothing else reads, the product adds it (aten.addmm_(%v, ..)): one pass
// over the gradient less, and no storage for it. Under reduce_each that is so with one rank only. After replicate only
// `last` gathers the summed gradient. With one rank gradients are added in the state in either mode. The two modes
// round differently: the mode is part of a program's meaning (ZeRO-2/3 memory, or DDP traffic).
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: steps, mode=reduce_each|reduce_last. Runs after shard, replicate or zero1 and before update.
// Error: not so, or the program accumulates already.
Result<bool> Accumulate(Program& program, const PassOptions& options = {});

}  // namespace interlace
