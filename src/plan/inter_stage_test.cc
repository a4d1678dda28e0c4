#include "plan/inter_stage.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "base/testing/rounds.h"

namespace interlace::plan {
namespace {

// Random frontiers: about `layers / devices` of time, several layouts, memory-like trade between t and d.
class RandomStages {
 public:
  RandomStages(uint32_t seed, int32_t points, int32_t micro_batches)
      : random_(seed), points_(points), g_(micro_batches) {}

  const Frontier& Of(const StageKey& key) {
    auto [at, isnew] = known_.try_emplace({key.layers, key.embedding, key.head, key.devices, key.in_flight});
    if (!isnew) return at->second;
    if (Real(0, 1) < 0.1) return at->second;  // does not fit
    for (int32_t tp = 1; tp <= key.devices; tp *= 2) {
      if (key.devices % tp != 0) continue;
      double t = (10.0 * key.layers + 3 * key.embedding + 6 * key.head + Real(0, 4)) / key.devices, d = 0;
      for (int32_t k = 0, n = 1 + static_cast<int32_t>(random_() % static_cast<uint32_t>(points_)); k < n; ++k) {
        FrontierPoint point;
        point.strategy.layers = key.layers;
        point.strategy.dp = key.devices / tp, point.strategy.tp = tp;
        point.strategy.micro_batches = g_;
        point.cost.stable_us = t * Real(1, 1.5);
        point.cost.extra_us = Real(0, 60) + d;
        at->second.push_back(point);
      }
    }
    return at->second;
  }
  double Real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }

 private:
  std::mt19937 random_;
  int32_t points_, g_;
  std::map<std::array<int32_t, 5>, Frontier> known_;
};

double Boundary(const Layout& a, const Layout& b, bool inside) {
  return (inside ? 0.5 : 2.0) + (a == b ? 0 : 1.5 * std::abs(a.tp - b.tp)) + 0.1 * a.dp;
}

// Every plan, one by one.
struct Enumerate {
  const InterStageProblem& p;
  std::vector<const FrontierPoint*> chosen = {};
  std::vector<int32_t> lefts = {};
  double best = std::numeric_limits<double>::infinity();
  std::vector<double> costs = {};  // the best of each shape
  std::map<std::vector<int32_t>, double> shapes = {};

  void Go(int32_t stage, int32_t layers, int32_t left) {
    if (stage == p.stages) {
      if (layers == 0 && left == 0) Evaluate();
      return;
    }
    for (int32_t c : p.counts) {
      int32_t begin = (p.devices - left) % p.per_node;
      if (c > left || (begin != 0 && begin + c > p.per_node)) continue;
      for (int32_t l = p.fewest_layers; l <= std::min(layers, p.most_layers); ++l) {
        StageKey key{l, stage == 0,      stage == p.stages - 1,
                     c, p.micro_batches, std::min(p.stages - stage, p.micro_batches)};
        for (const FrontierPoint& point : p.frontier(key)) {
          if (p.one_layout && stage > 0 && !(LayoutOf(point.strategy) == LayoutOf(chosen[0]->strategy))) continue;
          if (p.one_tp && stage > 0 && point.strategy.tp != chosen[0]->strategy.tp) continue;
          chosen.push_back(&point);
          lefts.push_back(left - c);
          Go(stage + 1, layers - l, left - c);
          chosen.pop_back();
          lefts.pop_back();
        }
      }
    }
  }
  void Evaluate() {
    std::vector<std::pair<double, double>> stages;
    std::vector<int32_t> shape;
    for (size_t i = 0; i < chosen.size(); ++i) {
      double t = chosen[i]->cost.stable_us;
      const Strategy& s = chosen[i]->strategy;
      if (i + 1 < chosen.size() && p.boundary_us) {
        const Strategy& next = chosen[i + 1]->strategy;
        bool inside = (p.devices - lefts[i]) % p.per_node != 0;
        t += p.boundary_us(LayoutOf(s), LayoutOf(next), inside);
      }
      stages.emplace_back(t, chosen[i]->cost.extra_us);
      shape.insert(shape.end(), {s.layers, p.boundary_us || p.one_layout || p.one_tp ? s.dp : 0,
                                 p.boundary_us || p.one_layout || p.one_tp ? s.tp : s.dp * s.tp});
    }
    double cost = PipelineObjective(p.micro_batches, stages);
    best = std::min(best, cost);
    auto [at, isnew] = shapes.try_emplace(shape, cost);
    if (!isnew) at->second = std::min(at->second, cost);
  }
};

TEST(InterStage, EqualsEnumerationOnRandomProblems) {
  int solved = 0;
  const int problems = Rounds(160);
  for (uint32_t seed = 0; seed < static_cast<uint32_t>(problems); ++seed) {
    std::mt19937 random(seed);
    auto pick = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    InterStageProblem p;
    p.stages = 1 + pick(3);
    p.layers = p.stages + pick(4);
    p.micro_batches = 1 << pick(6);
    p.per_node = 4;
    p.devices = p.stages == 1 ? 4 : 8;
    p.counts = pick(2) ? FreeDeviceCounts(p.devices, p.per_node) : std::vector<int32_t>{p.devices / p.stages};
    if (p.counts.size() == 1 && p.devices % p.stages != 0) p.devices = 4 * p.stages, p.counts = {4};
    p.one_layout = pick(4) == 0;
    p.one_tp = seed % 3 == 0;
    if (pick(4) == 0) p.most_layers = (p.layers + p.stages - 1) / p.stages;
    RandomStages stages(seed, p.stages == 3 ? 2 : 4, p.micro_batches);
    p.frontier = [&](const StageKey& key) -> const Frontier& { return stages.Of(key); };
    if (pick(2)) p.boundary_us = Boundary;
    Enumerate all{p};
    all.Go(0, p.layers, p.devices);
    auto result = SolveInterStage(p, {.top = 3});
    ASSERT_TRUE(result.ok()) << ErrorOf(result);
    if (all.shapes.empty()) {
      EXPECT_TRUE(result->plans.empty()) << "seed " << seed;
      continue;
    }
    ++solved;
    std::vector<double> costs;
    for (const auto& [shape, cost] : all.shapes) costs.push_back(cost);
    std::sort(costs.begin(), costs.end());
    ASSERT_EQ(result->plans.size(), std::min<size_t>(3, costs.size())) << "seed " << seed;
    for (size_t k = 0; k < result->plans.size(); ++k) {
      EXPECT_NEAR(result->plans[k].cost_us, costs[k], 1e-8 * costs[k]) << "seed " << seed << " plan " << k;
    }
    EXPECT_NEAR(result->bound_us, costs[0], 1e-8 * costs[0]) << "seed " << seed;
    // The plan is what it says it costs, and uses all there is.
    std::vector<std::pair<double, double>> said;
    int32_t layers = 0, devices = 0;
    for (const StageChoice& stage : result->plans[0].stages) {
      said.emplace_back(stage.point.cost.stable_us + stage.boundary_us, stage.point.cost.extra_us);
      layers += stage.shape().layers, devices += stage.shape().layout.devices();
    }
    EXPECT_NEAR(PipelineObjective(p.micro_batches, said), result->plans[0].cost_us, 1e-9 * costs[0]);
    EXPECT_EQ(layers, p.layers);
    EXPECT_EQ(devices, p.devices);
    // A cutoff above the best changes nothing; one below leaves nothing.
    auto again = SolveInterStage(p, {.cutoff_us = costs[0] * 1.5});
    ASSERT_TRUE(again.ok());
    ASSERT_EQ(again->plans.size(), 1u) << "seed " << seed;
    EXPECT_NEAR(again->plans[0].cost_us, costs[0], 1e-8 * costs[0]) << "seed " << seed;
    auto none = SolveInterStage(p, {.cutoff_us = costs[0] * 0.999});
    ASSERT_TRUE(none.ok());
    EXPECT_TRUE(none->plans.empty());
    EXPECT_DOUBLE_EQ(none->bound_us, costs[0] * 0.999);
  }
  EXPECT_GT(solved * 4, problems * 3);
}

TEST(InterStage, StoppedEarlyKeepsABound) {
  InterStageProblem p;
  p.stages = 6, p.layers = 24, p.micro_batches = 32, p.devices = 6, p.per_node = 6, p.counts = {1};
  RandomStages stages(7, 8, p.micro_batches);
  p.frontier = [&](const StageKey& key) -> const Frontier& { return stages.Of(key); };
  auto exact = SolveInterStage(p);
  ASSERT_TRUE(exact.ok());
  int asked = 0;
  auto early = SolveInterStage(p, {.stop = [&] { return ++asked > 5; }});
  ASSERT_TRUE(early.ok());
  EXPECT_FALSE(early->complete);
  ASSERT_EQ(early->plans.size(), 1u);
  EXPECT_GE(early->plans[0].cost_us, exact->plans[0].cost_us);
  EXPECT_LE(early->bound_us, exact->plans[0].cost_us);
  EXPECT_GT(early->bound_us, 0.5 * exact->plans[0].cost_us);
}

TEST(InterStage, RefusesWhatIsNoProblem) {
  InterStageProblem p;
  p.stages = 4, p.layers = 3, p.devices = 4, p.per_node = 4, p.counts = {1};
  EXPECT_EQ(ErrorOf(SolveInterStage(p)), "3 layers are too few for 4 stages; take at most 3 stages");
  p.layers = 4, p.counts = {3};
  EXPECT_EQ(ErrorOf(SolveInterStage(p)), "a stage of 3 devices neither divides a node of 4 nor is whole nodes");
  EXPECT_EQ(FreeDeviceCounts(32, 8), (std::vector<int32_t>{1, 2, 4, 8, 16, 24, 32}));
  EXPECT_EQ(FreeDeviceCounts(12, 6), (std::vector<int32_t>{1, 3, 6, 12}));
}

}  // namespace
}  // namespace interlace::plan
