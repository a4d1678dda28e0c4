// recompute.h — activation checkpointing: forward ops run again in the backward part, so that what they made need not
// live from one to the other.
//   before: %5 = aten.mm(%4, %w) {fwd m3}                  after: %5 = aten.mm(%4, %w) {fwd m3}
//           %6 = aten.relu(%5) {fwd m3}                           %6 = aten.relu(%5) {fwd m3}
//           ... the other blocks and the loss ...                 ... %5 and %6 have ended, %4 is kept ...
//           %9 = aten.threshold_backward(%8, %6, 0) {bwd m3}      %10 = aten.mm(%4, %w) {bwd m3}
//                                                                 %11 = aten.relu(%10) {bwd m3}
//                                                                 %9 = aten.threshold_backward(%8, %11, 0) {bwd m3}
// A block is an element of a list of modules (model.layers.3). What leaves a block is kept for the next one; what is
// made inside may be made again, by the same op from the same operands, just before the first backward op that needs
// it: the recomputed values of one block live at a time, and no bit changes. Never run twice: random ops, ops that
// write, opaque modules, other libraries' ops, and ops that read what is written before the backward part has read it.
//
// Runs on a captured program after canonicalize and before shard, zero1 or replicate: shard then counts the uses again
// as uses of the backward stretch, so one gather serves recomputation and backward. The line `meta recompute` says what
// was chosen. Sources: SimpleFSDP section 3.3, Chen et al. "Training Deep Nets with Sublinear Memory Cost".
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

// Options: mode=full: everything inside blocks; selective: all but the results of the ops in `save` (names joined by
// "+"), and everything inside the blocks in `whole`; budget: as little time as possible, until what is kept for the
// backward part has at most `bytes` (times by the kernel model of `cluster`). `blocks`: paths of modules joined by "+"
// instead of the elements of lists, each a block. Error: the program has units or was recomputed already, no such
// module, blocks that overlap, a budget below the least possible (which it says), budget with sizes that are not
// numbers.
Result<bool> Recompute(Program& program, const PassOptions& options = {});

}  // namespace interlace
