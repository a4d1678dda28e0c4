// breadth_first.h — several micro-batches run side by side, layer by layer, so that the transfers of a step hide behind
// all of them: gathers behind the forward parts of the first ones, reductions behind the backward parts of the last
// ones. It costs their activations.
//
//   captured        breadth_first(micro_batches=2)      reads of parameters cut the list of ops into pieces; a piece
//   runs %5 = mm(%x, %w)      %5 = mm(%x, %w)             for one micro-batch after the other %6 = relu(%5)        %6 =
//   relu(%5) %7 = mm(%6, %v)      %25 = mm(%22, %w) {micro=1}
//   ...                  %26 = relu(%25) {micro=1}
//   grad(%w, %9)         %7 = mm(%6, %v) ...  grad(%w, %9)  grad(%w, %29) {micro=1}
//
// The header says `step 2 reduce_last by 2`; `accumulate(steps=8)` then makes four runs of two. What is the same in
// every micro-batch (casts and views of parameters, constants) is made once. Gradients are added up in the order of the
// micro-batches, so bits are those of accumulate(mode=reduce_last). Named breadth-first accumulation in Lamy-Poirier,
// "Breadth-First Pipeline Parallelism" (2022), section 3.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Option: micro_batches. Runs on a captured program, after canonicalize, precision and recompute and before shard.
// Errors: not so; the model changes buffers or runs Python, random numbers in program order (rng=compat), gradients
// narrower than their parameter.
Result<bool> BreadthFirst(Program& program, const PassOptions& options = {});

}  // namespace interlace
