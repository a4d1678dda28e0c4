#include "plan/stage_model.h"

#include <gtest/gtest.h>

#include <random>

#include "plan/testing/table_layers.h"

namespace interlace::plan {
namespace {

StageModel ModelOf(const char* preset, StageOptions options, const testing::GptLayers& layers) {
  auto text = PresetCluster(preset);
  EXPECT_TRUE(text.ok());
  auto cluster = ParseCluster(*text, preset);
  EXPECT_TRUE(cluster.ok());
  auto model = StageModel::Create(layers, *cluster, options);
  EXPECT_TRUE(model.ok()) << ErrorOf(model);
  return std::move(*model);
}

Strategy RandomStrategy(std::mt19937& random, int32_t batch, int32_t devices) {
  auto pick = [&](int32_t from, int32_t to) { return std::uniform_int_distribution<int32_t>(from, to)(random); };
  auto ratio = [&] { return pick(0, 2) == 0 ? 0.0f : static_cast<float>(pick(0, 1000)) / 1000; };
  Strategy s;
  s.layers = pick(1, 12);
  s.embedding = pick(0, 1) == 1, s.head = pick(0, 1) == 1;
  s.tp = 1 << pick(0, 2);
  s.dp = 1 << pick(0, 1);
  while (s.dp * s.tp > devices) s.dp /= 2, s.tp = std::max(s.tp / 2, 1);
  s.dp = std::max(s.dp, 1);
  s.micro_batch = 1 << pick(0, 3);
  s.micro_batches = batch / (s.dp * s.micro_batch);
  s.in_flight = pick(1, 6);
  s.zero = pick(0, 3);
  s.full = pick(0, s.layers);
  s.selective = pick(0, s.layers - s.full);
  s.weights_out = ratio(), s.gradients_out = ratio(), s.states_out = ratio(), s.activations_out = ratio();
  return s;
}

TEST(StageModel, BatchEqualsOneByOne) {
  testing::GptLayers layers(1024, 16, 24);
  for (bool overlap : {true, false}) {
    StageOptions options{.global_batch = 64, .device_bytes = int64_t{20} << 30};
    options.overlap = overlap;
    for (const char* preset : {"l4-24gb-8", "a100-40gb-16", "local-4"}) {
      const StageModel model = ModelOf(preset, options, layers);
      std::mt19937 random(7);
      std::vector<Strategy> strategies(3000);
      for (Strategy& s : strategies) s = RandomStrategy(random, 64, 4);
      std::vector<StageCost> costs(strategies.size());
      ASSERT_EQ(ErrorOf(model.Evaluate(strategies, costs)), "no error");
      for (size_t i = 0; i < strategies.size(); ++i) {
        const StageCost one = model.EvaluateOne(strategies[i]);
        ASSERT_EQ(costs[i].peak_forward, one.peak_forward) << i;
        ASSERT_EQ(costs[i].peak_backward, one.peak_backward) << i;
        ASSERT_EQ(costs[i].host_bytes, one.host_bytes) << i;
        ASSERT_NEAR(costs[i].stable_us, one.stable_us, 1e-9 * one.stable_us) << i;
        ASSERT_NEAR(costs[i].extra_us, one.extra_us, 1e-9 * (one.stable_us + std::abs(one.extra_us))) << i;
      }
    }
  }
}

}  // namespace
}  // namespace interlace::plan
