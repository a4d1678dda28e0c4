#include "plan/stage_model.h"

#include <gtest/gtest.h>

#include <random>

#include "plan/testing/count_layers.h"
#include "plan/testing/table_layers.h"

namespace interlace::plan {
namespace {

StageModel ModelOf(const char* preset, StageOptions options, const testing::GptLayers& layers,
                   const std::string& from = "", const std::string& to = "") {
  auto text = PresetCluster(preset);
  EXPECT_TRUE(text.ok());
  if (!from.empty()) text->replace(text->find(from), from.size(), to);
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

TEST(StageModel, ClosedSumsEqualLayerByLayer) {
  testing::GptLayers layers(1024, 16, 24);
  for (bool overlap : {true, false}) {
    StageOptions options{.global_batch = 64, .device_bytes = int64_t{20} << 30};
    options.overlap = overlap;
    for (const char* preset : {"l4-24gb-8", "a100-40gb-16", "local-4"}) {
      const StageModel model = ModelOf(preset, options, layers);
      std::mt19937 random(7);
      for (int i = 0; i < 3000; ++i) {
        const Strategy s = RandomStrategy(random, 64, 4);
        const StageParts& parts = *model.state().Find(s);
        const std::array<double, kPhases> us = PhaseTimes(parts, s), one_by_one = testing::CountTimes(parts, s);
        for (int p = 0; p < kPhases; ++p) ASSERT_NEAR(us[p], one_by_one[p], 1e-9 * us[p]) << i;
        const StageBytes bytes = CountBytes(parts, s), counted = testing::CountLayerByLayer(parts, s);
        ASSERT_EQ(bytes.peak_forward, counted.peak_forward) << i;
        ASSERT_EQ(bytes.peak_backward, counted.peak_backward) << i;
        ASSERT_EQ(bytes.host, counted.host) << i;
      }
    }
  }
}

TEST(StageModel, MoreWorkNeverTakesLessTime) {
  const testing::GptLayers layers(1024, 16, 24);
  std::mt19937 random(5);
  ClusterSpec cluster = *ParseCluster(*PresetCluster("a100-40gb-16"), "");
  for (int round = 0; round < 8; ++round) {
    cluster.interference_factors.clear();
    if (round > 0) {  // made-up factors, in no order
      for (int i = 0; i < 28; ++i)
        cluster.interference_factors.push_back(std::uniform_real_distribution<double>(1, 6)(random));
    }
    auto model = StageModel::Create(layers, cluster, {.global_batch = 64, .device_bytes = int64_t{20} << 30});
    ASSERT_TRUE(model.ok());
    for (int i = 0; i < 2000; ++i) {
      const Strategy less = RandomStrategy(random, 64, 4);
      Strategy more = less;
      auto raise = [&](float& ratio) { ratio += (1 - ratio) * static_cast<float>(random() % 3) / 2; };
      raise(more.weights_out), raise(more.gradients_out), raise(more.states_out), raise(more.activations_out);
      // Recomputation saves activations, and with them copies, so it is more work only where none are offloaded.
      if (more.activations_out == 0 && more.full + more.selective < more.layers) ++more.full;
      const StageCost a = model->CostOf(less), b = model->CostOf(more);
      ASSERT_LE(a.stable_us, b.stable_us * (1 + 1e-12));
      ASSERT_LE(a.stable_us + a.extra_us, (b.stable_us + b.extra_us) * (1 + 1e-12));
    }
  }
}

TEST(StageModel, ExplanationAddsUp) {
  const testing::GptLayers layers(1024, 16, 24);
  const StageModel model = ModelOf("l4-24gb-8", {.global_batch = 64, .device_bytes = int64_t{20} << 30}, layers);
  std::mt19937 random(9);
  for (int i = 0; i < 1000; ++i) {
    const Strategy s = RandomStrategy(random, 64, 4);
    const StageCost cost = model.CostOf(s);
    const Explanation why = model.Explain(s);
    int64_t device = 0, host = 0;
    for (const auto& term : why.bytes) device += term.device, host += term.host;
    ASSERT_EQ(device, std::max(cost.peak_forward, cost.peak_backward));
    ASSERT_EQ(host, cost.host_bytes);
    ASSERT_NEAR(why.phases[1].total_us + why.phases[2].total_us, cost.stable_us, 1e-9 * cost.stable_us);
    const PassTimes passes = model.PassesOf(s);
    ASSERT_NEAR(passes.forward_us + passes.backward_us, cost.stable_us, 1e-9 * cost.stable_us);
    ASSERT_NEAR(passes.first_us + passes.last_us, cost.extra_us, 1e-9 * cost.stable_us);
  }
}

// Four devices with states that are all away: each moves its 12 bytes a parameter in and out once a step.
TEST(StageModel, WhatLeavesMemoryCostsWhatTheTierCosts) {
  testing::GptLayers layers(1024, 16, 24);
  Strategy s;
  s.layers = 8, s.dp = 4, s.tp = 1, s.micro_batch = 1, s.micro_batches = 1, s.in_flight = 1;
  StageOptions options{.global_batch = 4, .device_bytes = int64_t{20} << 30};
  options.overlap = false;
  auto seconds_away = [&](const std::string& to) {
    const StageModel model = ModelOf("local-4", options, layers, "tier = \"file\"", to);
    Strategy out = s;
    out.states_out = 1;
    const StageCost near = model.CostOf(s), far = model.CostOf(out);
    return (far.stable_us + far.extra_us - near.stable_us - near.extra_us) * 1e-6;
  };
  // GB/s of a device: memory 20 / 4 each way; files 1 / 4 in and 0.5 / 4 out, or the limit of a rank.
  const double memory = seconds_away("tier = \"memory\""), files = seconds_away("tier = \"file\"");
  const double limited = seconds_away("tier = \"file\"\ntier_gb_per_s = 0.05");
  EXPECT_NEAR(files / memory, (4 + 8) / (0.2 + 0.2), 1e-6);
  EXPECT_NEAR(limited / memory, (20 + 20) / (0.2 + 0.2), 1e-6);
}

TEST(StageModel, RefusesWhatItCannotCount) {
  const testing::GptLayers layers(1024, 16, 24);
  const StageModel model = ModelOf("l4-24gb-8", {.global_batch = 64, .device_bytes = int64_t{20} << 30}, layers);
  auto error = [&](auto change) {
    Strategy strategy;
    change(strategy);
    return ErrorOf(model.Check(strategy));
  };
  EXPECT_EQ(error([](Strategy&) {}), "no error");
  EXPECT_EQ(error([](Strategy& s) { s.full = 1, s.selective = 1; }),
            "a stage of 1 blocks cannot recompute 1 wholly and 1 selectively");
  EXPECT_EQ(error([](Strategy& s) { s.states_out = 1.5f; }), "an offload ratio is 1.5; ratios lie between 0 and 1");
  EXPECT_EQ(error([](Strategy& s) { s.zero = 4; }), "ZeRO level 4 is not one of 0, 1, 2, 3");
  EXPECT_EQ(error([](Strategy& s) { s.dp = 3; }),
            "micro-batch 1 with data parallel 3 and tensor parallel 1 is not in the space: the three must "
            "divide the batch of 64, "
            "the model and a node or whole nodes of the cluster");
  auto created = StageModel::Create(layers, ClusterSpec{}, {.global_batch = 0});
  EXPECT_EQ(ErrorOf(created), "the global batch is 0; it must be at least 1");
}

}  // namespace
}  // namespace interlace::plan
