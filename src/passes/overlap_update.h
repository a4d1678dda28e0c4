// overlap_update.h — the optimizer step of a unit runs as soon as its gradient is complete, in the last micro-batch,
// while other gradients are still being reduced.
//
//   before   micro_batch:  ... reduce.wait(%r7)  reduce.wait(%r8)
//            update:       update(u7)  update(u8)
//   after    micro_batch:  ... reduce.wait(%r7)  update(u7)  reduce.wait(%r8)  update(u8)
//            update:       (empty)
//
// Clipping and skipping need the norm of all gradients before the first update: then everything stays where it is.
// Source: what PyTorch calls an optimizer fused into backward; the order of work changes, no bit does.
#pragma once

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// True when an update moved. Runs after accumulate and update, and after the schedule passes. No errors.
Result<bool> OverlapUpdate(Program& program, const PassOptions& options = {});

}  // namespace interlace
