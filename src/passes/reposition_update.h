// reposition_update.h — the optimizer step of a unit runs in the next step, just before the unit is first needed there.
//
//   micro_batch:                            ->   micro_batch:
//                                                  update(u0) {pending=true}
//     gather(u0)  gather(u1)                       gather(u0)                      the wire works from here on
//                                                  update(u1) {pending=true}
//                                                  gather(u1)
//     wait u0  layer 0  wait u1  layer 1           wait u0  layer 0  wait u1  layer 1
//     backward, reductions                         backward, reductions
//   update:                                      update:
//     norm.coef                                    norm.coef into the state `coef`
//     update(u0)  update(u1)
//
// Norm, clip coefficient, learning rates and step numbers are those of the step that made the gradients, and a norm
// that is not finite leaves nothing pending (ir/pending.h). Gradients lie in their states from one step to the next,
// which have memory between steps anyway. Parameters that are whole on every rank (zero1) are gathered after their part
// was updated, `ahead` first uses before they are needed. Source: Mist, section 5.1; the order of work changes, no bit
// does.
#pragma once

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// With `share` below 1 only some units' updates move, evenly over their first uses; overlap_update may put the others
// beside the backward part then. So with offload states stream through the whole step, and not through one half of it.
//
// True when updates moved; a second run moves none. Options: ahead (1), share (1: of the bytes of the parameters). Runs
// after update and the schedule passes, before overlap_update and offload. Error: no optimizer step; overlap_update or
// offload ran before; an operand that does not last until the next step.
Result<bool> RepositionUpdate(Program& program, const PassOptions& options = {});

}  // namespace interlace
