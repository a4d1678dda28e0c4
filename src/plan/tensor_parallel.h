// tensor_parallel.h — a layer's program as one of tp tensor-parallel ranks runs it, by pass `tensor` (passes/tensor),
// with tp a symbol of its sizes.
//
// Weights are cut by the model's plan, embedding and head by vocabulary, and what layers hand to each other along the
// sequence: "hidden" and "hidden.grad" are bf16[b,s//tp,4096]. What the forward part gathered, the backward part
// gathers again. The program is for counting: no mesh has the axis of its collectives, and each wait follows its start.
//
// A vocabulary that the largest degree does not divide becomes the symbol `vocab`; it is padded by at most tp - 1 rows,
// which are not counted.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "ir/program.h"
#include "plan/model_text.h"

namespace interlace::plan {

// Degrees that divide this cut heads and every weight of the plan evenly; 1 when the model has no plan.
int32_t LargestTensorParallel(const ModelText& model);

// Rewrites a captured layer (canonicalized; recomputed or not) for the degrees that divide the largest one. Error: a
// parameter that cannot be cut as the plan says.
Status CutForTensorParallel(Program& program, const ModelText& model);

// For the symbols of such a program.
Binding BindingOf(const ModelText& model, int64_t micro_batch, int64_t sequence, int64_t tp);

}  // namespace interlace::plan
