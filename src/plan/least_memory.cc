#include "plan/least_memory.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace interlace::plan {
namespace {

// The smallest allowed micro-batch that makes whole accumulation steps; 0: none.
int32_t SmallestMicroBatch(const Space& space, int64_t batch, int32_t dp) {
  if (batch % dp != 0) return 0;
  const std::vector<int32_t>& allowed = space.stage.micro_batches;
  for (int64_t b = 1; b * dp <= batch; ++b) {
    if (batch % (b * dp) != 0) continue;
    if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), b) == allowed.end()) continue;
    int64_t steps = batch / (b * dp);
    if (space.powers_of_two && (steps & (steps - 1)) != 0) continue;
    return static_cast<int32_t>(b);
  }
  return 0;
}

// Visits (stages, dp, tp) of equal stages.
template <typename Visit>
Status ForEachMesh(const Space& space, int32_t blocks, int32_t largest_tp, const ClusterSpec& cluster,
                   const Visit& visit) {
  const auto most = static_cast<int32_t>(std::min<int64_t>(blocks, cluster.devices));
  for (int32_t stages = 1; stages <= most; ++stages) {
    if (cluster.devices % stages != 0 || (space.equal_layers && blocks % stages != 0)) continue;
    if (!space.stages.empty() && std::find(space.stages.begin(), space.stages.end(), stages) == space.stages.end())
      continue;
    const int64_t devices = cluster.devices / stages;
    if (devices < cluster.per_node ? cluster.per_node % devices != 0 : devices % cluster.per_node != 0) continue;
    for (int32_t tp = 1; tp <= largest_tp && tp <= devices; ++tp) {
      if (largest_tp % tp != 0 || devices % tp != 0 || cluster.per_node % tp != 0) continue;
      const std::vector<int32_t>& allowed = space.stage.tensor_parallel;
      if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), tp) == allowed.end()) continue;
      INTERLACE_TRY(visit(stages, static_cast<int32_t>(devices / tp), tp));
    }
  }
  return Ok{};
}

class Finder {
 public:
  Finder(const LayerSource& layers, const ClusterSpec& cluster, const TuneOptions& options, const StageModel& model)
      : blocks_(layers.blocks()), largest_tp_(layers.largest_tp()), cluster_(cluster), o_(options), model_(model) {}

  Result<std::optional<LeastMemory>> Run() {
    INTERLACE_TRY(ForEachMesh(o_.space, blocks_, largest_tp_, cluster_,
                              [&](int32_t stages, int32_t dp, int32_t tp) { return Layouts(stages, dp, tp); }));
    return best_;
  }

 private:
  Status Layouts(int32_t stages, int32_t dp, int32_t tp) {
    int32_t b = SmallestMicroBatch(o_.space, o_.global_batch, dp);
    if (b == 0) return Ok{};
    const StageOptions& s = model_.options();
    float most = s.ratios.empty() ? 1.0f : *std::max_element(s.ratios.begin(), s.ratios.end());
    for (int32_t zero = 0; zero <= 3; ++zero) {
      if (dp > 1 ? !s.zero[zero] : zero > 0) continue;
      for (int32_t out = 0; out < 16; ++out) {
        if ((out & 1 && !s.weights_out) || (out & 2 && !s.gradients_out) || (out & 4 && !s.states_out) ||
            (out & 8 && !s.activations_out) || (out != 0 && !s.offloads(stages == 1, tp)))
          continue;
        for (int32_t recompute = 0; recompute < 3; ++recompute) {
          if ((recompute == 1 && !s.selective) || (recompute == 2 && !s.full) || (recompute != 2 && s.only_full))
            continue;
          Strategy each{.micro_batch = b, .dp = dp, .tp = tp, .zero = zero};
          each.micro_batches = static_cast<int32_t>(o_.global_batch / (int64_t{b} * dp));
          each.selective = recompute == 1, each.full = recompute == 2;  // a mark; Try multiplies it by the layers
          each.weights_out = out & 1 ? most : 0, each.gradients_out = out & 2 ? most : 0;
          each.states_out = out & 4 ? most : 0, each.activations_out = out & 8 ? most : 0;
          INTERLACE_TRY(Try(stages, each));
        }
      }
    }
    return Ok{};
  }

  Status Try(int32_t stages, const Strategy& alike) {
    std::vector<PlanStage> made;
    int64_t peak = 0, host = 0;
    double slowest = 0;
    int32_t block = 0;
    for (int32_t i = 0; i < stages; ++i) {
      PlanStage stage;
      stage.strategy = alike;
      Strategy& s = stage.strategy;
      // The first stages hold most micro-batches, so the odd blocks go to the last ones.
      s.layers = blocks_ / stages + (i >= stages - blocks_ % stages);
      s.embedding = i == 0, s.head = i == stages - 1;
      s.in_flight = std::min(stages - i, s.micro_batches);
      s.selective *= s.layers, s.full *= s.layers;
      INTERLACE_TRY(model_.Check(s));
      stage.cost = model_.CostOf(s);
      stage.first_block = block;
      stage.first_device = i * s.dp * s.tp;
      block += s.layers;
      peak = std::max({peak, stage.cost.peak_forward, stage.cost.peak_backward});
      host = std::max(host, stage.cost.host_bytes);
      slowest = std::max(slowest, stage.cost.stable_us);
      if (best_ && (peak > best_->device_bytes || (peak == best_->device_bytes && slowest >= slowest_))) return Ok{};
      made.push_back(stage);
    }
    host *= cluster_.per_node;
    if (host > model_.options().host_bytes) return Ok{};
    slowest_ = slowest;
    best_.emplace();
    best_->device_bytes = peak, best_->host_bytes = host;
    best_->plan.stages = std::move(made);
    return Ok{};
  }

  const int32_t blocks_, largest_tp_;
  const ClusterSpec& cluster_;
  const TuneOptions& o_;
  const StageModel& model_;
  std::optional<LeastMemory> best_;
  double slowest_ = 0;
};

}  // namespace

Result<std::optional<LeastMemory>> FindLeastMemory(const LayerSource& layers, const ClusterSpec& cluster,
                                                   const TuneOptions& options) {
  StageOptions stage = options.space.stage;
  stage.global_batch = options.global_batch;
  stage.device_bytes = std::numeric_limits<int64_t>::max() / 4;
  stage.host_bytes = HostBytesFor(cluster, options.host_bytes);
  // One micro-batch a layout is all that is asked for: the others need not be prepared.
  for (int32_t dp = 1; dp <= cluster.devices; ++dp) {
    int32_t b = SmallestMicroBatch(options.space, options.global_batch, dp);
    if (cluster.devices % dp == 0 && b > 0) stage.micro_batches.push_back(b);
  }
  std::sort(stage.micro_batches.begin(), stage.micro_batches.end());
  stage.micro_batches.erase(std::unique(stage.micro_batches.begin(), stage.micro_batches.end()),
                            stage.micro_batches.end());
  INTERLACE_ASSIGN(StageModel model, StageModel::Create(layers, cluster, stage));
  INTERLACE_ASSIGN(std::optional<LeastMemory> found, Finder(layers, cluster, options, model).Run());
  if (!found) return found;
  Plan& plan = found->plan;
  plan.model = options.model, plan.cluster = cluster.name, plan.space = options.space.name;
  plan.global_batch = options.global_batch, plan.sequence = options.sequence,
  plan.flash_attention = options.flash_attention;
  INTERLACE_ASSIGN(LayerCost block, layers.Cost(Role::kBlock, 1, 1));
  for (size_t i = 0; i + 1 < plan.stages.size(); ++i) {
    const Strategy& s = plan.stages[i].strategy;
    Layout layout = LayoutOf(s);
    bool inside = plan.stages[i].first_device / cluster.per_node == plan.stages[i + 1].first_device / cluster.per_node;
    plan.stages[i].send_us =
        BoundaryUs(cluster, static_cast<double>(block.boundary) * s.micro_batch * s.dp, layout, layout, inside);
  }
  INTERLACE_ASSIGN(plan, Reprice(plan, layers, cluster, stage));
  plan.bound_us = 0;
  return found;
}

Result<std::optional<LeastMemory>> LeastMemoryOf(const Baseline& baseline, const LayerSource& layers,
                                                 const ClusterSpec& cluster, TuneOptions options) {
  std::optional<LeastMemory> best;
  for (const Space& space : baseline.spaces) {
    options.space = space;
    INTERLACE_ASSIGN(std::optional<LeastMemory> found, FindLeastMemory(layers, cluster, options));
    if (found && (!best || found->device_bytes < best->device_bytes)) best = std::move(found);
  }
  return best;
}

int64_t DivisibleBatch(const Baseline& baseline, const LayerSource& layers, const ClusterSpec& cluster, int64_t batch) {
  constexpr int64_t kSoon = 4096;
  for (int64_t b = batch; b <= batch + kSoon; ++b) {
    for (const Space& space : baseline.spaces) {
      bool divides = false;
      const Status visited = ForEachMesh(space, layers.blocks(), layers.largest_tp(), cluster,
                                         [&](int32_t, int32_t dp, int32_t) -> Status {
                                           divides = divides || SmallestMicroBatch(space, b, dp) > 0;
                                           return Ok{};
                                         });
      if (visited.ok() && divides) return b;
    }
  }
  return 0;
}

}  // namespace interlace::plan
