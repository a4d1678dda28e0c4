// pending.h — ops of an optimizer step that run in the step after it (pass reposition_update, attribute
// `pending=true`).
//
//   update of step 3:    norm.coef → %coef                     gradients, %coef and the numbers of step 3 are kept
//   first micro-batch of step 4:
//     update.adamw(%w0, %g0, .., %coef) {upd pending=true}     uses those; then unit 0 is gathered and used
//     ...
//
// In the first step of a run nothing is pending and they are left out. Whoever wants to read parameters or states
// between two steps has the pending ops run by themselves first (a flush); the next step leaves them out then.
#pragma once

#include <vector>

#include "ir/program.h"

namespace interlace {

bool IsPending(const Op& op);
// Those of the phase that a step runs first, in order; elsewhere the verifier refuses them. Empty: the program has
// none.
std::vector<OpId> PendingOps(const Program& program);

}  // namespace interlace
