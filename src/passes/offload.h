// offload.h — storages leave memory where a limit asks for it, and are back when they are used.
//
//   offload(limit=2GiB)        only the excess: optimizer states first, then gradients, weights, activations; copies
//                              run beside the compute lane, each as late as it can and as early as the memory allows
//                              (host=auto: some units' optimizer steps are made on the host instead, host_update.h)
//   offload_deepcompile(...)   DeepCompile, Algorithm 2: optimizer states in fragments, out from the head of forward
//   offload_sync(...)          everything out after each use and back before the next, waited for at once: the baseline
//
// They run after the schedule passes. Bits are unchanged: only the place of bytes is.
#pragma once

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// Options: limit, kinds, window, slack, host, cluster, profile. Error: a limit that cannot be met; it says the least
// that can.
Result<bool> Offload(Program& program, const PassOptions& options);
// Options: limit, fragment, cluster, profile. Error: as above (the loop in the paper does not end then).
Result<bool> OffloadDeepCompile(Program& program, const PassOptions& options);
// Options: kinds.
Result<bool> OffloadSync(Program& program, const PassOptions& options);

}  // namespace interlace
