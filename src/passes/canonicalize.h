// canonicalize.h — the same computation with fewer ops: views by geometry, no identities, no repetition, nothing dead.
//   before: %1: f32[4,8]{1,4} in %0+0 = aten.t(%0)          after: %4: f32[8,8] = aten.mm(%0, %3)
//           %2: f32[8,4] in %0+0 = aten.t(%1)
//           %4: f32[8,8] = aten.mm(%2, %3)
// - A view becomes `view(%root)`; a view with the geometry of a value that exists is that value.
// - clone, contiguous, _to_copy, x * 1, x / 1, x - 0: gone when nobody writes either side later and no bit can change.
// - Equal pure ATen ops are one, within the forward or the backward part: never across, which would undo recomputation.
// - Ops without effect and without users go; a dead random op may go because streams are keyed, not consumed in order.
// Runs at any level, any number of times; a second run changes nothing. Time is linear in the ops.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Returns whether the program changed. No options, no errors.
Result<bool> Canonicalize(Program& program, const PassOptions& options = {});

}  // namespace interlace
