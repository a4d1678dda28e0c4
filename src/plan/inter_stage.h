// inter_stage.h — cuts a model into pipeline stages: how many blocks and devices each gets, and which point of its
// frontier.
//
// Minimizes, exactly (to `precision`), over all cuts into S stages (Mist, equation 1; t includes the boundary to the
// next stage):
//
//   (G-1) * max_i t_i  +  sum_i t_i  +  max(0, max_i (d_i - sum_{j<i} t_j))
//
// The last two terms are one maximum E = max(A_1, max_i (d_i + A_i)) with A_i = t_i + A_{i+1}, the time from the
// arrival of a micro-batch at stage i until it has passed all stages (D of the suffix recurrence is E - A). Two facts
// make this quick:
//   - For given limits T >= max t and H >= E, a smaller A_{i+1} never hurts: it leaves more room under H for every
//     stage before. So one number per (stage, blocks left, devices left, layout) decides whether a plan within (T, H)
//     exists: Check.
//   - The best E under T only falls as T grows. So the rectangle of (T, H) is halved again and again, a part is dropped
//     when its lower corner cannot beat the best plan or Check finds it empty, and what is left bounds the gap at any
//     time.
//
// A boundary's cost depends on the layouts on both sides of it, so the layout is part of the state: nothing is repaired
// after. Devices: stages lie one after another; a stage of fewer devices than a node lies within one, others are whole
// nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "base/result.h"
#include "plan/strategy.h"

namespace interlace::plan {

// How a stage's devices share a micro-batch; what a boundary must translate between.
struct Layout {
  int32_t micro_batch = 1, dp = 1, tp = 1;
  int32_t devices() const { return dp * tp; }
  friend bool operator==(const Layout&, const Layout&) = default;
};
inline Layout LayoutOf(const Strategy& s) {
  return {s.micro_batch, s.dp, s.tp};
}

struct InterStageProblem {
  int32_t stages = 1, layers = 1, micro_batches = 1;
  int32_t devices = 1, per_node = 1;
  std::vector<int32_t> counts;                                                   // devices that a stage may have
  int32_t fewest_layers = 1, most_layers = std::numeric_limits<int32_t>::max();  // of a stage
  bool one_layout = false;                                                       // all stages alike
  bool one_tp = false;                                                           // tp of all stages alike
  // Called once for each key that may occur; the frontiers must stay where they are until the solver is gone. Points
  // need not be a Pareto set.
  std::function<const Frontier&(const StageKey&)> frontier;
  // Microseconds of one micro-batch's activation one way and its gradient back; none: boundaries cost nothing.
  std::function<double(const Layout& from, const Layout& to, bool inside_node)> boundary_us;
};

// Device counts for stages of different size: a chain of divisors of a node, each a divisor of the next, and whole
// nodes.
std::vector<int32_t> FreeDeviceCounts(int32_t devices, int32_t per_node);

struct StageShape {
  int32_t layers = 1;
  Layout layout;
  friend bool operator==(const StageShape&, const StageShape&) = default;
};

struct StageChoice {
  FrontierPoint point;
  double boundary_us = 0;  // to the next stage and back
  int32_t first_device = 0;
  StageShape shape() const { return {point.strategy.layers, LayoutOf(point.strategy)}; }
};

struct InterStagePlan {
  std::vector<StageChoice> stages;
  double cost_us = 0;
};

struct InterStageOptions {
  int32_t top = 1;  // plans wanted, each with other shapes than the ones before
  double cutoff_us = std::numeric_limits<double>::infinity();  // plans that cost as much or more are of no use
  double precision = 1e-10;                                    // relative: a plan better by less is not looked for
  std::function<bool()> stop = {};                             // time is up: the best so far, and a bound
};

struct InterStageResult {
  std::vector<InterStagePlan> plans;  // best first; empty: none below the cutoff
  double bound_us = 0;                // no plan is better
  bool complete = true;               // not stopped: bound_us is the first plan's cost, or the cutoff
  int64_t checks = 0;
};

// Error: numbers that make no problem (no stages, fewer layers than stages, a count that neither divides a node nor
// fills it).
Result<InterStageResult> SolveInterStage(const InterStageProblem& problem, const InterStageOptions& options = {});

// The objective of stages given as (t with its boundary, d), in order.
double PipelineObjective(int32_t micro_batches, const std::vector<std::pair<double, double>>& stages);

}  // namespace interlace::plan
