
#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

std::string Recomputed(const std::string& ops, const std::string& pipeline = "fuse") {
  const std::string text = RunText(
      "interlace 1 captured\nstep 1 reduce_each\ngroup 0 sgd\nparam %0: f32[4,4] \"w\" trainable group 0\n"
      "input %1: f32[4,4] \"x\"\ninput %2: i64[4] \"y\"\nphase micro_batch takes () gives () {\n" +
          ops + "}\n",
      pipeline);
  const size_t at = text.find("\"y\"\n");
  return at == std::string::npos ? text : text.substr(at + 4);
}

constexpr const char* kGated = R"(  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %4: f32[4,4] = aten.mm(%1, %0) {fwd}
  %5: f32[4,4] = aten.silu(%3) {fwd}
  %6: f32[4,4] = aten.mul.Tensor(%5, %4) {fwd}
  %7: f32[4,4] = aten.mm(%6, %0) {fwd}
  %8: f32[4,4] = aten.mm(%7, %6) {bwd}
  %9: f32[4,4] = aten.mm(%7, %0) {bwd}
  %10: f32[4,4] = aten.mul.Tensor(%9, %5) {bwd}
  %11: f32[4,4] = aten.mul.Tensor(%9, %4) {bwd}
  %12: f32[4,4] = aten.silu_backward(%11, %3) {bwd}
  %13: f32[4,4] = aten.mm(%10, %12) {bwd}
  output(%8) {bwd name="a"}
  output(%13) {bwd name="b"}
)";

// silu(%3) is made again from %3, which its gradient keeps. One region makes both gradients, for both read %9. What the
// gradient of a product reads, %6, is kept.
TEST(FuseRecompute, WhatABackwardRegionCanMakeIsNotKept) {
  EXPECT_EQ(Recomputed(kGated),
            R"(func f0(%0: f32[4,4], %1: f32[4,4]) gives (%3) {
  %2: f32[4,4] = aten.silu(%0)
  %3: f32[4,4] = aten.mul.Tensor(%2, %1)
}
func f1(%0: f32[4,4], %1: f32[4,4], %2: f32[4,4]) gives (%4, %6) {
  %3: f32[4,4] = aten.silu(%0)
  %4: f32[4,4] = aten.mul.Tensor(%1, %3)
  %5: f32[4,4] = aten.mul.Tensor(%1, %2)
  %6: f32[4,4] = aten.silu_backward(%5, %0)
}
phase micro_batch takes () gives () {
  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %4: f32[4,4] = aten.mm(%1, %0) {fwd}
  %5: f32[4,4] = call f0(%3, %4) {fwd}
  %6: f32[4,4] = aten.mm(%5, %0) {fwd}
  %7: f32[4,4] = aten.mm(%6, %5) {bwd}
  %8: f32[4,4] = aten.mm(%6, %0) {bwd}
  %9: f32[4,4], %10: f32[4,4] = call f1(%3, %8, %4) {bwd}
  %11: f32[4,4] = aten.mm(%9, %10) {bwd}
  output(%7) {bwd name="a"}
  output(%11) {bwd name="b"}
}
)");
  EXPECT_NE(Recomputed(kGated, "fuse(recompute=false)").find("%5: f32[4,4], %6: f32[4,4] = call f0(%3, %4)"),
            std::string::npos);
  EXPECT_EQ(Recomputed(kGated, "fuse,fuse"), Recomputed(kGated));  // a second time changes nothing
}

// Of a chain what is cheapest is kept: the 16 bits that a product made and not the 32 that they were widened to, nor
// the logarithms, which are made from them row by row. Views are made again, too.
TEST(FuseRecompute, NarrowLogitsAreKeptForTheLoss) {
  const std::string text = Recomputed(R"(  %3: bf16[4,4] = aten._to_copy(%0, dtype=bf16) {fwd}
  %4: bf16[4,4] = aten.mm(%3, %3) {fwd}
  %5: f32[4,4] = aten._to_copy(%4, dtype=f32) {fwd}
  %6: f32[4,4] in %5+0 = view(%5) {fwd}
  %7: f32[4,4] = aten._log_softmax(%6, 1, false) {fwd}
  %8: f32[], %9: f32[] = aten.nll_loss_forward(%7, %2, none, 1, -100) {fwd}
  output(%8) {fwd name="loss"}
  %10: f32[] = aten.ones_like(%8, memory_format=preserve) {bwd}
  %11: f32[4,4] in %7+0 = view(%7) {bwd}
  %12: f32[4,4] = aten.nll_loss_backward(%10, %11, %2, none, 1, -100, %9) {bwd}
  %13: f32[4,4] = aten._log_softmax_backward_data(%12, %11, 1, f32) {bwd}
  %14: bf16[4,4] = aten._to_copy(%13, dtype=bf16) {bwd}
  %15: bf16[4,4] = aten.mm(%14, %3) {bwd}
  output(%15) {bwd name="grad"}
)");
  EXPECT_NE(text.find("gives (%5, %6) {\n  %2: f32[4,4] = aten._to_copy(%0, dtype=f32)\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  %5: f32[], %6: f32[] = call f0(%4, %2) {fwd}\n"), std::string::npos) << text;
  EXPECT_NE(text.find("= call f1(%5, %4, %2, %6) {bwd}\n"), std::string::npos) << text;
}

// A dropout's mask is kept as bytes, and what it was divided by is made again.
TEST(FuseRecompute, MasksAreBytes) {
  const std::string text = Recomputed(R"(  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %4: f32[4,4] = aten.bernoulli.p(%3, 0.9) {fwd rng=0}
  %5: f32[4,4] = aten.div.Scalar(%4, 0.9) {fwd}
  %6: f32[4,4] = aten.mul.Tensor(%3, %5) {fwd}
  %7: f32[4,4] = aten.mm(%6, %0) {fwd}
  %8: f32[4,4] = aten.mm(%7, %6) {bwd}
  %9: f32[4,4] = aten.mul.Tensor(%8, %5) {bwd}
  output(%9) {bwd name="a"}
)");
  EXPECT_EQ(text, R"(func f0(%0: f32[4,4], %1: f32[4,4]) gives (%2, %5) {
  %2: b8[4,4] = aten._to_copy(%0, dtype=b8)
  %3: f32[4,4] = aten._to_copy(%2, dtype=f32)
  %4: f32[4,4] = aten.div.Scalar(%3, 0.9)
  %5: f32[4,4] = aten.mul.Tensor(%1, %4)
}
func f1(%0: b8[4,4], %1: f32[4,4]) gives (%4) {
  %2: f32[4,4] = aten._to_copy(%0, dtype=f32)
  %3: f32[4,4] = aten.div.Scalar(%2, 0.9)
  %4: f32[4,4] = aten.mul.Tensor(%1, %3)
}
phase micro_batch takes () gives () {
  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %4: f32[4,4] = aten.bernoulli.p(%3, 0.9) {fwd rng=0}
  %5: b8[4,4], %6: f32[4,4] = call f0(%4, %3) {fwd}
  %7: f32[4,4] = aten.mm(%6, %0) {fwd}
  %8: f32[4,4] = aten.mm(%7, %6) {bwd}
  %9: f32[4,4] = call f1(%5, %8) {bwd}
  output(%9) {bwd name="a"}
}
)");
}

// A parameter that the backward part does not read is not gathered again for this, a sum is no op to make again, and
// what would take more reads than it saves stays: three values for one, all of which the region would have to read.
TEST(FuseRecompute, WhatStaysKept) {
  const std::string read = "  %9: f32[4,4] = aten.mm(%7, %7) {bwd}\n  %10: f32[4,4] = aten.exp(%9) {bwd}\n";
  const std::string parameter = R"(  %3: f32[4,4] = aten.mm(%1, %1) {fwd}
  %5: f32[4,4] = aten.mul.Tensor(%3, %0) {fwd}
  %6: f32[4,4] = aten.neg(%5) {fwd}
  %7: f32[4,4] = aten.mm(%6, %6) {fwd}
)" + read + R"(  %11: f32[4,4] = aten.mul.Tensor(%10, %5) {bwd}
  output(%11) {bwd name="a"}
)";
  EXPECT_EQ(Recomputed(parameter), Recomputed(parameter, "fuse(recompute=false)"));
  const std::string sum = R"(  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %5: f32[4,1] = aten.sum.dim_IntList(%3, [1], true) {fwd}
  %6: f32[4,4] = aten.mul.Tensor(%3, %5) {fwd}
  %7: f32[4,4] = aten.mm(%6, %0) {fwd}
)" + read + R"(  %11: f32[4,4] = aten.mul.Tensor(%10, %5) {bwd}
  output(%11) {bwd name="a"}
)";
  EXPECT_EQ(Recomputed(sum), Recomputed(sum, "fuse(recompute=false)"));
  const std::string three = R"(  %3: f32[4,4] = aten.mm(%1, %0) {fwd}
  %4: f32[4,4] = aten.mm(%3, %0) {fwd}
  %5: f32[4,4] = aten.addcmul(%3, %4, %1) {fwd}
  %6: f32[4,4] = aten.neg(%5) {fwd}
  %7: f32[4,4] = aten.mm(%6, %0) {fwd}
)" + read + R"(  %11: f32[4,4] = aten.mul.Tensor(%10, %5) {bwd}
  %12: f32[4,4] = aten.mm(%11, %3) {bwd}
  %13: f32[4,4] = aten.mm(%12, %4) {bwd}
  %14: f32[4,4] = aten.mm(%13, %1) {bwd}
  output(%14) {bwd name="a"}
)";
  EXPECT_EQ(Recomputed(three), Recomputed(three, "fuse(recompute=false)"));
  std::string two = three;  // two are no more than writing it and reading it again
  two.replace(two.find("addcmul(%3, %4, %1)"), 19, "mul.Tensor(%3, %4)");
  EXPECT_NE(Recomputed(two), Recomputed(two, "fuse(recompute=false)"));
}

// Random programs have the bits of the reference, many of them with values that are made again.
TEST(FuseRecompute, SameBits) {
  int changed = 0;
  const int rounds = Rounds(40);
  for (int seed = 0; seed < rounds; ++seed) {
    const testing::RandomProgramOptions options{.seed = static_cast<uint64_t>(seed), .layers = 2 + seed % 5};
    const std::string text = Print(testing::RandomProgram(options));
    testing::InterpretOptions run;
    const std::string out = RunText(text, "canonicalize,fuse,replicate(ranks=1),accumulate(steps=1),update");
    changed += out != RunText(text, "canonicalize,fuse(recompute=false),replicate(ranks=1),accumulate(steps=1),update");
    Result<Program> program = Parse(out);
    ASSERT_TRUE(program.ok()) << program.error().ToString() << out;
    Result<testing::RunResult> expected = testing::Interpret(testing::RandomProgram(options), run);
    Result<testing::RunResult> actual = testing::Interpret(*program, run);
    ASSERT_TRUE(expected.ok() && actual.ok());
    EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << out;
  }
  EXPECT_GT(changed, rounds / 4);
}

}  // namespace
}  // namespace interlace
