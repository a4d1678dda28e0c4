#include "plan/tune.h"

#include <gtest/gtest.h>

#include <map>

#include "plan/baselines.h"
#include "plan/frontiers.h"
#include "plan/least_memory.h"
#include "plan/pair_bound.h"
#include "plan/plan_text.h"
#include "plan/recurrence.h"
#include "plan/testing/table_layers.h"
#include "plan/tune_state.h"

namespace interlace::plan {
namespace {

ClusterSpec Preset(std::string_view name) {
  return std::move(*LoadCluster(name, "cluster"));
}

TuneOptions Options(int64_t batch, int64_t device_bytes = 0) {
  TuneOptions options;
  options.model = "table";
  options.global_batch = batch;
  options.device_bytes = device_bytes;
  options.threads = 1;
  return options;
}

// Every (G, S) with every frontier computed: what the search over bounds must equal.
double Exhaustive(const LayerSource& layers, const ClusterSpec& cluster, const TuneOptions& o, int64_t sample_bytes) {
  StageOptions stage = o.space.stage;
  stage.global_batch = o.global_batch;
  stage.device_bytes = o.device_bytes;
  std::vector<StageModel> models;
  for (int32_t tp : {1, 2, 4}) {
    stage.tensor_parallel = {tp};
    models.push_back(std::move(*StageModel::Create(layers, cluster, stage)));
  }
  double best = std::numeric_limits<double>::infinity();
  std::map<std::array<int32_t, 6>, Frontier> known;
  for (int32_t g = 1; g <= o.global_batch; ++g) {
    if (o.global_batch % g != 0) continue;
    for (int32_t s = 1; s <= std::min<int64_t>(layers.blocks(), cluster.devices); ++s) {
      InterStageProblem p;
      p.stages = s, p.layers = layers.blocks(), p.micro_batches = g;
      p.devices = static_cast<int32_t>(cluster.devices), p.per_node = static_cast<int32_t>(cluster.per_node);
      p.counts = FreeDeviceCounts(p.devices, p.per_node);
      p.frontier = [&](const StageKey& k) -> const Frontier& {
        auto [at, added] = known.try_emplace({k.layers, k.embedding, k.head, k.devices, k.micro_batches, k.in_flight});
        if (!added) return at->second;
        for (const StageModel& model : models) {
          Frontier part = model.FrontierOf(k);
          at->second.insert(at->second.end(), part.begin(), part.end());
        }
        return at->second;
      };
      double bytes = static_cast<double>(sample_bytes * o.global_batch / g);
      p.boundary_us = [&](const Layout& a, const Layout& b, bool inside) {
        return BoundaryUs(cluster, bytes, a, b, inside);
      };
      InterStageResult result = *SolveInterStage(p);
      if (!result.plans.empty()) best = std::min(best, result.plans[0].cost_us);
    }
  }
  return best;
}

// What is priced out has no plan that fast by the exact choice; the bounds are of some use.
TEST(Tune, PricesLeaveNoPlanOut) {
  testing::GptLayers layers(1024, 16, 10);
  ClusterSpec cluster = Preset("l4-24gb-16");
  cluster.per_node = 4;
  TuneOptions options = Options(48, int64_t{6000} << 20);
  StageOptions stage;
  stage.global_batch = options.global_batch, stage.device_bytes = options.device_bytes;
  Frontiers frontiers = std::move(*Frontiers::Create(layers, cluster, stage, options));
  PairBounds bounds(frontiers);
  int solved = 0, sharp = 0;
  for (const Pair& pair : PairsOf(options.space, layers.blocks(), cluster, options.global_batch)) {
    InterStageProblem p;
    p.stages = pair.stages, p.layers = layers.blocks(), p.micro_batches = pair.micro_batches, p.counts = pair.counts;
    p.devices = static_cast<int32_t>(cluster.devices), p.per_node = static_cast<int32_t>(cluster.per_node);
    p.frontier = [&](const StageKey& key) -> const Frontier& { return frontiers.Of(key); };
    InterStageResult best = *SolveInterStage(p);
    if (best.plans.empty()) continue;
    const double us = best.plans[0].cost_us;
    EXPECT_LE(bounds.LeastUs(p), us * (1 + 1e-9)) << pair.micro_batches << " " << pair.stages;
    EXPECT_FALSE(bounds.NoneBeats(p, us * (1 + 1e-6))) << pair.micro_batches << " " << pair.stages;
    ++solved, sharp += bounds.NoneBeats(p, us * 0.7);
  }
  EXPECT_GT(sharp, solved / 2) << "of " << solved;
}

TEST(Tune, EqualsTheSearchWithAllFrontiers) {
  testing::GptLayers layers(1024, 16, 6);
  ClusterSpec cluster = Preset("l4-24gb-8");
  cluster.per_node = 4;
  for (int64_t megabytes : {1500, 6000}) {
    TuneOptions options = Options(16, megabytes << 20);
    auto tuned = Tune(layers, cluster, options);
    ASSERT_TRUE(tuned.ok()) << ErrorOf(tuned);
    double exact = Exhaustive(layers, cluster, options, layers.Cost(Role::kBlock, 1, 1)->boundary);
    ASSERT_FALSE(tuned->plans.empty()) << megabytes;
    EXPECT_NEAR(tuned->plans[0].step_us, exact, 1e-8 * exact) << megabytes;
    EXPECT_TRUE(tuned->complete);
    EXPECT_NEAR(tuned->bound_us, exact, 1e-8 * exact);
  }
}

TEST(Tune, PlansKeepTheRulesAndCostWhatTheySay) {
  testing::GptLayers layers(2048, 32, 24);
  ClusterSpec cluster = Preset("l4-24gb-16");
  TuneOptions options = Options(64);
  options.top = 4;
  auto tuned = Tune(layers, cluster, options);
  ASSERT_TRUE(tuned.ok()) << ErrorOf(tuned);
  ASSERT_EQ(tuned->plans.size(), 4u);
  for (const Plan& plan : tuned->plans) {
    PlanFile file;
    file.plan = plan;
    file.blocks = layers.blocks(), file.devices = cluster.devices, file.per_node = cluster.per_node;
    file.memory_limit = cluster.MemoryLimitBytes();
    Status rules = VerifyPlan(file, &cluster);
    EXPECT_TRUE(rules.ok()) << ErrorOf(rules);
    StageOptions stage;
    stage.device_bytes = cluster.MemoryLimitBytes();
    auto again = Reprice(plan, layers, cluster, stage);
    ASSERT_TRUE(again.ok()) << ErrorOf(again);
    EXPECT_NEAR(again->step_us, plan.step_us, 1e-6 * plan.step_us);
    EXPECT_GE(plan.step_us, tuned->plans[0].step_us);
    for (const PlanStage& s : plan.stages) {
      EXPECT_NEAR(s.passes.forward_us + s.passes.backward_us, s.cost.stable_us, 1e-6 * s.cost.stable_us);
    }
  }
}

// The same place with less work, whatever changed: from a plan of before its stages are tried first.
TEST(Tune, APlanOfBeforeShortensTheSearchAfterAChange) {
  testing::GptLayers layers(2048, 32, 24);
  auto before = Tune(layers, Preset("l4-24gb-16"), Options(64));
  ASSERT_TRUE(before.ok()) << ErrorOf(before);
  int64_t peak = 0;
  for (const PlanStage& s : before->plans[0].stages) peak = std::max({peak, s.cost.peak_forward, s.cost.peak_backward});
  struct Change {
    const char* cluster;
    int64_t batch, device_bytes;
  };
  int64_t cold_checks = 0, warm_checks = 0;
  for (const Change& c :
       {Change{"l4-24gb-16", 64, 0}, Change{"l4-24gb-16", 32, 0}, Change{"l4-24gb-16", 64, peak * 97 / 100},
        Change{"l4-24gb-8", 64, 0}, Change{"l4-24gb-32", 64, 0}}) {
    SCOPED_TRACE(std::string(c.cluster) + ", batch " + std::to_string(c.batch) + ", limit " +
                 std::to_string(c.device_bytes));
    TuneOptions options = Options(c.batch, c.device_bytes);
    auto cold = Tune(layers, Preset(c.cluster), options);
    options.warm = &before->plans[0];
    auto warm = Tune(layers, Preset(c.cluster), options);
    ASSERT_TRUE(cold.ok() && warm.ok());
    const double best = cold->plans[0].step_us;
    EXPECT_NEAR(warm->plans[0].step_us, best, 1e-8 * best);
    EXPECT_EQ(cold->warm_us, 0);
    EXPECT_GE(warm->warm_us, best * (1 - 1e-8)) << "its stages can be had here";
    cold_checks += cold->checks, warm_checks += warm->checks;
  }
  EXPECT_LT(warm_checks, cold_checks);
  TuneOptions options = Options(64);
  options.warm = &before->plans[0];
  auto other = Tune(testing::GptLayers(2048, 32, 20), Preset("l4-24gb-16"), options);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(other->warm_us, 0) << "a plan for other blocks is no help";
}

TEST(Tune, LeastMemoryIsOfTheSpace) {
  testing::GptLayers layers(1024, 16, 6);
  TuneOptions options = Options(16);
  options.space.stage.tensor_parallel = {1};
  auto least = FindLeastMemory(layers, Preset("l4-24gb-8"), options);
  ASSERT_TRUE(least.ok()) << ErrorOf(least);
  ASSERT_TRUE(least->has_value());
  for (const PlanStage& stage : (*least)->plan.stages) EXPECT_EQ(stage.strategy.tp, 1);
  Baseline one_stage{"one stage", "", {options.space}};
  one_stage.spaces[0].stages = {1};
  EXPECT_EQ(DivisibleBatch(one_stage, layers, Preset("l4-24gb-8"), 17), 24);
}

TEST(Tune, NoBaselineIsFasterThanTheFullSpace) {
  struct Case {
    int64_t hidden, heads, layers;
    const char* cluster;
    int64_t batch;
  };
  for (const Case& c : {Case{2048, 32, 24, "l4-24gb-2", 32}, Case{2560, 32, 24, "l4-24gb-4", 32},
                        Case{4096, 32, 16, "l4-24gb-8", 32}}) {
    testing::GptLayers layers(c.hidden, c.heads, c.layers);
    ClusterSpec cluster = Preset(c.cluster);
    std::map<std::string, double> step;
    for (const Baseline& baseline : Baselines()) {
      auto tuned = TuneBaseline(baseline, layers, cluster, Options(c.batch));
      ASSERT_TRUE(tuned.ok()) << baseline.name << ": " << ErrorOf(tuned);
      step[baseline.name] = tuned->plans.empty() ? std::numeric_limits<double>::infinity() : tuned->plans[0].step_us;
      EXPECT_GE(step[baseline.name], step["full"] * (1 - 1e-9)) << baseline.name << " on " << c.cluster;
    }
    EXPECT_GE(step["artifact"], step["paper"] * (1 - 1e-9)) << c.cluster;
    EXPECT_GE(step["grid"], step["megatron"] * (1 - 1e-9)) << c.cluster;
    EXPECT_GE(step["grid+offload"], step["grid+imbalance"] * (1 - 1e-9)) << c.cluster;
    EXPECT_LT(step["full"], std::numeric_limits<double>::infinity());
  }
}

TEST(Tune, OutOfTimeGivesABound) {
  testing::GptLayers layers(2048, 32, 24);
  ClusterSpec cluster = Preset("l4-24gb-16");
  auto exact = Tune(layers, cluster, Options(64));
  TuneOptions options = Options(64);
  options.time_limit_s = 1e-9;
  auto none = Tune(layers, cluster, options);
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->complete);
  EXPECT_TRUE(none->plans.empty());
  EXPECT_GT(none->bound_us, 0);
  EXPECT_LE(none->bound_us, exact->plans[0].step_us);
  // Wherever it is stopped, the best of all lies between the bound and the best so far.
  const double best = exact->plans[0].step_us;
  for (double seconds : {1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1}) {
    options.time_limit_s = seconds;
    auto some = Tune(layers, cluster, options);
    ASSERT_TRUE(some.ok());
    EXPECT_LE(some->bound_us, best * (1 + 1e-9)) << seconds;
    if (some->plans.empty()) continue;
    const Plan& plan = some->plans[0];
    EXPECT_GE(plan.step_us, best * (1 - 1e-9)) << seconds;
    EXPECT_NEAR(plan.step_us * (1 - plan.gap()), some->bound_us, 1e-6 * best) << seconds;
    EXPECT_TRUE(!some->complete || plan.gap() < 1e-9) << seconds;
  }
}

TEST(Tune, ToleranceBoundsWhatIsGivenUp) {
  testing::GptLayers layers(2048, 32, 24);
  ClusterSpec cluster = Preset("l4-24gb-16");
  auto exact = Tune(layers, cluster, Options(64));
  TuneOptions options = Options(64);
  options.tolerance = 0.05;
  auto rough = Tune(layers, cluster, options);
  ASSERT_TRUE(rough.ok());
  ASSERT_FALSE(rough->plans.empty());
  const double best = exact->plans[0].step_us;
  EXPECT_GE(rough->plans[0].step_us, best * (1 - 1e-9));
  EXPECT_LE(rough->plans[0].step_us * (1 - options.tolerance), best);
  EXPECT_LE(rough->bound_us, best * (1 + 1e-9));
  EXPECT_LE(rough->pairs_solved, exact->pairs_solved);
}

TEST(Tune, SaysWhatCannotBePlanned) {
  testing::GptLayers layers(1024, 16, 4);
  ClusterSpec cluster = Preset("l4-24gb-16");
  cluster.devices = 12;
  EXPECT_EQ(ErrorOf(Tune(layers, cluster, Options(16))),
            "the cluster 'l4-24gb-16' has uneven nodes: 12 devices, 8 a node; plan for whole nodes");
  TuneOptions none = Options(16);
  none.top = 0;
  EXPECT_EQ(ErrorOf(Tune(layers, Preset("l4-24gb-2"), none)), "0 plans are none; ask for 1 or more");
  EXPECT_EQ(ErrorOf(FindBaseline("megatrn")), "there is no space 'megatrn', did you mean 'megatron'?");
  auto small = Tune(layers, Preset("l4-24gb-2"), Options(16, 1 << 20));
  ASSERT_TRUE(small.ok());
  EXPECT_TRUE(small->plans.empty() && small->complete) << "nothing fits: a result, not an error";
}

}  // namespace
}  // namespace interlace::plan
