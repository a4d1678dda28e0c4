// core_layers.cc — what a model's layers cost, and what a stage of them needs: from texts to dicts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>

#include "bindings/core.h"
#include "bindings/testing/core_testing.h"
#include "cost/cluster.h"
#include "plan/captured_layers.h"
#include "plan/stage_model.h"

namespace py = pybind11;

namespace interlace {
namespace {

using plan::LayerCost;

Result<std::unique_ptr<plan::LayerSource>> Layers(const std::string& model, const ClusterSpec& cluster,
                                                  int64_t sequence) {
  return plan::ReadLayers(model, "model", cluster, sequence);
}

Result<std::map<std::string, LayerCost>> Costs(const std::string& model, const std::string& cluster_text,
                                               int64_t sequence, int32_t micro_batch, int32_t tp) {
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, "cluster"));
  INTERLACE_ASSIGN(std::unique_ptr<plan::LayerSource> layers, Layers(model, cluster, sequence));
  std::map<std::string, LayerCost> out;
  const std::pair<plan::Role, const char*> roles[] = {
      {plan::Role::kEmbedding, "embedding"}, {plan::Role::kBlock, "block"}, {plan::Role::kHead, "head"}};
  for (const auto& [role, name] : roles) {
    INTERLACE_ASSIGN(out[name], layers->Cost(role, micro_batch, tp));
  }
  return out;
}

struct StageMemory {
  plan::StageCost cost;
  plan::Explanation explanation;
};

// A model in one stage on dp devices.
Result<StageMemory> OneStage(const std::string& model, const std::string& cluster_text, int64_t sequence,
                             plan::Strategy strategy, int32_t weight_bytes, int32_t gradient_bytes, int32_t state_bytes,
                             bool as_run) {
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, "cluster"));
  INTERLACE_ASSIGN(std::unique_ptr<plan::LayerSource> layers, Layers(model, cluster, sequence));
  plan::StageOptions options;
  options.global_batch = int64_t{strategy.micro_batch} * strategy.dp * strategy.micro_batches;
  options.device_bytes = cluster.MemoryLimitBytes();
  options.weight_bytes = weight_bytes, options.gradient_bytes = gradient_bytes, options.state_bytes = state_bytes;
  options.as_run = as_run;
  options.micro_batches = {strategy.micro_batch};
  options.tensor_parallel = {strategy.tp};
  INTERLACE_ASSIGN(plan::StageModel stage, plan::StageModel::Create(*layers, cluster, options));
  strategy.layers = layers->blocks();
  strategy.embedding = strategy.head = true;
  INTERLACE_TRY(stage.Check(strategy));
  return StageMemory{stage.CostOf(strategy), stage.Explain(strategy)};
}

py::dict CostDict(const LayerCost& c) {
  using namespace py::literals;
  return py::dict(
      "forward_us"_a = c.forward_us, "backward_us"_a = c.backward_us, "tp_forward_us"_a = c.tp_forward_us,
      "tp_backward_us"_a = c.tp_backward_us, "recompute_full_us"_a = c.recompute_full_us,
      "recompute_selective_us"_a = c.recompute_selective_us, "tp_recompute_full_us"_a = c.tp_recompute_full_us,
      "tp_recompute_selective_us"_a = c.tp_recompute_selective_us, "parameters"_a = c.parameters, "tied"_a = c.tied,
      "largest_unit"_a = c.largest_unit, "saved_kept"_a = c.saved_kept, "saved_selective"_a = c.saved_selective,
      "saved_full"_a = c.saved_full, "work_forward"_a = c.work_forward, "work_backward"_a = c.work_backward,
      "work_backward_selective"_a = c.work_backward_selective, "work_backward_full"_a = c.work_backward_full,
      "boundary"_a = c.boundary);
}

}  // namespace

void AddLayers(py::module_& m) {
  using namespace py::literals;
  m.def(
      "layer_costs",
      [](const std::string& model, const std::string& cluster, int64_t sequence, int32_t micro_batch, int32_t tp) {
        Result<std::map<std::string, LayerCost>> costs = MakeError("not counted");
        {
          py::gil_scoped_release unlocked;
          costs = Costs(model, cluster, sequence, micro_batch, tp);
        }
        py::dict out;
        for (const auto& [role, cost] : Take(std::move(costs))) out[role.c_str()] = CostDict(cost);
        return out;
      },
      "model"_a, "cluster"_a, "sequence"_a, "micro_batch"_a = 1, "tp"_a = 1,
      "What the embedding, a block and the head of a model text (interlace.plan.layers) cost on a cluster: "
      "microseconds and bytes by role.");
  m.def(
      "stage_memory",
      [](const std::string& model, const std::string& cluster, int64_t sequence, int32_t micro_batch,
         int32_t micro_batches, int32_t dp, int32_t zero, int32_t full, int32_t selective, int32_t weight_bytes,
         int32_t gradient_bytes, int32_t state_bytes, bool as_run) {
        plan::Strategy strategy;
        strategy.micro_batch = micro_batch, strategy.micro_batches = micro_batches, strategy.dp = dp,
        strategy.zero = zero;
        strategy.full = full, strategy.selective = selective;
        Result<StageMemory> memory = MakeError("not counted");
        {
          py::gil_scoped_release unlocked;
          memory = OneStage(model, cluster, sequence, strategy, weight_bytes, gradient_bytes, state_bytes, as_run);
        }
        StageMemory found = Take(std::move(memory));
        py::dict bytes;
        for (const auto& part : found.explanation.bytes) bytes[part.name.c_str()] = part.device;
        return py::dict("peak_forward"_a = found.cost.peak_forward, "peak_backward"_a = found.cost.peak_backward,
                        "bytes"_a = bytes);
      },
      "model"_a, "cluster"_a, "sequence"_a, py::kw_only(), "micro_batch"_a, "micro_batches"_a = 1, "dp"_a = 1,
      "zero"_a = 0, "full"_a = 0, "selective"_a = 0, "weight_bytes"_a = 4, "gradient_bytes"_a = 4, "state_bytes"_a = 8,
      "as_run"_a = true,
      "Peaks of a device that trains a whole model in one stage, and where the larger one comes from.");
}

}  // namespace interlace
