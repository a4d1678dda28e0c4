#include "ir/residency.h"

#include <gtest/gtest.h>

#include "ir/liveness.h"
#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace {
namespace {

// One unit on one rank: a gather, a gradient, an AdamW step. `body` moves things about within the phases.
std::string Text(const std::string& avg, const std::string& forward, const std::string& before_update,
                 const std::string& after_update) {
  return "interlace 1 scheduled\nmesh dp 1\nstep 1 reduce_each\ngroup 0 adamw\nunit u0 dp f32 numel 64 shard 64\n"
         "param %0: f32[64] \"w\" trainable group 0 unit u0+0\ninput %2: f32[64] \"x\"\n"
         "state %4: f32[64] u0.shard persistent\nstate %5: f32[64] u0.grad step\n"
         "state %6: f32[64] u0.exp_avg persistent" +
         avg +
         "\nstate %7: f32[64] u0.exp_avg_sq persistent\n"
         "phase micro_batch takes () gives () {\n" +
         forward +
         "  %10: f32[64] = gather.start(%4) {fwd units=[u0]}\n  gather.wait(%10) {fwd}\n"
         "  %11: f32[64] = aten.mul.Tensor(%10, %2) {fwd}\n  release(%10) {fwd}\n"
         "  %12: f32[64] = grad.begin() {bwd units=[u0]}\n  %13: f32[64] into %12+0 = aten.mul.Tensor(%11, %2) {bwd}\n"
         "  %14: f32[64] into %5+0 = reduce.start(%12) {bwd units=[u0]}\n  reduce.wait(%14) {bwd}\n  release(%12) "
         "{bwd}\n}\n"
         "phase update once takes () gives () {\n" +
         before_update + "  update.adamw(%4, %5, %6, %7) {upd units=[u0] scale=1.0 ranges=[0, 64, 0]}\n" +
         after_update + "}\n";
}

Program ParsedText(const std::string& text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << (program.ok() ? "" : program.error().ToString());
  EXPECT_EQ(Print(*program), text);
  return std::move(*program);
}

const std::string kBack = "  reload.start(%6) {upd}\n  reload.wait(%6) {upd}\n";
const std::string kOut = "  offload.start(%6) {upd}\n  offload.wait(%6) {upd}\n";

TEST(Residency, AStateOutBetweenStepsHasMemoryOnlyAroundItsUpdate) {
  Program program = ParsedText(Text(" out", "", kBack, kOut));
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<PhaseLiveness> forward = ComputeLiveness(program, *program.FindPhase("micro_batch"));
  Result<PhaseLiveness> update = ComputeLiveness(program, *program.FindPhase("update"));
  ASSERT_TRUE(forward.ok() && update.ok());
  EXPECT_EQ(forward->persistent_bytes, 3 * 256) << "shard, grad, exp_avg_sq";
  EXPECT_EQ(update->live_before, (std::vector<int64_t>{0, 256, 256, 256, 256, 0}));
  EXPECT_EQ(update->peak_bytes, 256);
  EXPECT_EQ(update->dies_after[4], std::vector<ValueId>{6});
}

TEST(Residency, AStateInBetweenStepsGoesOutAndComesBackWithinOne) {
  Program program = ParsedText(Text("", "  offload.start(%6) {fwd}\n  offload.wait(%6) {fwd}\n", kBack, ""));
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<PhaseLiveness> forward = ComputeLiveness(program, *program.FindPhase("micro_batch"));
  Result<PhaseLiveness> update = ComputeLiveness(program, *program.FindPhase("update"));
  EXPECT_EQ(forward->live_before[1], 256);
  EXPECT_EQ(forward->live_before[2], 0);
  EXPECT_EQ(update->live_before.front(), 0);
  EXPECT_EQ(update->live_before.back(), 256);
}

TEST(Residency, AStretchMayReachOverPhases) {
  // Out at the start of the update, the write ends in the next step's forward part only in a step's middle: a step must
  // end settled.
  Program program = ParsedText(Text("", "  offload.start(%6) {fwd}\n", "  offload.wait(%6) {upd}\n" + kBack, ""));
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<PhaseLiveness> forward = ComputeLiveness(program, *program.FindPhase("micro_batch"));
  EXPECT_EQ(forward->live_before.back(), 256) << "leaving, so still in memory";
}

TEST(Residency, TheInterpreterGivesTheSameBitsAndMemoryThatIsOutIsGone) {
  Result<testing::RunResult> plain = testing::Interpret(ParsedText(Text("", "", "", "")), {.steps = 3});
  ASSERT_TRUE(plain.ok()) << plain.error().ToString();
  for (const std::string& text :
       {Text(" out", "", kBack, kOut), Text("", "  offload.start(%6) {fwd}\n  offload.wait(%6) {fwd}\n", kBack, "")}) {
    Result<testing::RunResult> moved = testing::Interpret(ParsedText(text), {.steps = 3});
    ASSERT_TRUE(moved.ok()) << moved.error().ToString();
    EXPECT_EQ(testing::FirstDifference(*plain, *moved), "");
  }
  Result<testing::RunResult> early = testing::Interpret(
      ParsedText(Text(" out", "", "  reload.start(%6) {upd}\n", "  reload.wait(%6) {upd}\n" + kOut)), {});
  EXPECT_TRUE(!early.ok() || testing::FirstDifference(*plain, *early) != "") << "memory is poison until the wait";
}

struct Wrong {
  std::string avg, forward, before, after, message;
};

TEST(Residency, TheVerifierNamesWhatIsWrong) {
  const std::vector<Wrong> cases = {
      {" out", "", "", "", "%6 is used while its storage is out; reload it and wait first"},
      {" out", "", "  reload.start(%6) {upd}\n", "  reload.wait(%6) {upd}\n" + kOut,
       "%6 is used while its storage is on its way back; reload it and wait first"},
      {" out", "", kBack, "",
       "the state is in memory when the step ends, but the next step begins with it out; offload it"},
      {"", "", "", kOut,
       "the state is out when the step ends, but the next step begins with it in memory; reload it, or declare it "
       "'out'"},
      {"", "", "  offload.start(%6) {upd}\n", "  offload.wait(%6) {upd}\n" + kBack,
       "%6 is written while its storage is on its way out; wait for the offload first"},
      {"", "", kBack, "", "%6 is in memory here; reload.start needs it out"},
      {"", "  offload.start(%2) {fwd}\n", "", "",
       "offload.start moves whole storages of states and results; %2 is neither"},
      {" out", "", kBack, "  offload.start(%6) {upd clean=true}\n  offload.wait(%6) {upd}\n",
       "%6 was written since it came back, or never was in the tier; leave out clean=true"},
      {"", "  offload.start() {fwd}\n", "", "", "offload.start needs at least one operand"},
      {"", "  %9: f32[64] = offload.start(%6) {fwd}\n", "", "", "offload.start has no results"},
  };
  for (const Wrong& wrong : cases) {
    Program program = ParsedText(Text(wrong.avg, wrong.forward, wrong.before, wrong.after));
    std::string all;
    for (const Error& error : VerifyAll(program)) all += error.message + "\n";
    EXPECT_NE(all.find(wrong.message), std::string::npos) << "wanted: " << wrong.message << "\ngot: " << all;
  }
}

// The step on the host: weights come for their use, the gradient takes memory from its first write to its way out.
// `from` is replaced by `to` in the text.
std::string HostText(const std::string& from = "", const std::string& to = "") {
  std::string text =
      Text(" out", "  reload.start(%4) {fwd}\n  reload.wait(%4) {fwd}\n", "  offload.wait(%5) {upd}\n", "");
  const auto replace = [&](const std::string& what, const std::string& with) {
    const size_t at = text.find(what);
    ASSERT_NE(at, std::string::npos) << what;
    text.replace(at, what.size(), with);
  };
  replace("u0.shard persistent", "u0.shard persistent out");
  replace("u0.grad step", "u0.grad step out");
  replace("u0.exp_avg_sq persistent", "u0.exp_avg_sq persistent out");
  replace("  %14: f32[64] into", "  reload.start(%5) {bwd fresh=true}\n  reload.wait(%5) {bwd}\n  %14: f32[64] into");
  replace("  release(%12) {bwd}\n",
          "  release(%12) {bwd}\n  offload.start(%5) {bwd}\n  offload.start(%4) {bwd clean=true}\n  offload.wait(%4) "
          "{bwd}\n");
  replace("{upd units=[u0]", "{upd lane=host units=[u0]");
  if (!from.empty()) replace(from, to);
  return text;
}

TEST(Residency, AStepOnTheHostWorksOnWhatIsOut) {
  Program program = ParsedText(HostText());
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<PhaseLiveness> forward = ComputeLiveness(program, *program.FindPhase("micro_batch"));
  Result<PhaseLiveness> update = ComputeLiveness(program, *program.FindPhase("update"));
  ASSERT_TRUE(forward.ok() && update.ok());
  EXPECT_EQ(forward->persistent_bytes, 0);
  EXPECT_EQ(forward->live_before.front(), 0);
  EXPECT_EQ(update->live_before, (std::vector<int64_t>{256, 0, 0})) << "the gradient, until it has gone";
  Result<testing::RunResult> plain = testing::Interpret(ParsedText(Text("", "", "", "")), {.steps = 3});
  Result<testing::RunResult> host = testing::Interpret(program, {.steps = 3});
  ASSERT_TRUE(host.ok()) << host.error().ToString();
  EXPECT_EQ(testing::FirstDifference(*plain, *host), "");
}

TEST(Residency, WhatNobodyNeedsAgainGoesWithoutACopy) {
  std::string text = Text("", "", "", "  offload.start(%5) {upd clean=true}\n  offload.wait(%5) {upd}\n");
  const auto replace = [&](const std::string& what, const std::string& with) {
    text.replace(text.find(what), what.size(), with);
  };
  replace("u0.grad step", "u0.grad step out");
  replace("  %14: f32[64] into", "  reload.start(%5) {bwd fresh=true}\n  reload.wait(%5) {bwd}\n  %14: f32[64] into");
  Program program = ParsedText(text);
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<PhaseLiveness> forward = ComputeLiveness(program, *program.FindPhase("micro_batch"));
  EXPECT_EQ(forward->persistent_bytes, 768) << "weights and moments; the gradient begins in the backward part";
  Result<testing::RunResult> plain = testing::Interpret(ParsedText(Text("", "", "", "")), {.steps = 3});
  Result<testing::RunResult> moved = testing::Interpret(program, {.steps = 3});
  ASSERT_TRUE(moved.ok()) << moved.error().ToString();
  EXPECT_EQ(testing::FirstDifference(*plain, *moved), "");
  replace("{bwd fresh=true}", "{bwd}");
  EXPECT_NE(Verify(ParsedText(text)).error().message.find("is needed again; leave out clean=true"), std::string::npos);
}

TEST(Residency, TheVerifierKnowsWhatAStepOnTheHostNeeds) {
  const std::vector<std::pair<std::pair<std::string, std::string>, std::string>> cases = {
      {{"  offload.wait(%5) {upd}\n", ""},
       "a step on the host works on storages that are out; %5 is on its way out; offload it and wait first"},
      {{"u0.exp_avg_sq persistent out", "u0.exp_avg_sq persistent"},
       "a step on the host works on storages that are out; %7 is in memory"},
      {{"{upd lane=host", "{upd"}, "%4 is used while its storage is out; reload it and wait first"},
      {{"reload.start(%4) {fwd}", "reload.start(%4) {fwd fresh=true}"},
       "fresh= is for reload.start of a state of one step, which has nothing to keep"},
      {{"  offload.start(%5) {bwd}\n", ""}, "%5 is in memory here; offload.wait needs it on its way out"},
      {{"  %14: f32[64] into", "  offload.start(%5) {bwd}\n  %14: f32[64] into"},
       "%5 goes out before anything is written to it"},
      {{"  offload.start(%5) {bwd}\n", "  offload.start(%5) {bwd clean=true}\n"},
       "%5 was written since it came back, and is needed again; leave out clean=true"},
      {{"  %14: f32[64] into", "  %20: f32[64] = aten.neg(%5) {bwd}\n  %14: f32[64] into"},
       "%5 is read before anything is written to it"},
      {{"aten.mul.Tensor(%10, %2) {fwd}", "aten.mul.Tensor(%10, %2) {fwd lane=host}"},
       "lane=host is for optimizer steps (update.*) on storages that are out"},
  };
  for (const auto& [change, message] : cases) {
    std::string all;
    for (const Error& error : VerifyAll(ParsedText(HostText(change.first, change.second)))) all += error.message + "\n";
    EXPECT_NE(all.find(message), std::string::npos) << "wanted: " << message << "\ngot: " << all;
  }
}

TEST(Residency, AValueComesBackBeforeItsPhaseEnds) {
  std::string text = Text("", "", "", "");
  const std::string at = "  %12: f32[64] = grad.begin";
  std::string out = text, back = text;
  out.insert(out.find(at), "  offload.start(%11) {fwd}\n  offload.wait(%11) {fwd}\n");
  EXPECT_NE(Verify(ParsedText(out)).error().message.find("%11 is used while its storage is out"), std::string::npos);
  back.insert(
      back.find(at),
      "  offload.start(%11) {fwd}\n  offload.wait(%11) {fwd}\n  reload.start(%11) {bwd}\n  reload.wait(%11) {bwd}\n");
  Program program = ParsedText(back);
  EXPECT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  Result<testing::RunResult> a = testing::Interpret(ParsedText(text)), b = testing::Interpret(program);
  ASSERT_TRUE(b.ok()) << b.error().ToString();
  EXPECT_EQ(testing::FirstDifference(*a, *b), "");
}

}  // namespace
}  // namespace interlace
