// update_matrices.h — the optimizer step of whole matrices (Muon): momentum, element by element; Newton-Schulz
// iterations that make each matrix orthogonal; and the weights' step, element by element again. Ranks have parts of
// matrices, so matrices of one form are dealt to the ranks of an axis, one each, in rounds:
//
//   shards        momentum of u0, u1 (update.rule)  → [2, shard] bf16
//                 all_to_all                        → [2, shard]: all of u0 on rank 0, of u1 on rank 1
//                 iterations on this rank's matrix
//                 all_to_all                        → [2, shard]: this rank's shards of both results
//                 weights of u0, u1 (update.rule, of the group `apply`)
//   whole on all  the same with views of the matrices that a rank has, and one all_gather of the results
//
// The iterations are PyTorch's, operator by operator, in bfloat16 as there, so no rank does all and nothing but
// bfloat16 travels. A round with fewer matrices than ranks repeats its last. While one round computes, the next one
// travels.
#pragma once

#include <functional>
#include <span>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

struct MatrixUpdate {
  UnitId unit = kNone;
  const Param* param = nullptr;
  ValueId weights = kNone, grad = kNone, momentum = kNone;  // flat, all of this rank's part or all whole
  int64_t rows = 0, columns = 0;
  double scale = 1;  // of the gradient
};

// Adds the ops to `phase`, the one of the optimizer step; `updated` is called where the weights of one are complete.
// `coef`: of norm.coef, or kNone. Error: a group without a rule to apply the result by.
Status AddMatrixUpdates(Program& program, Phase& phase, std::span<const MatrixUpdate> matrices, ValueId coef,
                        const std::function<void(const MatrixUpdate&)>& updated);

}  // namespace interlace
