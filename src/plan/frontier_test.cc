#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/rounds.h"
#include "plan/stage_model.h"
#include "plan/testing/evaluate_all.h"
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
      std::vector<Strategy> all;
      Everything(key, batch, 4, [&](const Strategy& s) { all.push_back(s); });
      bool any = false;
      for (const StageCost& cost : testing::EvaluateAll(*model, all)) {
        if (!model->Fits(cost)) continue;
        any = true;
        worst = std::max(worst, Excess(frontier, cost));
      }
      ASSERT_EQ(any, !frontier.empty());
      filled += frontier.empty() ? 0 : 1;
      for (size_t i = 0; i < frontier.size(); ++i) {
        ASSERT_EQ(ErrorOf(model->Check(frontier[i].strategy)), "no error");
        ASSERT_TRUE(model->Fits(frontier[i].cost));
        if (i == 0) continue;
        ASSERT_LE(frontier[i - 1].cost.stable_us, frontier[i].cost.stable_us);
      }
    }
  }
  EXPECT_GE(filled * 5, keys * 2);
  EXPECT_LT(worst, 0.0006);  // edges are cut into steps of 0.05 %
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
  EXPECT_LT(worst, 0.0006);  // edges are cut into steps of 0.05 %
}

// A stage of made-up layers: any sizes, any speeds, factors as fitted or free.
StageParts RandomParts(std::mt19937& random, Interference& factors) {
  auto uniform = [&](double from, double to) { return std::uniform_real_distribution<double>(from, to)(random); };
  auto bytes = [&](double most) { return static_cast<int64_t>(uniform(0.05, 1) * most); };
  StageParts parts;
  parts.zero = static_cast<int32_t>(uniform(0, 4));
  parts.in_us_per_byte = uniform(0.5, 2) * 1e-4, parts.out_us_per_byte = uniform(0.5, 2) * 1e-4;
  for (LayerPart& part : parts.layer) {
    part.cost.forward_us = uniform(1e3, 2e5), part.cost.backward_us = uniform(1e3, 4e5);
    part.cost.recompute_full_us = part.cost.forward_us, part.cost.recompute_selective_us = uniform(0, 1e4);
    part.cost.tp_forward_us = part.cost.tp_backward_us = uniform(0, 1e4);
    part.cost.saved_kept = bytes(1e9), part.cost.saved_full = part.cost.saved_kept / 10,
    part.cost.saved_selective = part.cost.saved_kept / 2;
    part.cost.work_forward = bytes(5e8), part.cost.work_backward = bytes(5e8);
    part.cost.work_backward_selective = part.cost.work_backward_full = part.cost.work_backward + part.cost.saved_kept;
    part.weights = bytes(1e9), part.gradients = part.weights, part.states = 6 * part.weights;
    part.gather = {uniform(0, 2e5), 0}, part.scatter = {uniform(0, 2e5), 0}, part.all_reduce = {uniform(0, 4e5), 0};
    part.update_us = uniform(0, 2e4);
    auto link = [&](double& in, double& out, int64_t size) {
      in = static_cast<double>(size) * parts.in_us_per_byte, out = static_cast<double>(size) * parts.out_us_per_byte;
    };
    link(part.weights_in_us, part.weights_out_us, part.weights);
    link(part.gradients_in_us, part.gradients_out_us, part.gradients);
    link(part.states_in_us, part.states_out_us, part.states);
  }
  if (uniform(0, 1) < 0.5) {
    factors = *FindInterference(uniform(0, 1) < 0.5 ? "l4" : "a100", 1 << static_cast<int>(uniform(0, 4)), 1);
  } else {
    factors = Interference();
  }
  parts.interference = &factors;
  return parts;
}

TEST(StrategyVectors, InstructionSetsGiveTheSameBits) {
  std::mt19937 random(17);
  auto pick = [&](int32_t from, int32_t to) { return std::uniform_int_distribution<int32_t>(from, to)(random); };
  auto ratio = [&] { return pick(0, 2) == 0 ? 0.0 : pick(1, 1000) / 1000.0; };
  StrategyVectors plain{};
  for (int round = 0; round < 500; ++round) {
    Interference factors;
    const StageSums sums = SumsOf(RandomParts(random, factors), pick(0, 1) == 1, pick(0, 1) == 1);
    plain.count = pick(1, StrategyVectors::kWidth);
    for (int i = 0; i < plain.count; ++i) {
      plain.layers[i] = pick(1, 9), plain.full[i] = pick(0, static_cast<int>(plain.layers[i])),
      plain.in_flight[i] = pick(1, 5);
      plain.selective[i] = pick(0, static_cast<int>(plain.layers[i] - plain.full[i]));
      plain.wo[i] = ratio(), plain.go[i] = ratio(), plain.oo[i] = ratio(), plain.ao[i] = ratio();
    }
    for (VectorFunction function : VectorFunctions()) {
      StrategyVectors other = plain;
      function(sums, other, Wanted::kAll);
      if (function == VectorFunctions().front()) {
        plain = other;
        continue;
      }
      for (int i = 0; i < plain.count; ++i) {
        ASSERT_EQ(other.stable_us[i], plain.stable_us[i]);
        ASSERT_EQ(other.total_us[i], plain.total_us[i]);
        ASSERT_EQ(other.peak_forward[i], plain.peak_forward[i]);
        ASSERT_EQ(other.peak_backward[i], plain.peak_backward[i]);
        ASSERT_EQ(other.host[i], plain.host[i]);
      }
    }
  }
}

}  // namespace
}  // namespace interlace::plan
