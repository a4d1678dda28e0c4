// A plan's times and memory made anew.
#include <algorithm>
#include <utility>
#include <vector>

#include "plan/recurrence.h"
#include "plan/tune.h"

namespace interlace::plan {

Result<Plan> Reprice(const Plan& plan, const LayerSource& layers, const ClusterSpec& cluster,
                     const StageOptions& options) {
  StageOptions stage_options = options;
  stage_options.global_batch = plan.global_batch;
  stage_options.tensor_parallel.clear();
  for (const PlanStage& stage : plan.stages) stage_options.tensor_parallel.push_back(stage.strategy.tp);
  INTERLACE_ASSIGN(StageModel model, StageModel::Create(layers, cluster, stage_options));
  Plan out = plan;
  std::vector<std::pair<double, double>> stages;
  for (PlanStage& stage : out.stages) {
    INTERLACE_TRY(model.Check(stage.strategy));
    stage.cost = model.CostOf(stage.strategy);
    stage.passes = model.PassesOf(stage.strategy);
    stages.emplace_back(stage.cost.stable_us + stage.send_us, stage.cost.extra_us);
  }
  out.step_us = PipelineObjective(out.micro_batches(), stages);
  out.pipeline_us = static_cast<double>(RunPipeline(PipelineStages(out), out.micro_batches()).makespan_ps) / 1e6;
  out.bound_us = std::min(out.bound_us, out.step_us);
  return out;
}

}  // namespace interlace::plan
