#include "plan/baselines.h"

#include <algorithm>

#include "base/sort.h"
#include "base/suggest.h"

namespace interlace::plan {
namespace {

void NoOffload(StageOptions& stage) {
  stage.weights_out = stage.gradients_out = stage.states_out = stage.activations_out = false;
}

// Stages of the same devices and blocks, one layout; every block recomputed or none.
Space Grid(std::string name, bool recompute) {
  Space space;
  space.name = std::move(name);
  space.free_devices = false;
  space.one_layout = true;
  space.layer_slack = 0;
  space.equal_layers = true;
  space.stage.selective = false;
  space.stage.full = space.stage.only_full = recompute;
  space.stage.uniform_recompute = true;
  space.stage.zero = {true, true, false, false};
  NoOffload(space.stage);
  return space;
}

Baseline Deepspeed() {
  Baseline out{
      "deepspeed", "one stage: ZeRO 0 to 3, each kind of state on the host or not, all blocks recomputed or none", {}};
  for (bool recompute : {false, true}) {
    Space space = Grid(out.name, recompute);
    space.stages = {1};
    space.stage.zero = {true, true, true, true};
    space.stage.weights_out = space.stage.gradients_out = space.stage.states_out = true;
    space.stage.ratios = {0, 1};
    out.spaces.push_back(space);
  }
  return out;
}

Baseline Aceso() {
  Space space = PaperSpace();
  space.name = "aceso";
  space.stage.zero = {true, false, false, false};
  NoOffload(space.stage);
  space.stage.overlap = false;
  space.imbalance_aware = false;
  return {
      space.name, "uneven stages and recomputed blocks; no ZeRO, no offload; chosen as if nothing overlapped", {space}};
}

std::vector<Baseline> Steps() {
  std::vector<Baseline> out;
  Space parallel = Grid("parallel", false), full = Grid("full-ckpt", true), ckpt = Grid("ckpt", false);
  ckpt.stage.full = true, ckpt.stage.uniform_recompute = false;
  Space zero = full, offload = full, all = ckpt;
  zero.name = "zero", zero.stage.zero = {true, true, true, true};
  offload.name = "offload";
  offload.stage.weights_out = offload.stage.gradients_out = offload.stage.states_out = offload.stage.activations_out =
      true;
  all.name = "all", all.stage = PaperSpace().stage;
  out.push_back({"parallel", "parallelism and ZeRO-1 alone, equal stages, no memory saved", {parallel}});
  out.push_back({"full-ckpt", "parallelism, all blocks recomputed", {full}});
  out.push_back({"ckpt", "parallelism and how many blocks each stage recomputes", {ckpt}});
  out.push_back({"zero", "parallelism and ZeRO, all blocks recomputed", {zero}});
  out.push_back({"offload", "parallelism and offload, all blocks recomputed", {offload}});
  out.push_back({"all", "all of these together, stages of one layout", {all}});

  Space grid = Grid("grid", true);
  grid.imbalance_aware = false;
  Space grid_kept = Grid("grid", false);
  grid_kept.imbalance_aware = false;
  Space tuned = PaperSpace();
  tuned.name = "grid+ckpt";
  tuned.free_devices = false;
  tuned.imbalance_aware = false;
  Space offloaded = tuned, aware = tuned;
  tuned.stage.zero = {true, true, false, false};
  NoOffload(tuned.stage);
  offloaded.name = "grid+offload";
  aware.name = "grid+imbalance", aware.imbalance_aware = true;
  out.push_back({"grid", "megatron's grid, micro-batches taken to be alike", {grid, grid_kept}});
  out.push_back({"grid+ckpt", "and stages uneven in blocks, recomputed blocks and layout", {tuned}});
  out.push_back({"grid+offload", "and ZeRO 2, 3 and offload", {offloaded}});
  out.push_back({"grid+imbalance", "and the first and last micro-batch told apart", {aware}});
  return out;
}

}  // namespace

const std::vector<Baseline>& Baselines() {
  static const std::vector<Baseline> kAll = [] {
    std::vector<Baseline> all = {{"full", "everything", {FullSpace()}},
                                 {"paper", "Mist, Table 2: no selective recomputation", {PaperSpace()}},
                                 {"artifact", "what Mist's artifact searches", {ArtifactSpace()}},
                                 {"megatron",
                                  "equal stages, one layout, ZeRO-1, all blocks recomputed or none",
                                  {Grid("megatron", true), Grid("megatron", false)}},
                                 Deepspeed(),
                                 Aceso()};
    for (Baseline& step : Steps()) all.push_back(std::move(step));
    return all;
  }();
  return kAll;
}

Result<const Baseline*> FindBaseline(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Baseline& baseline : Baselines()) {
    if (baseline.name == name) return &baseline;
    names.push_back(baseline.name);
  }
  return MakeError("there is no space '", name, "'", DidYouMean(name, names));
}

Result<TuneResult> TuneBaseline(const Baseline& baseline, const LayerSource& layers, const ClusterSpec& cluster,
                                TuneOptions options) {
  TuneResult all;
  all.bound_us = std::numeric_limits<double>::infinity();
  options.time_limit_s /= static_cast<double>(baseline.spaces.size());
  for (const Space& space : baseline.spaces) {
    options.space = space;
    INTERLACE_ASSIGN(TuneResult one, Tune(layers, cluster, options));
    all.plans.insert(all.plans.end(), one.plans.begin(), one.plans.end());
    all.bound_us = std::min(all.bound_us, one.bound_us);
    all.complete = all.complete && one.complete;
    all.pairs += one.pairs, all.pairs_solved += one.pairs_solved;
    all.frontiers += one.frontiers, all.points += one.points, all.checks += one.checks;
    if (one.warm_us > 0 && (all.warm_us == 0 || one.warm_us < all.warm_us)) all.warm_us = one.warm_us;
  }
  StableSort(all.plans, [](const Plan& a, const Plan& b) { return a.step_us < b.step_us; });
  if (static_cast<int32_t>(all.plans.size()) > options.top) all.plans.resize(static_cast<size_t>(options.top));
  for (Plan& plan : all.plans) plan.bound_us = std::min(plan.bound_us, std::min(all.bound_us, plan.step_us));
  return all;
}

}  // namespace interlace::plan
