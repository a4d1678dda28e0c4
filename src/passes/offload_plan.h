// offload_plan.h — which storages leave memory, and when: the memory of every op stays within a limit, copies run
// beside the compute lane.
#pragma once

#include "passes/offload_intervals.h"

namespace interlace {

struct OffloadChoice {
  int64_t limit = 0;
  int64_t window = 0;  // bytes below the limit that the choice leaves for what is on its way
  double slack = 1.2;  // times a copy's own time between its start and its wait
  std::vector<OffloadKind> kinds;
};

// Intervals with all their places. Error: the limit cannot be met; it names the op and says the least that can.
Result<std::vector<Interval>> PlanOffload(const Program& program, const StepLine& line, CostModel& model,
                                          const OffloadChoice& choice);

// No order of the copies makes the step shorter, its ops in the order they have: what is above the limit at an op comes
// back after it, all but what is not used again before the next step; the ops before it take their time first.
Result<int64_t> LeastStepPs(const StepLine& line, CostModel& model, const OffloadChoice& choice);

}  // namespace interlace
