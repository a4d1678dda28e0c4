// set_use.h — the time of a simulated stage, divided by cause (simulate_set.h: StageUse).
#pragma once

#include <vector>

#include "sim/simulate_set.h"

namespace interlace {

// Of a simulated rank. `stage_of`: by simulated rank.
StageUse UseOfStage(const EngineInput& input, const EngineOutput& output, const std::vector<int32_t>& stage_of,
                    int32_t rank);

}  // namespace interlace
