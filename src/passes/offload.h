// offload.h — storages leave memory where a limit asks for it, and are back when they are used.
//
//   offload(limit=2GiB)   only the excess: optimizer states first, then gradients, weights, activations; copies run
//                         beside the compute lane, each as late as it can and as early as the memory allows
//                         (host=auto: the optimizer steps of some units are made on the host instead, host_update.h)
//
// Runs after the schedule passes. Bits are unchanged: only where bytes are is. To compare with: baselines/offload.h.
#pragma once

#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"
#include "passes/step_line.h"

namespace interlace {

// Options: limit, kinds, window, slack, host, cluster, profile. Error: a limit that cannot be met; it says the least
// that can.
Result<bool> Offload(Program& program, const PassOptions& options);

// The option `kinds`. Error: no such kind (did you mean).
Result<std::vector<OffloadKind>> ReadOffloadKinds(const PassOptions& options);
// Error: an offload pass has run.
Status CheckNothingMoves(const Program& program);

}  // namespace interlace
