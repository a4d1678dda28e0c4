// bounds.h — times that no execution of a program's ops can beat on these machines, in whatever order they are issued.
//
// Each is a sum or a path at full rate: compute of a rank, each lane, each direction of a link, host bandwidth, file
// store, cores, launches, and the longest chain of data dependencies. The largest is the lower bound of the step.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "sim/engine.h"

namespace interlace {

struct Bound {
  std::string_view name;  // "compute", "links between nodes", "data dependencies", ...
  int64_t time_ps = 0;
};

// By falling time; never empty. Sums beyond 64 bits stay at the largest time.
std::vector<Bound> LowerBounds(const EngineInput& input, const CostModel& model);

}  // namespace interlace
