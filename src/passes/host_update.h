// host_update.h — units whose optimizer step is made on the host, where its states lie (docs/ir.md, "Steps on the
// host").
//
//   state %5: f32[..] u0.grad step          state %5: f32[..] u0.grad step out      states and gradient lie in the tier
//   state %6: .. u0.exp_avg persistent      state %6: .. u0.exp_avg persistent out
//                                           reload.start(%4) reload.wait(%4)   the weights come for their first use ...
//   gather.start(%4)                        gather.start(%4)
//   ...                                     ...
//                                           offload.start(%4) {clean=true}     ... and go after their last
//                                           offload.wait(%4)
//                                           reload.start(%5) {fresh=true} reload.wait(%5)
//   into %5 = reduce.start, reduce.wait     into %5 = reduce.start, reduce.wait
//                                           offload.start(%5)                  the gradient goes as soon as it is whole
//   norm.partial(%5)                        norm.partial(%5)
//                                           offload.wait(%5)
//   update.adamw(%4, %5, %6, %7)            update.adamw(%4, %5, %6, %7) {lane=host}
//
// A step that moves states out and back copies 12 bytes of a float32 parameter each way; this one copies 4 each way,
// and the host's cores read and write 28. Updates that reposition_update has made pending go to the head of the step,
// where they begin at once and run beside the forward part. Bits are unchanged. Runs after the schedule passes, before
// offload (which can decide by itself, `host=auto`).
#pragma once

#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// Options: units, share. Error: a unit of the list whose step cannot be made on the host (says why).
Result<bool> HostUpdate(Program& program, const PassOptions& options);

struct HostUnit {
  UnitId unit = kNone;
  int64_t bytes = 0;  // of its weights and optimizer states on this rank
};
// Units whose step can be made on the host, in the order in which a step first needs their weights.
Result<std::vector<HostUnit>> HostUnits(const Program& program);
// Those are the last of them that hold `share` of the bytes: a step needs them last.
std::vector<UnitId> LastUnits(const std::vector<HostUnit>& units, double share);
// Makes the steps of `units` there; each must be one of HostUnits.
Status StepOnHost(Program& program, const std::vector<UnitId>& units);

}  // namespace interlace
