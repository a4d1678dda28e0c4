// keep.h — units that stay gathered from their first use in a step to their last one, through forward and backward of
// all micro-batches, instead of being gathered in every stretch (the field's reshard-after-forward
// switched off for them; DeepCompile 4.3 calls it selective unsharding, so the pass is called unshard).
//
//   forward                       backward                        with %1 kept: its release, the second gather and
//   %1 = gather.start(%s)         %2 = gather.start(%s)           its wait go, %2's uses read %1, which is released
//   ... release(%1)               ... release(%2)                 after its last use
//
// With more micro-batches the first one hands the buffer on to the next, and the last one releases it.
#pragma once

#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

// Units that are gathered in micro-batches, from states, more than once in a step. By id.
std::vector<UnitId> UnitsGatheredAgain(const Program& program);
// Those of them that can be kept: none of a pipeline's stage, which gathers for each of its runs.
std::vector<UnitId> KeepableUnits(const Program& program);
// Keeps them; true when anything changed. Units that are gathered once or not at all stay as they are.
// Error: a stage of a pipeline, phases that hand values on already in another way.
Result<bool> KeepGathered(Program& program, const std::vector<UnitId>& units);

}  // namespace interlace
