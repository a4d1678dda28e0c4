// simulated_timeline.h — what a simulated rank did, as events of a timeline (trace/timeline.h).
#pragma once

#include "sim/engine.h"
#include "sim/memory_curve.h"
#include "trace/timeline.h"

namespace interlace {

// Without events: what made it, and on which devices.
Timeline SimulatedTimeline(const ClusterSpec& cluster, int64_t ranks);
// Adds the ops, transfers and memory of a rank that ran `lowered`.
void AddRank(Timeline& out, const Lowered& lowered, const MemoryCurve& memory, const EngineOutput& output,
             int32_t rank);

}  // namespace interlace
