// baselines/offload.h — two published ways of sending storages out of memory, to compare offload.h with.
//
//   offload_deepcompile(...)   DeepCompile, Algorithm 2: optimizer states in fragments, out from the head of forward
//   offload_sync(...)          everything out after each use and back before the next, waited for at once
#pragma once

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

// Options: limit, fragment, cluster, profile. Error: a limit that cannot be met, with the least that can (the loop in
// the paper does not end then).
Result<bool> OffloadDeepCompile(Program& program, const PassOptions& options);
// Options: kinds.
Result<bool> OffloadSync(Program& program, const PassOptions& options);

}  // namespace interlace
