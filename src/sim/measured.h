// measured.h — a step that ran, in the place of a simulated one: chakra_export.h and SimulationSnapshot then write it
// in the same formats, so that a prediction and a measurement are read by the same tools.
//
//   runtime: (run, op, begin, end) of every op and transfer  ->  Measured  ->  SimulationChakra(s, rank)
//                                                                          ->  SimulationSnapshot(s)
//
// Times are of the clock that all ranks share, in nanoseconds from the first rank's begin. What was not recorded
// (views, transfers of a rank alone) takes the place that program order leaves it.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/simulate.h"

namespace interlace {

struct MeasuredTime {
  int32_t run = 0;  // number of the phase's run within the step
  OpId op = kNone;
  int64_t begin_ns = 0, end_ns = 0;
};

struct MeasuredRank {
  std::vector<MeasuredTime> ops;        // in order of execution
  std::vector<MeasuredTime> transfers;  // by the op that started them, in order of issue
};

// One record a rank; `program` must outlive the result, of which only ranks, transfers and times are filled. Error:
// another number of ranks than the program has, an op or a run that it does not have, times that are none.
Result<Simulation> Measured(const Program& program, const std::vector<MeasuredRank>& ranks);

}  // namespace interlace
