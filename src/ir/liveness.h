// liveness.h — when storages begin and end within a phase, and the bytes alive before each op.
//
// Storages of results and takes come and go; parameters, buffers, states and constants are persistent, inputs belong to
// the caller. What goes out to the tier (residency.h) is alive until its offload.wait, and again from its reload.start:
// one StorageLife for each such stretch, of states too, which are not persistent then. The sources of a `.start` live
// until its `.wait` (to the end of the phase when it is waited for later).
#pragma once

#include <vector>

#include "ir/program.h"
#include "ir/residency.h"

namespace interlace {

struct StorageLife {
  ValueId root = kNone;
  int64_t bytes = 0;
  int32_t first = -1;  // index in the phase's op list; -1: alive when the phase begins
  int32_t last = -1;   // index of the last op that touches it; == ops.size(): alive when the phase ends
};

struct PhaseLiveness {
  std::vector<StorageLife> storages;             // of roots defined in the phase, or that come in or go out
  std::vector<int64_t> live_before;              // bytes before op i, by storage; size = ops + 1
  std::vector<std::vector<ValueId>> dies_after;  // roots to free after op i
  int64_t persistent_bytes = 0;                  // params that own storage, buffers, states that never move, consts
  int64_t peak_bytes = 0;                        // of live_before plus the results of the op, persistent not included
};

// Error: a symbolic size (bind first).
Result<PhaseLiveness> ComputeLiveness(const Program& program, const Phase& phase);
// With the program's residency, when it is known; `dies_after` stays empty unless it is asked for.
Result<PhaseLiveness> ComputeLiveness(const Program& program, const Phase& phase, const Residency& residency,
                                      bool with_deaths);

}  // namespace interlace
