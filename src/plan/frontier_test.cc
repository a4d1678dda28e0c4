#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/testing/rounds.h"
#include "plan/stage_parts.h"
#include "plan/testing/table_layers.h"

namespace interlace::plan {
namespace {

ClusterSpec Cluster(const char* preset) {
  return *ParseCluster(*PresetCluster(preset), preset);
}

// How much the best that the frontier offers is above a point: least over its points of the larger excess in t and t +
// d.
double Excess(const Frontier& frontier, const StageCost& cost) {
  const double t = cost.stable_us, u = cost.stable_us + cost.extra_us;
  double least = std::numeric_limits<double>::infinity();
  for (const FrontierPoint& p : frontier) {
    const double over_t = (p.cost.stable_us - t) / t, over_u = (p.cost.stable_us + p.cost.extra_us - u) / u;
    least = std::min(least, std::max({over_t, over_u, 0.0}));
  }
  return least;
}

// Every strategy of a key with ratios on a grid.
template <typename Visit>
void Everything(const StageKey& key, int64_t batch, int steps, const Visit& visit) {
  for (int32_t tp = 1; tp <= std::min(key.devices, 8); tp *= 2) {
    Strategy s;
    s.layers = key.layers, s.embedding = key.embedding, s.head = key.head, s.in_flight = key.in_flight;
    s.micro_batches = key.micro_batches;
    s.tp = tp, s.dp = key.devices / tp;
    if (batch % (s.dp * key.micro_batches) != 0) continue;
    s.micro_batch = static_cast<int32_t>(batch / (s.dp * key.micro_batches));
    for (s.zero = 0; s.zero < (s.dp == 1 ? 1 : 4); ++s.zero) {
      for (s.full = 0; s.full <= s.layers; ++s.full) {
        for (s.selective = 0; s.selective <= s.layers - s.full; ++s.selective) {
          for (int code = 0; code < (steps + 1) * (steps + 1) * (steps + 1) * (steps + 1); ++code) {
            auto digit = [&](int d) { return static_cast<float>(d % (steps + 1)) / static_cast<float>(steps); };
            s.weights_out = digit(code), s.gradients_out = digit(code / (steps + 1));
            s.states_out = digit(code / (steps + 1) / (steps + 1)),
            s.activations_out = digit(code / (steps + 1) / (steps + 1) / (steps + 1));
            visit(s);
          }
        }
      }
    }
  }
}

TEST(Frontier, NoStrategyOnAGridIsBetter) {
  const testing::GptLayers layers(2048, 32, 24);
  const int64_t batch = 64;
  std::mt19937 random(3);
  double worst = 0;
  int filled = 0, keys = 0;
  for (const char* preset : {"l4-24gb-4", "a100-40gb-4", "a100-40gb-16"}) {
    for (int round = 0; round < Rounds(9); ++round, ++keys) {
      auto pick = [&](int32_t from, int32_t to) { return std::uniform_int_distribution<int32_t>(from, to)(random); };
      const int32_t devices = std::strcmp(preset, "a100-40gb-16") == 0 ? 16 : 1 << pick(0, 2);  // over two nodes
      StageKey key{pick(1, 6), pick(0, 1) == 1, pick(0, 1) == 1, devices, 1 << pick(2, 6), pick(1, 4)};
      StageOptions options{.global_batch = batch, .device_bytes = static_cast<int64_t>(pick(1, 24)) << 28};
      if (pick(0, 3) == 0) options.host_bytes = int64_t{4} << 30;
      auto model = StageModel::Create(layers, Cluster(preset), options);
      ASSERT_TRUE(model.ok());
      const Frontier frontier = model->FrontierOf(key);
      const auto fits = [&](const StageCost& cost) {
        return std::max(cost.peak_forward, cost.peak_backward) <= options.device_bytes &&
               cost.host_bytes <= model->state().host_share;
      };
      bool any = false;
      Everything(key, batch, 4, [&](const Strategy& s) {
        const StageParts& parts = *model->state().Find(s);
        const StageBytes bytes = CountBytes(parts, s);
        StageCost cost{0, 0, bytes.peak_forward, bytes.peak_backward, bytes.host};
        if (!fits(cost)) return;
        const StageTimes us = TimesOf(parts, s);
        cost.stable_us = us.stable_us, cost.extra_us = us.total_us - us.stable_us;
        any = true;
        worst = std::max(worst, Excess(frontier, cost));
      });
      ASSERT_EQ(any, !frontier.empty());
      filled += frontier.empty() ? 0 : 1;
      for (size_t i = 0; i < frontier.size(); ++i) {
        ASSERT_EQ(ErrorOf(model->Check(frontier[i].strategy)), "no error");
        ASSERT_TRUE(fits(frontier[i].cost));
        if (i == 0) continue;
        ASSERT_LE(frontier[i - 1].cost.stable_us, frontier[i].cost.stable_us);
      }
    }
  }
  EXPECT_GE(filled * 5, keys * 2);
  EXPECT_LT(worst, 0.0006);
  std::printf("frontier: at most %.4f %% above a strategy of the grid, %d keys of %d with a plan\n", 100 * worst,
              filled, keys);
}

// Mist's Table 2 has all that its artifact has, and the full space all that Table 2 has.
TEST(Frontier, LargerSpacesAreNoWorse) {
  const testing::GptLayers layers(2048, 32, 24);
  std::mt19937 random(13);
  auto pick = [&](int32_t from, int32_t to) { return std::uniform_int_distribution<int32_t>(from, to)(random); };
  double worst = 0;
  int filled = 0;
  for (int round = 0; round < 40; ++round) {
    const StageKey key{pick(1, 8), pick(0, 1) == 1, pick(0, 1) == 1, 1 << pick(1, 3), 1 << pick(2, 5), pick(1, 4)};
    const int64_t device_bytes = static_cast<int64_t>(pick(4, 40)) << 28;
    std::array<Frontier, 3> frontiers;
    std::array<StageOptions, 3> spaces{StageOptions::Artifact(), StageOptions::Paper(), StageOptions()};
    for (int i = 0; i < 3; ++i) {
      spaces[i].global_batch = 64, spaces[i].device_bytes = device_bytes;
      frontiers[i] = StageModel::Create(layers, Cluster("l4-24gb-8"), spaces[i])->FrontierOf(key);
      filled += frontiers[i].empty() ? 0 : 1;
      if (i == 0) continue;
      for (const FrontierPoint& p : frontiers[i - 1]) worst = std::max(worst, Excess(frontiers[i], p.cost));
    }
  }
  EXPECT_GT(filled, 60);
  EXPECT_LT(worst, 0.005);  // what is between the shares that are tried
  std::printf("frontier: at most %.4f %% above a point of a smaller space\n", 100 * worst);
}

}  // namespace
}  // namespace interlace::plan
