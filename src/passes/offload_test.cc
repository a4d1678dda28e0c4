#include "passes/offload.h"

#include <gtest/gtest.h>

#include "base/testing/rounds.h"
#include "passes/offload_plan.h"
#include "passes/testing/training_case.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::RunResult;

// Two units of 256 bytes: weights and gradients 1024 bytes, optimizer states M_opt = 1024. P at the ops of micro_batch
// is 1280, 1536, 1792, 1280, 1280, in the update 1024.
const char* kSmall =
    "interlace 1 scheduled\nmesh dp 1\nstep 1 reduce_each\ngroup 0 adamw\n"
    "unit u0 dp f32 numel 64 shard 64\nunit u1 dp f32 numel 64 shard 64\n"
    "param %0: f32[64] \"a\" trainable group 0 unit u0+0\nparam %1: f32[64] \"b\" trainable group 0 unit u1+0\n"
    "input %2: f32[64] \"x\"\n"
    "state %3: f32[64] u0.shard persistent\nstate %4: f32[64] u1.shard persistent\n"
    "state %5: f32[64] u0.grad step\nstate %6: f32[64] u1.grad step\n"
    "state %7: f32[64] u0.exp_avg persistent\nstate %8: f32[64] u0.exp_avg_sq persistent\n"
    "state %9: f32[64] u1.exp_avg persistent\nstate %10: f32[64] u1.exp_avg_sq persistent\n"
    "phase micro_batch takes () gives () {\n"
    "  %20: f32[64] = aten.mul.Tensor(%2, %2) {fwd}\n"
    "  %21: f32[64] = aten.mul.Tensor(%20, %2) {fwd}\n"
    "  %22: f32[64] = aten.mul.Tensor(%21, %20) {bwd}\n"
    "  %23: f32[64] into %5+0 = aten.mul.Tensor(%22, %2) {bwd}\n"
    "  %24: f32[64] into %6+0 = aten.mul.Tensor(%22, %2) {bwd}\n"
    "}\n"
    "phase update once takes () gives () {\n"
    "  update.adamw(%3, %5, %7, %8) {upd units=[u0] scale=1.0 ranges=[0, 64, 0]}\n"
    "  update.adamw(%4, %6, %9, %10) {upd units=[u1] scale=1.0 ranges=[0, 64, 0]}\n"
    "}\n";

Program Small() {
  Result<Program> program = Parse(kSmall);
  EXPECT_TRUE(program.ok()) << program.error().ToString();
  return std::move(*program);
}

// Names and first operands of a phase's ops: "offload.start 7".
std::vector<std::string> Ops(const Program& program, const char* phase) {
  std::vector<std::string> out;
  for (OpId id : program.FindPhase(phase)->ops) {
    const Op& op = program.op(id);
    out.push_back(op.name.starts_with("aten.") ? "o" : op.name + " " + std::to_string(op.args[0].value));
  }
  return out;
}

std::string DeepCompile(int64_t limit) {
  return "offload_deepcompile(limit=" + std::to_string(limit) + ",fragment=256,cluster=l4-24gb-4)";
}

TEST(OffloadDeepCompile, ByHand) {
  // 2816 at the third op, the limit is 512 below: two fragments. The second op fits when the first is gone (2560 -
  // 256), the third when both are (2816 - 512). From the fourth on P is 1280, and 1280 + 1024 is just the limit: both
  // come back.
  Program program = Small();
  ASSERT_TRUE(Apply(program, DeepCompile(2304)).ok()) << Apply(program, DeepCompile(2304)).error().ToString();
  EXPECT_EQ(Ops(program, "micro_batch"),
            (std::vector<std::string>{"offload.start 7", "offload.start 8", "o", "offload.wait 7", "o",
                                      "offload.wait 8", "o", "reload.start 7", "reload.start 8", "o", "o"}));
  EXPECT_EQ(Ops(program, "update"),
            (std::vector<std::string>{"reload.wait 7", "reload.wait 8", "update.adamw 3", "update.adamw 4"}));
}

TEST(OffloadDeepCompile, OneByteLessNeedsAThirdFragment) {
  Program program = Small();
  ASSERT_TRUE(Apply(program, DeepCompile(2303)).ok());
  const std::vector<std::string> ops = Ops(program, "micro_batch");
  EXPECT_EQ(
      std::count_if(ops.begin(), ops.end(), [](const std::string& op) { return op.starts_with("offload.start"); }), 3);
  EXPECT_EQ(ops[3], "offload.wait 7") << "the first op is above the limit already";
}

TEST(OffloadDeepCompile, WhatFitsStays) {
  Program program = Small();
  ASSERT_TRUE(Apply(program, DeepCompile(2816)).ok());
  EXPECT_EQ(Print(program), kSmall);
}

TEST(OffloadDeepCompile, SaysTheLeastLimit) {
  Program program = Small();
  const Status status = Apply(program, DeepCompile(2047));
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find(
                "the limit of 2047 bytes cannot be met with all optimizer states out: the step needs 2048 bytes"),
            std::string::npos)
      << status.error().message;
}

TEST(Offload, SaysTheLeastLimitAndTheOp) {
  Program program = Small();
  const Status status = Apply(program, "offload(limit=1000,kinds=states,cluster=l4-24gb-4)");
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find(
                "the limit of 1000 bytes cannot be met with everything out that may leave: this op needs 1792 bytes"),
            std::string::npos)
      << status.error().message;
  const Status kinds = Apply(program, "offload(limit=1000,kinds=state)");
  EXPECT_NE(kinds.error().message.find("did you mean 'states'"), std::string::npos) << kinds.error().message;
  Program twice = Small();
  ASSERT_TRUE(Apply(twice, DeepCompile(2304)).ok());
  EXPECT_NE(Apply(twice, DeepCompile(2304)).error().message.find("one offload pass is enough"), std::string::npos);
}

TEST(Offload, StreamsTheUpdate) {
  // 1792 at the third op without states: all of them are out then, and in the update only what a unit's step needs is
  // in memory.
  Program program = Small();
  ASSERT_TRUE(Apply(program, "offload(limit=1792,cluster=l4-24gb-4)").ok());
  Result<RunResult> before = Interpret(Small()), after = Interpret(program);
  ASSERT_TRUE(after.ok()) << after.error().ToString() << Print(program);
  EXPECT_EQ(FirstDifference(*before, *after), "");
}

TEST(Offload, AGradientHasNoMemoryUntilItIsMadeAnew) {
  // From the update to the next step's backward part; nothing is copied for it.
  Program program = Small();
  ASSERT_TRUE(Apply(program, "offload(limit=1536,cluster=l4-24gb-4)").ok());
  const std::string text = Print(program);
  for (const char* line :
       {"state %5: f32[64] u0.grad step out\n", "reload.start(%5) {bwd units=[u0] fresh=true}\n",
        "reload.start(%6) {bwd units=[u1] fresh=true}\n", "offload.start(%6) {upd units=[u1] clean=true}\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
  Result<RunResult> before = Interpret(Small()), after = Interpret(program);
  ASSERT_TRUE(after.ok()) << after.error().ToString() << text;
  EXPECT_EQ(FirstDifference(*before, *after), "");
}

int64_t PeakOf(Program& program) {
  Result<ClusterSpec> cluster = LoadCluster("l4-24gb-4", "cluster");
  Result<CostModel> model = CostModel::Create(program, *cluster, nullptr);
  Result<StepLine> line = ReadStepLine(program, *model);
  EXPECT_TRUE(line.ok());
  return *std::max_element(line->bytes.begin(), line->bytes.end());
}

TEST(Offload, RandomProgramsKeepTheirBitsAndTheLimit) {
  int fitted = 0, cases = 0, blank = 0;
  for (uint64_t seed = 0, end = Rounds(24); seed < end; ++seed) {
    std::mt19937_64 random(seed * 17 + 3);
    const TrainingCase training = MakeTrainingCase(seed, 1, random);
    const RunResult expected = training.Expected();
    // The optimizer step after the backward part, in it, or some of it in the next step and the rest after or in the
    // backward part.
    const std::string order = seed % 2        ? ",overlap_update"
                              : seed % 8 == 0 ? ",reposition_update(share=0.5),overlap_update"
                              : seed % 8 == 2 ? ",reposition_update(share=0.3)"
                              : seed % 8 == 4 ? ",reposition_update"
                                              : "";
    const std::string start =
        training.start + (seed % 3 == 0 ? ",prefetch(cluster=l4-24gb-4),unshard(cluster=l4-24gb-4)" : "") + order;
    Program base = training.Captured();
    ASSERT_TRUE(Apply(base, start).ok()) << start;
    const int64_t peak = PeakOf(base);
    const int64_t limit = peak * static_cast<int64_t>(35 + random() % 60) / 100;
    // Copies that are quick beside the ops, and ones that are slow.
    const std::string cluster = seed % 2 ? "cluster=l4-24gb-4" : "cluster=local-4";
    const std::string costs = "limit=" + std::to_string(limit) + "," + cluster;
    for (const std::string& pass :
         {"offload(" + costs + ",kinds=states+gradients+master+activations)",
          "offload_deepcompile(fragment=100," + costs + ")", "offload_sync(" + cluster + ")"}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + start + "," + pass);
      Program program = training.Captured();
      const Status status = Apply(program, start + "," + pass);  // the verifier runs after every pass
      if (!status.ok()) {
        ASSERT_NE(status.error().message.find("cannot be met"), std::string::npos) << status.error().ToString();
        if (pass.starts_with("offload(")) ++cases;
        continue;
      }
      const std::string text = Print(program);
      EXPECT_EQ(Print(*Parse(text)), text);
      Result<RunResult> actual = Interpret(program, training.run);
      ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
      ASSERT_EQ(FirstDifference(expected, *actual), "") << text;
      blank += text.find("fresh=true") != std::string::npos;
      if (pass.starts_with("offload_sync")) continue;
      EXPECT_LE(PeakOf(program), limit) << text;
      if (pass.starts_with("offload(")) ++cases, ++fitted;
    }
    if (HasFailure()) return;
  }
  EXPECT_GE(fitted * 2, cases) << "most of these limits can be met";
  EXPECT_GT(blank, 10) << "gradients give up their memory until they are made anew";
}

}  // namespace
}  // namespace interlace
