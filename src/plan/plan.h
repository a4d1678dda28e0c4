// plan.h — a whole training plan: which stage holds which blocks, on which devices, trained how, and what that is
// predicted to cost. Data only; found by tune.h, written and checked as text elsewhere.
//
// Stages are in pipeline order. Devices are numbered as the cluster numbers them, nodes one after another; stage i owns
// [first_device, first_device + dp * tp), tensor parallel innermost. 1F1B schedule, the same G for every stage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/strategy.h"

namespace interlace::plan {

struct PlanStage {
  Strategy strategy;
  int32_t first_block = 0;  // blocks [first_block, first_block + strategy.layers)
  int32_t first_device = 0;
  StageCost cost;
  PassTimes passes;
  double send_us = 0;  // one micro-batch's activation to the next stage and its gradient back; 0 for the last
};

struct Plan {
  std::string model, cluster;              // names; a cluster's name is a preset or a file's `name`
  int64_t global_batch = 1, sequence = 1;  // samples of a step, tokens of a sample
  bool flash_attention = true;
  std::string space;  // searched: "full", "paper", "artifact", or a baseline's name (baselines.h)
  std::vector<PlanStage> stages;
  double step_us = 0;      // the objective: (G-1) * max t + sum t + max_i (d_i - sum_{j<i} t_j), t with its send
  double pipeline_us = 0;  // the 1F1B recurrence (recurrence.h), which keeps forward and backward apart
  double bound_us = 0;     // no plan of the space beats this; below step_us when the search was stopped early

  int32_t micro_batches() const { return stages.empty() ? 0 : stages.front().strategy.micro_batches; }
  // Share of step_us by which a better plan of the space might still be faster.
  double gap() const { return step_us > 0 ? (step_us - bound_us) / step_us : 0; }
  double samples_per_s() const { return step_us > 0 ? static_cast<double>(global_batch) * 1e6 / step_us : 0; }
};

}  // namespace interlace::plan
