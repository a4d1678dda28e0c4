// tune_state.h — what the search over G and S goes through, and the best plans it has. Inside the room only (tune.h).
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/inter_stage.h"
#include "plan/tune.h"

namespace interlace::plan {

// Accumulation steps, stages, and the device counts that a stage may have.
struct Pair {
  int32_t micro_batches = 1, stages = 1;
  std::vector<int32_t> counts;
  double bound_us = 0;   // no plan of it is faster
  bool bounded = false;  // by the choice between stages, not only by the work there is
  bool done = false;
};

// All of a space. The same G and S occur twice where equal stages need device counts that uneven ones do not have.
std::vector<Pair> PairsOf(const Space& space, int32_t blocks, const ClusterSpec& cluster, int64_t global_batch);

struct FoundPlan {  // of computed frontiers only
  InterStagePlan plan;
  int32_t micro_batches = 1;
};

// The best plans so far, each of other shape.
class BestPlans {
 public:
  explicit BestPlans(int32_t top) : top_(top) {}
  void Keep(const InterStagePlan& plan, int32_t micro_batches);
  const std::vector<FoundPlan>& found() const { return found_; }  // best first, at most `top`
  double First() const { return found_.empty() ? kNone : found_.front().plan.cost_us; }
  // A plan must be faster to be kept.
  double Last() const { return static_cast<int32_t>(found_.size()) < top_ ? kNone : found_.back().plan.cost_us; }

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  int32_t top_;
  std::vector<FoundPlan> found_;
};

}  // namespace interlace::plan
