// tensor_parallel.h — a layer's program as one of tp tensor-parallel ranks runs it, with tp a symbol of its sizes.
//
// Weights are cut by the model's plan: by output features (column) or input features (row), embedding and head by
// vocabulary. Between the products activations are cut along the sequence. Source: Megatron-LM (Shoeybi et al., section
// 3) and sequence parallelism (Korthikanti et al., section 4.2.2).
//
//   before: %57: bf16[b,s,4096]                     after: %57: bf16[b,s//tp,4096]
//           %60: bf16[b*s,4096] = mm(%57, %q)              %g:  bf16[b,s,4096] = all_gather.start(%57)
//           ... attention of 32 heads ...                  %60: bf16[b*s,4096//tp] = mm(%g, %q)
//           %99: bf16[b*s,4096] = mm(%92, %o)              ... attention of 32//tp heads ...
//           %101: ... = add(%46, %99)                      %p:  bf16[b*s,4096] = mm(%92, %o)
//                                                          %99: bf16[b*(s//tp),4096] = reduce_scatter.start(%p)
//                                                          %101: ... = add(%46, %99)
//
// The cut follows every value through the program. A storage is whole, cut along the sequence, or cut along one
// dimension that came from a weight; an operation takes over the cut of its operands, a product turns a cut of its
// inner dimension into a sum over ranks (made after such parts were added up), and what is cut along the sequence is
// gathered before it meets what is cut otherwise (once in the forward and once in the backward part, so that it need
// not live from one to the other). The rewritten program is for counting: sizes among operators' arguments stay those
// of one device, and no mesh has the axis of its collectives. Each wait follows its start.
//
// A vocabulary that tp does not divide is padded by at most tp - 1 rows, which are not counted.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "plan/model_text.h"

namespace interlace::plan {

// Degrees that divide this cut heads and every weight of the plan evenly; 1 when the model has no plan.
int32_t LargestTensorParallel(const ModelText& model);

// Rewrites a captured layer (canonicalized; recomputed or not). Error: an operation whose operands are cut in ways that
// do not go together, which names it: the model's plan is not one this rewrite can follow.
Status CutForTensorParallel(Program& program, const std::vector<ParallelParameter>& plan);

}  // namespace interlace::plan
