#include "plan/plan_text.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace interlace::plan {
namespace {

// Two stages on two nodes of four, 8 blocks.
PlanFile Example() {
  PlanFile file;
  file.blocks = 8;
  file.devices = 8;
  file.per_node = 4;
  file.memory_limit = 1000;
  Plan& plan = file.plan;
  plan.model = "a \"model\"";
  plan.cluster = "l4-24gb-8";
  plan.global_batch = 64;
  plan.sequence = 2048;
  plan.space = "full";
  plan.step_us = 1e6 / 3;
  plan.pipeline_us = 1e5;
  plan.bound_us = plan.step_us * 0.97;
  for (int i = 0; i < 2; ++i) {
    PlanStage stage;
    stage.first_block = 4 * i;
    stage.first_device = 4 * i;
    Strategy& s = stage.strategy;
    s = {.layers = 4,
         .embedding = i == 0,
         .head = i == 1,
         .micro_batch = 2,
         .dp = 2,
         .tp = 2,
         .micro_batches = 16,
         .in_flight = 2 - i};
    s.zero = i;
    s.full = 3;
    s.states_out = 1.0f / 3;
    stage.cost = {.stable_us = 1.0 / 3, .extra_us = 2, .peak_forward = 900, .peak_backward = 1000, .host_bytes = 7};
    plan.stages.push_back(stage);
  }
  return file;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string ParseError(const std::string& text) {
  return ErrorOf(ParsePlan(text, "p"));
}
std::string Rules(const std::string& text) {
  auto parsed = ParsePlan(text, "p");
  return parsed.ok() ? ErrorOf(VerifyPlan(*parsed)) : ErrorOf(parsed);
}

TEST(PlanText, PrintsAndParses) {
  std::string text = PrintPlan(Example());
  auto parsed = ParsePlan(text, "p");
  ASSERT_TRUE(parsed.ok()) << ErrorOf(parsed);
  EXPECT_EQ(PrintPlan(*parsed), text);
  const PlanStage& last = parsed->plan.stages[1];
  EXPECT_EQ(last.strategy.states_out, 1.0f / 3);
  EXPECT_EQ(last.cost.stable_us, 1.0 / 3);
  EXPECT_EQ(last.first_block, 4);
  EXPECT_EQ(last.strategy.in_flight, 1);
  EXPECT_EQ(parsed->plan.stages[0].strategy.in_flight, 2);
  EXPECT_FALSE(parsed->as_run);
  EXPECT_EQ(ErrorOf(VerifyPlan(*parsed)), "no error");
  EXPECT_EQ(ErrorOf(VerifyPlan(Example())), "no error");
}

TEST(PlanText, LinesThatCannotBeRead) {
  std::string text = PrintPlan(Example());
  EXPECT_EQ(ParseError(""), "p:1:1: not a plan: the first line must be 'interlace-plan 1'\n  \n  ^");
  EXPECT_NE(ParseError(Replaced(text, "plan 1", "plan 2")).find("has version 2, this program reads 1"),
            std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "  zero", "  zer0")).find("unknown line 'zer0', did you mean 'zero'?"),
            std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "  zero 0\n", "")).find("stage 0 has no line 'zero'"), std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "blocks 8\n", "")).find("the plan has no line 'blocks'"), std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "  zero 0", "  zero 0\n  zero 1")).find("'zero' is given twice"),
            std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "stage 1", "stage 3")).find("this one must be 'stage 1'"), std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "dp 2", "dp 99999999999")).find("must be from 0 to 2147483647"),
            std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "template overlap", "template over")).find("expected runtime or overlap"),
            std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "weights 0", "weights nan")).find("expected a number"), std::string::npos);
  EXPECT_NE(ParseError(Replaced(text, "sequence 2048", "sequence 2048 x")).find("expected the end of the line"),
            std::string::npos);
}

TEST(PlanText, BrokenRulesNameStageAndRule) {
  std::string text = PrintPlan(Example());
  auto problem = [&](const std::string& from, const std::string& to) {
    std::string said = Rules(Replaced(text, from, to));
    size_t line = said.find('\n');
    return line == std::string::npos ? said : said.substr(line + 1);
  };
  EXPECT_EQ(problem("micro_batch 2 dp 2 tp 2", "micro_batch 3 dp 2 tp 2"),
            "stage 0 (line 17), rule batch: accumulation 16 * micro_batch 3 * dp 2 = 96, global_batch is 64");
  EXPECT_EQ(problem("layers 4 embedding", "layers 5 embedding"),
            "rule layers: the stages hold 9 blocks, the model has 8");
  EXPECT_EQ(problem("layers 4 embedding", "layers 4"),
            "stage 0 (line 17), rule layers: the first stage has to hold the embedding");
  EXPECT_EQ(problem("\"bfloat16\"", "\"int8\""), "rule dtype: 'int8' is neither bfloat16 nor float32");
  EXPECT_EQ(problem("  zero 1", "  zero 4"), "stage 1 (line 27), rule zero: zero 4 is not a level from 0 to 3");
  EXPECT_EQ(
      problem("recompute full 3", "recompute full 5"),
      "stage 0 (line 17), rule recompute: 5 blocks recomputed in full and 0 selectively are more than its 4 layers");
  EXPECT_EQ(problem("activations 0", "activations 1.5"),
            "stage 0 (line 17), rule offload: activations 1.5 is not a share from 0 to 1");
  EXPECT_EQ(problem("peak_forward 900", "peak_forward 1001"),
            "stage 0 (line 17), rule memory: its predicted peak of 1001 bytes is above memory_limit 1000; "
            "--over-memory predicts "
            "it all the same");
  EXPECT_EQ(problem("dp 2 tp 2", "dp 2 tp 4"),
            "stage 0 (line 17), rule devices: dp 2 * tp 4 = 8, its range 0..3 has 4");
  EXPECT_EQ(problem("devices 8 per_node 4", "devices 16 per_node 4"),
            "rule devices: the stages end at device 7, the cluster at 15");
  EXPECT_EQ(problem("devices 8 per_node 4", "devices 8 per_node 3"), "rule devices: 8 devices do not fill nodes of 3");
  EXPECT_EQ(problem("devices 8 per_node 4", "devices 8 per_node 8"), "no error");
  EXPECT_EQ(problem("devices 8 per_node 4", "devices 8 per_node 2"), "no error");
  EXPECT_EQ(problem("devices 8 per_node 4", "devices 8 per_node 1"),
            "stage 0 (line 17), rule mesh: tensor-parallel groups of 2 cross nodes of 1\n"
            "stage 1 (line 27), rule mesh: tensor-parallel groups of 2 cross nodes of 1");
  text = Replaced(text, "template overlap", "template runtime");
  EXPECT_EQ(Rules(text), "no error");
  EXPECT_EQ(problem("micro_batch 2 dp 2 tp 2", "micro_batch 1 dp 4 tp 1"), "no error");  // stages that differ
  EXPECT_NE(Rules(Replaced(text, "dp 2", "dp 2147483647")).find("rule batch"), std::string::npos);
}

TEST(PlanText, RulesOfACluster) {
  PlanFile file = Example();
  ClusterSpec cluster;
  cluster.name = "here";
  cluster.devices = 8;
  cluster.per_node = 4;
  cluster.memory_gib = 1;
  EXPECT_EQ(ErrorOf(VerifyPlan(file, &cluster)), "no error");
  cluster.host_memory_gib = 1;
  file.plan.stages[1].cost.host_bytes = int64_t{256} << 20;  // of each of a node's four
  EXPECT_EQ(ErrorOf(VerifyPlan(file, &cluster)), "no error");
  file.plan.stages[1].cost.host_bytes += 1;
  EXPECT_NE(ErrorOf(VerifyPlan(file, &cluster))
                .find("rule host: with it node 1 holds 1073741828 bytes on its host; a node of here has 1 GiB"),
            std::string::npos);
  file.plan.stages[1].cost.host_bytes = 7;
  cluster.per_node = 8;
  EXPECT_NE(ErrorOf(VerifyPlan(file, &cluster))
                .find("rule cluster: the plan is for 8 devices, 4 a node; here has 8, 8 a node"),
            std::string::npos);
  file.memory_limit = int64_t{2} << 30;
  EXPECT_NE(ErrorOf(VerifyPlan(file, &cluster)).find("rule memory: memory_limit 2147483648 is above"),
            std::string::npos);
}

// Whatever is in the file, reading and checking it ends with a plan or an error.
TEST(PlanText, DamagedFiles) {
  std::mt19937 random(7);
  std::string text = PrintPlan(Example());
  int read = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = text;
    for (int n = 1 + static_cast<int>(random() % 3); n > 0; --n) {
      size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          damaged.erase(at, 1 + random() % 20);
          break;
        default:
          damaged.insert(at, std::to_string(random()));
          break;
      }
    }
    auto parsed = ParsePlan(damaged, "p");
    if (!parsed.ok()) continue;
    ++read;
    (void)VerifyPlan(*parsed).ok();
    std::string printed = PrintPlan(*parsed);
    auto again = ParsePlan(printed, "p");
    ASSERT_TRUE(again.ok()) << ErrorOf(again) << "\n" << printed;
    EXPECT_EQ(PrintPlan(*again), printed);
  }
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace interlace::plan
