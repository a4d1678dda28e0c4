// update_factors.h — the optimizer step of whole parameters whose second moments are kept by rows and columns
// (Adafactor). What it needs of a whole parameter are sums: of squares over rows and over columns of the gradient, of
// the weights, and of the update before it is clipped. So parameters stay dealt to the ranks by elements, each rank
// works on its own, and sums travel, those of many parameters at once:
//
//   gradient      %g (update.rule: with its sign, times scale and coefficient), laid into rows: [0 0 g g | g g g g | g 0 0 0]
//   sums          of squares of rows, columns and weights        → cat → all_reduce
//   averages      u7.row_var_of_u0, u8.col_var_of_u0 (update.rule, of the group `average`), the same on all ranks
//   update        %u = %g / sqrt(row_var * col_var / mean(row_var)), of this rank's elements
//   sums          of squares of the update                       → cat → all_reduce
//   weights       of %u * max(least, rms(weights)) / max(1, rms(%u) / clip)  (update.rule, of the group `apply`)
//
// A matrix is the last two dimensions, as in PyTorch; vectors have an average of each element instead. The averages of
// rows and columns have units of their own, which no parameter is in; their roles say which unit they are of.
// Where every rank has the whole parameter and gradient, nothing travels.
#pragma once

#include <functional>
#include <span>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

struct FactoredUpdate {
  UnitId unit = kNone;
  const Param* param = nullptr;
  ValueId weights = kNone, grad = kNone;       // flat, all of this rank's part or all whole
  int64_t batches = 1, rows = 0, columns = 0;  // rows == 0: a vector of so many columns
  double scale = 1;                            // of the gradient
};

// Adds units, states and ops to `phase`, the one of the optimizer step; `updated` is called where the weights of one
// are complete. `coef`: of norm.coef, or kNone. Error: a group without a rule for a part of the step.
Status AddFactoredUpdates(Program& program, Phase& phase, std::span<const FactoredUpdate> updates, ValueId coef,
                          const std::function<void(const FactoredUpdate&)>& updated);

}  // namespace interlace
