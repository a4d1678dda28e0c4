#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/random_program.h"
#include "passes/passes.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RandomProgram;
using testing::RunResult;

// kTwoLayers after the passes.
std::string TwoLayersAfter(const std::string& passes) {
  return RunText(std::string(kTwoLayers), passes);
}

// The ops of a phase up to its first backward op, those of the step before in brackets; views left out.
std::string Head(const std::string& text, const std::string& phase_name = "") {
  Result<Program> program = Parse(text, "head");
  if (!program.ok()) return text;
  const Phase* phase = phase_name.empty() ? &program->phases[0] : program->FindPhase(phase_name);
  std::string out;
  for (OpId id : phase->ops) {
    const Op& op = program->op(id);
    if (op.part == Part::kBackward) break;
    if (op.name == "view" || op.name == "output") continue;
    const bool pending = op.Attr("pending") != nullptr;
    out += (out.empty() ? "" : " ") + std::string(pending ? "[" : "") +
           op.name.substr(op.name.starts_with("aten.") ? 5 : 0);
    for (UnitId unit : op.units) out += ":u" + std::to_string(unit);
    out += pending ? "]" : "";
  }
  return out;
}

TEST(RepositionUpdate, ShardsAreUpdatedJustBeforeTheirGather) {
  const std::string text = TwoLayersAfter("shard(ranks=2),update(clip=1.0),reposition_update");
  EXPECT_EQ(Head(text),
            "[update.sgd:u0] gather.start:u0 [update.sgd:u1] gather.start:u1 gather.wait mul.Tensor release "
            "gather.wait mul.Tensor "
            "release sum");
  EXPECT_EQ(Head(text, "update"), "norm.partial:u0:u1 all_reduce.start all_reduce.wait norm.coef")
      << "the norm is of the step that ends";
  EXPECT_EQ(Head(TwoLayersAfter("shard(ranks=2,ahead=0),update,reposition_update")),
            "[update.sgd:u0] gather.start:u0 gather.wait mul.Tensor release [update.sgd:u1] gather.start:u1 "
            "gather.wait mul.Tensor "
            "release sum")
      << "without gathers ahead each unit has its turn just before its layer";
}

TEST(RepositionUpdate, AShareOfTheUpdatesIsSpreadOverTheUnits) {
  const std::string half = "shard(ranks=2),update,reposition_update(share=0.5)";
  EXPECT_EQ(Head(TwoLayersAfter(half)),
            "[update.sgd:u0] gather.start:u0 gather.start:u1 gather.wait mul.Tensor release gather.wait mul.Tensor "
            "release sum");
  EXPECT_EQ(Head(TwoLayersAfter(half), "update"), "update.sgd:u1");
  const std::string both = TwoLayersAfter(half + ",overlap_update");
  EXPECT_EQ(Head(both, "update"), "") << "the other one stands where its gradient is complete";
  EXPECT_EQ(Head(both), Head(TwoLayersAfter(half)));
  EXPECT_EQ(TwoLayersAfter("shard(ranks=2),update,reposition_update(share=1.5)"),
            "error: pass 'reposition_update': option share: 1.5 is more than all; give 0 to 1");
  EXPECT_EQ(TwoLayersAfter("shard(ranks=2),update,reposition_update(share=0)"),
            TwoLayersAfter("shard(ranks=2),update"));
}

TEST(RepositionUpdate, WholeParametersAreGatheredAfterTheirPartWasUpdated) {
  const std::string before = "zero1(ranks=2),update,reposition_update";
  EXPECT_EQ(Head(TwoLayersAfter(before)),
            "[update.sgd:u0] [gather.start:u0] [update.sgd:u1] [gather.start:u1] [gather.wait] mul.Tensor "
            "[gather.wait] mul.Tensor sum");
  EXPECT_EQ(Head(TwoLayersAfter(before + "(ahead=0)")),
            "[update.sgd:u0] [gather.start:u0] [gather.wait] mul.Tensor [update.sgd:u1] [gather.start:u1] "
            "[gather.wait] mul.Tensor sum");
  EXPECT_EQ(Head(TwoLayersAfter("replicate(ranks=2),update,reposition_update")),
            "[update.sgd:u0] mul.Tensor [update.sgd:u1] mul.Tensor sum");
}

TEST(RepositionUpdate, OnlyTheFirstMicroBatchChanges) {
  const std::string passes = "shard(ranks=2),accumulate(steps=3),update(clip=1.0)";
  const std::string plain = TwoLayersAfter(passes), moved = TwoLayersAfter(passes + ",reposition_update");
  EXPECT_EQ(Head(moved, "micro_batch.first").substr(0, 50), "[update.sgd:u0] gather.start:u0 [update.sgd:u1] ga");
  EXPECT_EQ(Head(moved, "micro_batch.middle"), Head(plain, "micro_batch.middle"));
  EXPECT_EQ(Head(moved, "micro_batch.last"), Head(plain, "micro_batch.last"));
}

// What the pass writes, to the letter: the norm of this step lies in a state that the updates of the next one read.
TEST(RepositionUpdate, TextByHand) {
  const std::string head = R"(interlace 1 scheduled
mesh dp 1
step 1 reduce_each
group 0 sgd
unit u0 dp f32 numel 32 shard 32
param %0: f32[32] in %2+0 "w" trainable group 0 unit u0+0
input %1: f32[32] "x"
state %2: f32[32] u0.full persistent
state %3: f32[32] u0.grad step
)";
  const std::string before = head + R"(phase micro_batch takes () gives () {
  %4: f32[32] = aten.mul.Tensor(%1, %0) {fwd}
  %5: f32[32] into %3+0 = aten.mul.Tensor(%1, %4) {bwd}
}
phase update once takes () gives () {
  %6: i64[68] = norm.partial(%3) {upd units=[u0]}
  %7: f64[3] = norm.coef(%6) {upd max_norm=1.0 scale=1.0}
  update.sgd(%2, %3, %7) {upd units=[u0] scale=1.0 ranges=[0, 32, 0]}
}
)";
  const std::string after = head + R"(state %4: f64[3] coef step
phase micro_batch takes () gives () {
  update.sgd(%2, %3, %4) {upd units=[u0] scale=1.0 ranges=[0, 32, 0] pending=true}
  %5: f32[32] = aten.mul.Tensor(%1, %0) {fwd}
  %6: f32[32] into %3+0 = aten.mul.Tensor(%1, %5) {bwd}
}
phase update once takes () gives () {
  %7: i64[68] = norm.partial(%3) {upd units=[u0]}
  %8: f64[3] into %4+0 = norm.coef(%7) {upd max_norm=1.0 scale=1.0}
}
)";
  EXPECT_EQ(RunText(before, "reposition_update"), after);
  EXPECT_EQ(RunText(after, "reposition_update"), after) << "a second run changes nothing";
  EXPECT_EQ(RunText(after, "canonicalize"), after);
}

TEST(RepositionUpdate, WhatItCannotBeCombinedWithSaysWhy) {
  EXPECT_EQ(RunText(GoldenInput("mlp.il"),
                    "canonicalize,mesh(axes=pp:2+dp:2),pipeline(stage=0,at=auto,cluster=h100-80gb-4),shard(axis=dp),"
                    "accumulate(steps=4,mode=reduce_last),update,order(schedule=1f1b),reposition_update"),
            "error: pass 'reposition_update': stage 0 of a pipeline runs its first phase 4 times in a step; leave it "
            "out: without clipping overlap_update makes the optimizer steps beside the last backward part");
  EXPECT_EQ(TwoLayersAfter("reposition_update"),
            "error: pass 'reposition_update': the program has no optimizer step; run shard, replicate or zero1, and "
            "update, before "
            "reposition_update");
  EXPECT_EQ(TwoLayersAfter("shard(ranks=2),update,overlap_update,reposition_update"),
            "error: pass 'reposition_update': overlap_update has put optimizer steps into the phase micro_batch, where "
            "their gradients are "
            "complete; use overlap_update or reposition_update");
  EXPECT_EQ(TwoLayersAfter("shard(ranks=2),update,offload_sync(kinds=states,cluster=local-2),reposition_update"),
            "error: pass 'reposition_update': offload has planned its copies around the optimizer step where it is; "
            "run reposition_update "
            "before offload");
  for (const std::string pass : {"prefetch", "reorder", "unshard", "search"}) {
    EXPECT_EQ(
        TwoLayersAfter("shard(ranks=2),update,reposition_update," + pass),
        "error: pass '" + pass +
            "': the optimizer step of each unit stands just before the unit's first use (reposition_update), and " +
            pass + " does not keep that order; run reposition_update after " + pass);
  }
}

// The first line of what the verifier says when a text of the program is changed.
std::string Violation(const std::string& passes, const std::string& from, const std::string& to) {
  std::string text = TwoLayersAfter(passes + ",update(clip=1.0),reposition_update");
  const size_t at = text.find(from);
  if (at == std::string::npos) return "no '" + from + "' in\n" + text;
  text.replace(at, from.size(), to);
  return RunText(text, "canonicalize");
}

TEST(RepositionUpdate, TheVerifierKnowsWhatIsPending) {
  const std::string update =
      "  update.sgd(%3, %6, %7, %9) {upd units=[u0] momentum=true scale=0.5 ranges=[0, 64, 0] pending=true}\n";
  const std::string gather = "  %10: f32[64] = gather.start(%3) {fwd m1 units=[u0]}\n";
  const std::string invalid = "error: the input is not valid: ";
  EXPECT_EQ(Violation("shard(ranks=2)", update + gather, gather + update),
            invalid + "%3 is touched before update.sgd of the step before is done with %3");
  EXPECT_EQ(
      Violation("shard(ranks=2)", "%29: i64[68] = norm.partial(%6, %5) {upd units=[u0, u1]}",
                "%29: i64[68] = norm.partial(%6, %5) {upd units=[u0, u1] pending=true}"),
      invalid + "pending=true marks view, update.*, gather.start and gather.wait of the optimizer step, tagged upd");
  EXPECT_EQ(Violation("shard(ranks=2)", "gather.start(%3) {fwd m1 units=[u0]}",
                      "gather.start(%3) {upd m1 units=[u0] pending=true}"),
            invalid + "the result of a pending op lies in a state: elsewhere a step that has nothing pending lacks it");
  std::string late = update;
  EXPECT_EQ(Violation("shard(ranks=2)", "phase update once takes () gives () {\n",
                      "phase update once takes () gives () {\n" + late),
            invalid + "pending ops stand in the one micro-batch that a step begins with, not in phase 'update'");
}

// Random programs, through schedule passes before and offload after.
TEST(RepositionUpdate, SameBitsAsTheTextbookStep) {
  int moved = 0, offloaded = 0;
  for (uint64_t seed = 0, end = Rounds(24); seed < end; ++seed) {
    std::mt19937_64 random(seed * 19 + 7);
    testing::RandomProgramOptions shape;
    shape.seed = seed + 7000;
    shape.layers = 1 + static_cast<int>(random() % 6);
    shape.max_width = random() % 2 ? 13 : 40;
    InterpretOptions run;
    run.steps = 1 + static_cast<int64_t>(random() % 4);
    run.ranks = 1 + static_cast<int64_t>(seed % 4);
    run.accumulation = 1 + static_cast<int64_t>(random() % 4);
    run.accumulate_mode = random() % 2 ? "reduce_each" : "reduce_last";
    if (random() % 2) run.clip = 0.05;
    const Program captured = RandomProgram(shape);
    Result<RunResult> expected = Interpret(captured, run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    for (const char* sharding : {"shard", "zero1", "replicate"}) {
      const bool shard = std::string_view(sharding) == "shard";
      std::string passes = "canonicalize," + std::string(sharding) + "(ranks=" + std::to_string(run.ranks);
      if (shard) passes += ",ahead=" + std::to_string(random() % 3);
      passes += "),accumulate(steps=" + std::to_string(run.accumulation) + ",mode=" + run.accumulate_mode + "),update";
      if (run.clip) passes += "(clip=0.05)";
      if (random() % 3 == 0)
        passes += ",bucket(mode=greedy,pack=" + std::string(random() % 2 ? "flat" : "copy") + ",cluster=l4-24gb-4)";
      if (random() % 3 == 0) passes += ",unshard(units=all)";
      if (random() % 3 == 0) passes += ",prefetch(cluster=l4-24gb-4)";
      if (random() % 3 == 0) passes += ",reorder";
      passes += ",reposition_update" + std::string(random() % 2 ? "" : "(ahead=0)");
      const bool offload = random() % 3 == 0;
      if (offload) passes += ",offload_sync(cluster=l4-24gb-4)";
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + passes);
      Program program = RandomProgram(shape);
      Result<std::vector<PassCall>> calls = ParsePipeline(passes);
      ASSERT_TRUE(calls.ok()) << calls.error().ToString();
      Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
      if (!reports.ok() && reports.error().message.find("run bucket(pack=copy) before") != std::string::npos) continue;
      ASSERT_TRUE(reports.ok()) << reports.error().ToString();
      for (const PassReport& report : *reports) {
        moved += report.changed && report.pass.starts_with("reposition");
        offloaded += report.changed && report.pass.starts_with("offload");
      }
      const std::string text = Print(program);
      EXPECT_EQ(Print(*Parse(text)), text);
      Result<RunResult> actual = Interpret(program, run);
      ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
      ASSERT_EQ(FirstDifference(*expected, *actual), "") << text;
    }
  }
  EXPECT_GT(moved, 60);
  EXPECT_GT(offloaded, 15);
}

// A gradient that is not finite leaves nothing to do to the next step, which goes on from the parameters as they were.
TEST(RepositionUpdate, ANormThatIsNotFiniteLeavesNothingPending) {
  InterpretOptions run;
  run.steps = 2;
  run.params["net.a.w"] = std::vector<double>(64, 1e30);
  run.params["net.b.w"] = std::vector<double>(64, 1e30);
  Result<Program> program = Parse(TwoLayersAfter("shard(ranks=2),update(clip=1.0),reposition_update"), "moved");
  ASSERT_TRUE(program.ok());
  Result<RunResult> result = Interpret(*program, run);
  ASSERT_TRUE(result.ok()) << result.error().ToString();
  for (const auto& [name, values] : result->params) {
    for (double value : values) EXPECT_EQ(value, static_cast<double>(1e30F)) << name;
  }
}

}  // namespace
}  // namespace interlace
