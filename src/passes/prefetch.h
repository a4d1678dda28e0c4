// prefetch.h — gathers start as early as memory allows, small neighbours as one call (DeepCompile, Algorithm 1).
//
//   before: gather.start(u0)  wait  mm  release  gather.start(u1)  wait  mm  release
//   after:  gather.start(u0, u1)  wait  mm  release  wait  mm  release
//
// Forward and backward of every micro-batch phase are scanned in reverse, each by itself, with a set U of gathers that
// have no place yet. An op o passes while P(op before o) + bytes of U stays under `limit` and bytes of U under
// `prefetch`; where it does not, U is put down just before o. The algorithm as printed is changed in these places:
// every op is tested, not only gathers, so that a spike between two of them counts; a gather that overflows begins the
// next U, or stays where it is when it overflows by itself; the first op is not left out. Neighbours V1, V2 that end up
// at one place become one call while T(V1) + T(V2) > alpha * T(V1 + V2). Gathers are put back to their first uses
// before, so the result does not depend on where they were. Runs after shard and, with several micro-batches, after
// accumulate. Options: limit, prefetch (bytes of U, 2GB), alpha (1.5), cluster, profile. Errors: symbolic sizes, an
// unknown cluster.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

Result<bool> Prefetch(Program& program, const PassOptions& options);

}  // namespace interlace
