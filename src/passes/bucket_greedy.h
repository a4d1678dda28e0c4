// bucket_greedy.h — SimpleFSDP's Algorithm 1 over the gathers of one phase (bucket.h has the conditions).
#pragma once

#include <vector>

#include "base/result.h"
#include "cost/cost_model.h"
#include "passes/transfers.h"

namespace interlace {

struct GreedyOptions {
  int64_t limit = 0;
  bool model_time = false;  // else T = alpha + beta * n
};

// Indices of gathers, by bucket; every gather that this phase waits for is in one.
Result<std::vector<std::vector<size_t>>> GreedyBuckets(const Program& program, const Transfers& transfers,
                                                       CostModel& model, const GreedyOptions& options);

}  // namespace interlace
