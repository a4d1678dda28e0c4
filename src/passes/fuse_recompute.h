// fuse_recompute.h — what a forward region keeps for the backward part alone is made again there, if that costs less.
//
//   %3 = silu(%2) {fwd}               %3 = silu(%2) {fwd}
//   %4 = mul(%3, %1) {fwd}            %4 = mul(%3, %1) {fwd}     %3 does not leave its region any more
//   ...                               ...
//   %9 = mul(%8, %3) {bwd}            %10 = silu(%2) {bwd}       %2 is kept for the gradient of silu in any case
//                                     %9 = mul(%8, %10) {bwd}    %10 does not leave this one
//
// Which values are kept is a cheapest cut (base/min_cut.h) between what a region reads or cannot make again and what
// the backward part reads of it, as in PyTorch's partition of forward and backward (functorch's min-cut
// rematerialization). Costs are bytes: of being written, of being read, of being kept; none where the value is kept and
// read there anyway. Made again are elementwise ops, copies and softmax by the regions that read the result; no op that
// stands alone, no sum over other elements, no random draw. Each op made again has the bits of the first one. A
// dropout's mask is kept as bytes, whatever its dtype.
#pragma once

#include "passes/fuse_regions.h"

namespace interlace {

// Whether the phase changed. What nobody reads any more is gone from it.
bool FuseRecompute(Program& program, Phase& phase, const FuseOptions& options);

}  // namespace interlace
