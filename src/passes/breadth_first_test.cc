// Micro-batches side by side: one program by hand, bits of random programs against the textbook step, what is refused,
// and the search that chooses it where links are slow.
#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/schedule_test_support.h"
#include "passes/search.h"

namespace interlace {
namespace {

TEST(BreadthFirst, ReadsOfParametersCutTheOpsIntoPieces) {
  EXPECT_EQ(Phases(RunText(std::string(kTwoLayers), "breadth_first")), R"(phase micro_batch takes () gives () {
  %4: f32[64] = aten.mul.Tensor(%2, %0) {fwd m1}
  %5: f32[64] = aten.mul.Tensor(%3, %0) {fwd m1 micro=1}
  %6: f32[64] = aten.mul.Tensor(%4, %1) {fwd m2}
  %7: f32[] = aten.sum(%6) {fwd}
  output(%7) {fwd name="loss"}
  %8: f32[64] = aten.mul.Tensor(%5, %1) {fwd m2 micro=1}
  %9: f32[] = aten.sum(%8) {fwd micro=1}
  output(%9) {fwd name="loss" micro=1}
  %10: f32[64] = aten.mul.Tensor(%6, %4) {bwd m2}
  grad(%1, %10) {bwd m2}
  %11: f32[64] = aten.mul.Tensor(%8, %5) {bwd m2 micro=1}
  grad(%1, %11) {bwd m2 micro=1}
  %12: f32[64] = aten.mul.Tensor(%6, %1) {bwd m2}
  %13: f32[64] = aten.mul.Tensor(%12, %2) {bwd m1}
  grad(%0, %13) {bwd m1}
  %14: f32[64] = aten.mul.Tensor(%8, %1) {bwd m2 micro=1}
  %15: f32[64] = aten.mul.Tensor(%14, %3) {bwd m1 micro=1}
  grad(%0, %15) {bwd m1 micro=1}
  %16: f32[64] = aten.mul.Tensor(%12, %0) {bwd m1}
  output(%16) {bwd name="dx"}
  %17: f32[64] = aten.mul.Tensor(%14, %0) {bwd m1 micro=1}
  output(%17) {bwd name="dx" micro=1}
}
)");
}

TEST(BreadthFirst, GradientsAreAddedInOrderAndReducedOnce) {
  const std::string text =
      RunText(std::string(kTwoLayers), "breadth_first,replicate(ranks=2),accumulate(steps=4,mode=reduce_last),update");
  EXPECT_NE(text.find("\nstep 4 reduce_last by 2\n"), std::string::npos) << text;
  const std::string last = text.substr(text.find("phase micro_batch.last"));
  const auto count = [&](const std::string& what) {
    size_t n = 0;
    for (size_t at = last.find(what); at != std::string::npos; at = last.find(what, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("aten.add_.Tensor"), 4U) << "two micro-batches, two parameters";
  EXPECT_EQ(count("reduce.start"), 2U);
  EXPECT_EQ(text.find("phase micro_batch.middle"), std::string::npos);
}

TEST(BreadthFirst, SameBitsAsTheTextbookStep) {
  int done = 0;
  for (uint64_t seed = 1, last = Rounds(18); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 1 + static_cast<int>(seed % 6);
    const Program captured = testing::RandomProgram(options);
    const int64_t width = 2 + static_cast<int64_t>(random() % 2), runs = 1 + static_cast<int64_t>(random() % 4);
    testing::InterpretOptions run;
    run.steps = 2;
    run.ranks = 1 + static_cast<int64_t>(seed % 3);
    run.accumulation = width * runs;
    run.accumulate_mode = "reduce_last";
    if (random() % 2) run.clip = 0.05;
    Result<testing::RunResult> expected = testing::Interpret(captured, run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    for (const char* strategy : {"shard", "replicate", "zero1"}) {
      const std::string pipeline =
          std::string(seed % 2 ? "canonicalize," : "") + "breadth_first(micro_batches=" + std::to_string(width) + ")," +
          strategy + "(ranks=" + std::to_string(run.ranks) + "),accumulate(steps=" + std::to_string(run.accumulation) +
          ",mode=reduce_last),update" + (run.clip ? "(clip=0.05)" : "") +
          (seed % 3 ? ",canonicalize" : ",prefetch,unshard,overlap_update");
      const std::string text = RunText(Print(captured), pipeline);
      if (text.starts_with("error: pass 'breadth_first': the model changes")) break;
      Result<Program> program = Parse(text);
      ASSERT_TRUE(program.ok()) << pipeline << "\n" << text;
      EXPECT_EQ(Print(*program), text);
      Result<testing::RunResult> actual = testing::Interpret(*program, run);
      ASSERT_TRUE(actual.ok()) << pipeline << "\n" << actual.error().ToString() << "\n" << text;
      ASSERT_EQ(testing::FirstDifference(*expected, *actual), "") << pipeline << "\n" << text;
      ++done;
    }
  }
  EXPECT_GE(done, 36);
}

// The gradient of a position's embedding, of a batch of one row, is that of what the layer before gave as well: it is
// read there after the next micro-batch's is known.
constexpr std::string_view kPositions = R"(interlace 1 captured
group 0 sgd
param %0: f32[64] "w" trainable group 0
param %1: f32[64] "positions" trainable group 0
input %2: f32[64] "x"
phase micro_batch takes () gives () {
  %3: f32[64] = aten.mul.Tensor(%2, %0) {fwd}
  %4: f32[64] = aten.add.Tensor(%3, %1) {fwd}
  %5: f32[64] = aten.mul.Tensor(%4, %4) {fwd}
  %6: f32[] = aten.sum(%5) {fwd}
  output(%6) {fwd name="loss"}
  %7: f32[64] = aten.mul.Scalar(%4, 2.0) {bwd}
  grad(%1, %7) {bwd}
  %8: f32[64] = aten.mul.Tensor(%7, %0) {bwd}
  output(%8) {bwd name="dx"}
  %9: f32[64] = aten.mul.Tensor(%7, %2) {bwd}
  grad(%0, %9) {bwd}
}
)";

TEST(BreadthFirst, AGradientThatIsReadOnIsAddedToBehindItsReaders) {
  testing::InterpretOptions run;
  run.steps = 2;
  run.accumulation = 2;
  run.accumulate_mode = "reduce_last";
  const Result<Program> captured = Parse(std::string(kPositions), "test");
  ASSERT_TRUE(captured.ok()) << ErrorOf(captured);
  for (const int64_t ranks : {1, 2}) {
    run.ranks = ranks;
    const Result<testing::RunResult> expected = testing::Interpret(*captured, run);
    ASSERT_TRUE(expected.ok()) << ErrorOf(expected);
    for (const char* strategy : {"shard", "replicate", "zero1"}) {
      Program program = captured->Clone();
      ASSERT_EQ(ErrorOf(Apply(program, "breadth_first(micro_batches=2)," + std::string(strategy) + "(ranks=" +
                                           std::to_string(ranks) + "),accumulate(steps=2,mode=reduce_last),update")),
                "no error");
      const Result<testing::RunResult> actual = testing::Interpret(program, run);
      ASSERT_TRUE(actual.ok()) << ErrorOf(actual);
      EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << Print(program);
    }
  }
}

TEST(BreadthFirst, SaysWhatItCannotDo) {
  const std::string two(kTwoLayers);
  EXPECT_EQ(RunText(two, "shard(ranks=2),breadth_first"),
            "error: pass 'breadth_first': the program has units already (shard, replicate or zero1 has run); "
            "breadth_first takes a captured one");
  EXPECT_EQ(
      RunText(two, "breadth_first,breadth_first"),
      "error: pass 'breadth_first': the program runs 2 micro-batches side by side already; run breadth_first once");
  EXPECT_EQ(RunText(two, "breadth_first,shard(ranks=2),accumulate(steps=4)"),
            "error: pass 'accumulate': micro-batches that run side by side are reduced together; use mode=reduce_last, "
            "or no breadth_first");
  EXPECT_EQ(
      RunText(two, "breadth_first,shard(ranks=2),accumulate(steps=3,mode=reduce_last)"),
      "error: pass 'accumulate': steps=3 micro-batches cannot run by 2; choose a multiple, or another breadth_first");
  EXPECT_EQ(RunText(two, "breadth_first,precision(reduce=bf16)"),
            "error: pass 'precision': micro-batches run side by side already; run precision before breadth_first");
  std::string changes = two;
  changes.replace(changes.find("phase"), 0, "buffer %20: f32[64] \"seen\" plain\n");
  changes.replace(changes.find("  output(%5)"), 0, "  assign(%20, %4) {fwd}\n");
  EXPECT_EQ(RunText(changes, "breadth_first"),
            "error: pass 'breadth_first': the model changes %20, which the next micro-batch reads: one must end before "
            "the next");
}

// What the search gives for the 6 layers of a random program, with gradients that are reduced once in four
// micro-batches.
std::string Searched(uint64_t seed, const std::string& options) {
  testing::RandomProgramOptions random;
  random.seed = seed;
  random.layers = 6;
  random.max_width = 40;
  return RunText(
      Print(testing::RandomProgram(random)),
      "canonicalize,shard(ranks=2,ahead=0),accumulate(steps=4,mode=reduce_last),update,search(evaluations=200" +
          options + ")");
}

double ChosenUs(const std::string& text) {
  Result<Program> program = Parse(text);
  if (!program.ok()) return -1;
  const std::string row = *program->Meta("search.chosen");
  return std::stod(row.substr(row.find('|') + 1));
}

TEST(BreadthFirst, TheSearchChoosesItWhereTransfersHoldTheStepUp) {
  int faster = 0;
  for (uint64_t seed = 4; seed <= 12 && faster == 0; ++seed) {
    const std::string text = Searched(seed, ",recompute=none"),
                      without = Searched(seed, ",recompute=none,breadth_first=none");
    if (text.find("reduce_last by ") == std::string::npos) continue;
    EXPECT_LE(ChosenUs(text), ChosenUs(without));
    if (ChosenUs(text) == ChosenUs(without)) continue;  // to the digits that are told
    ++faster;
    EXPECT_NE(text.find("one micro-batch after the other"), std::string::npos);
    EXPECT_EQ(Searched(seed, ",recompute=none"), text) << "deterministic";
  }
  EXPECT_GE(faster, 1);
}

}  // namespace
}  // namespace interlace
