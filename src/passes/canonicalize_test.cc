#include "passes/pass_test_support.h"
#include "passes/passes.h"

namespace interlace {
namespace {

// A captured program with one parameter %0: f32[4,8], a buffer %1: f32[4,8], an input %2: f32[4,8] and these ops.
std::string With(const std::string& ops) {
  return "interlace 1 captured\nstep 1 reduce_each\nparam %0: f32[4,8] \"w\" trainable\nbuffer %1: f32[4,8] \"b\" "
         "persistent\n"
         "input %2: f32[4,8] \"x\"\nphase micro_batch takes () gives () {\n" +
         ops + "}\n";
}

std::string After(const std::string& ops) {
  std::string text = Phases(RunText(With(ops), "canonicalize"));
  std::string head = "phase micro_batch takes () gives () {\n";
  if (!text.starts_with(head)) return text;
  return text.substr(head.size(), text.size() - head.size() - 2);
}

TEST(Canonicalize, ViewsOfViewsAreViewsOfTheStorage) {
  EXPECT_EQ(After("  %3: f32[8,4]{1,8} in %0+0 = aten.t(%0) {fwd}\n"
                  "  %4: f32[2,4]{1,8} in %0+3 = aten.slice.Tensor(%3, 0, 3, 5) {fwd}\n"
                  "  %5: f32[] = aten.sum(%4) {fwd}\n"
                  "  output(%5) {fwd name=\"loss\"}\n"),
            "  %3: f32[2,4]{1,8} in %0+3 = view(%0) {fwd}\n"
            "  %4: f32[] = aten.sum(%3) {fwd}\n"
            "  output(%4) {fwd name=\"loss\"}\n");
}

TEST(Canonicalize, WhatIsSavedForALaterRunStays) {
  const std::string head =
      "interlace 1 sharded\nstep 1 reduce_each\nrun forward 0\nrun backward 0\ninput %0: f32[4,8] \"x\"\n";
  const std::string backward = "phase backward takes () gives () loads (%2: f32[4,8] of h) {\n}\n";
  const std::string forward =
      "phase forward takes () gives () saves (%1 as h) {\n  %1: f32[4,8] = aten.neg(%0) {fwd}\n";
  EXPECT_EQ(RunText(head + forward + "  %3: f32[4,8] = aten.tanh(%1) {fwd}\n}\n" + backward, "canonicalize"),
            head + forward + "}\n" + backward);
}

TEST(Canonicalize, TransposedTwiceIsTheValueItself) {
  EXPECT_EQ(After("  %3: f32[8,4]{1,8} in %0+0 = aten.t(%0) {fwd}\n"
                  "  %4: f32[4,8] in %0+0 = aten.t(%3) {fwd}\n"
                  "  %5: f32[] = aten.sum(%4) {fwd}\n"
                  "  output(%5) {fwd name=\"loss\"}\n"),
            "  %3: f32[] = aten.sum(%0) {fwd}\n"
            "  output(%3) {fwd name=\"loss\"}\n");
}

TEST(Canonicalize, ResultsOfOneViewOpBecomeViewsOfTheirOwn) {
  EXPECT_EQ(After("  %3: f32[4,4]{8,1} in %2+0, %4: f32[4,4]{8,1} in %2+4 = aten.split.Tensor(%2, 4, 1) {fwd}\n"
                  "  %5: f32[] = aten.sum(%4) {fwd}\n"
                  "  output(%5) {fwd name=\"loss\"}\n"),
            "  %3: f32[4,4]{8,1} in %2+4 = view(%2) {fwd}\n"
            "  %4: f32[] = aten.sum(%3) {fwd}\n"
            "  output(%4) {fwd name=\"loss\"}\n");
}

TEST(Canonicalize, EqualOpsAreOneWithinAPart) {
  EXPECT_EQ(After("  %3: f32[4,8] = aten.tanh(%2) {fwd}\n"
                  "  %4: f32[4,8] = aten.tanh(%2) {fwd}\n"
                  "  %5: f32[4,8] = aten.add.Tensor(%3, %4) {fwd}\n"
                  "  %6: f32[] = aten.sum(%5) {fwd}\n"
                  "  output(%6) {fwd name=\"loss\"}\n"
                  "  %7: f32[4,8] = aten.tanh(%2) {bwd}\n"
                  "  grad(%0, %7) {bwd}\n"),
            "  %3: f32[4,8] = aten.tanh(%2) {fwd}\n"
            "  %4: f32[4,8] = aten.add.Tensor(%3, %3) {fwd}\n"
            "  %5: f32[] = aten.sum(%4) {fwd}\n"
            "  output(%5) {fwd name=\"loss\"}\n"
            "  %6: f32[4,8] = aten.tanh(%2) {bwd}\n"
            "  grad(%0, %6) {bwd}\n");
}

TEST(Canonicalize, AWriteBetweenKeepsEqualOpsApart) {
  std::string ops =
      "  %3: f32[4,8] = aten.tanh(%1) {fwd}\n"
      "  assign(%1, %3) {fwd}\n"
      "  %4: f32[4,8] = aten.tanh(%1) {fwd}\n"
      "  %5: f32[4,8] = aten.add.Tensor(%3, %4) {fwd}\n"
      "  %6: f32[] = aten.sum(%5) {fwd}\n"
      "  output(%6) {fwd name=\"loss\"}\n";
  EXPECT_NE(After(ops).find("%4: f32[4,8] = aten.tanh(%1)"), std::string::npos);
}

TEST(Canonicalize, RandomOpsAndOpsWithMutatedResultsAreNotMerged) {
  std::string ops =
      "  %3: f32[4,8] = aten.bernoulli.p(%2, 0.5) {fwd rng=1}\n"
      "  %4: f32[4,8] = aten.bernoulli.p(%2, 0.5) {fwd rng=1}\n"
      "  %5: f32[4,8] = aten.add.Tensor(%3, %4) {fwd}\n"
      "  %6: f32[4,8] = aten.zeros_like(%2) {fwd}\n"
      "  %7: f32[4,8] = aten.zeros_like(%2) {fwd}\n"
      "  %8: f32[4,8] in %6+0 = aten.add_.Tensor(%6, %5) {fwd writes=[%6]}\n"
      "  %9: f32[4,8] = aten.add.Tensor(%8, %7) {fwd}\n"
      "  %10: f32[] = aten.sum(%9) {fwd}\n"
      "  output(%10) {fwd name=\"loss\"}\n";
  EXPECT_EQ(RunText(With(ops), "canonicalize"), RunText(With(ops), ""));
}

TEST(Canonicalize, IdentitiesVanish) {
  for (const char* op : {"aten.clone(%2)", "aten.contiguous(%2)", "aten._to_copy(%2, dtype=f32)",
                         "aten.mul.Tensor(%2, 1.0)", "aten.div.Scalar(%2, 1)", "aten.sub.Tensor(%2, 0)"}) {
    EXPECT_EQ(After("  %3: f32[4,8] = " + std::string(op) + " {fwd}\n  %4: f32[] = aten.sum(%3) {fwd}\n" +
                    "  output(%4) {fwd name=\"loss\"}\n"),
              "  %3: f32[] = aten.sum(%2) {fwd}\n  output(%3) {fwd name=\"loss\"}\n")
        << op;
  }
}

TEST(Canonicalize, WhatOnlyLooksLikeAnIdentityStays) {
  // x + 0 turns -0 into +0; another dtype, other strides, another scalar; a copy of a part would keep the whole alive.
  for (const char* op : {"f32[4,8] = aten.add.Tensor(%2, 0)", "f32[4,8] = aten.mul.Tensor(%2, 2)",
                         "f32[4,8] = aten.mul.Tensor(%2, -1.0)", "f32[4,8]{1,4} = aten.clone(%2)",
                         "f64[4,8] = aten._to_copy(%2, dtype=f64)", "f32[4,8] = aten.sub.Tensor(%2, -0.0)",
                         "f32[4,8] = aten.clone(%2, memory_format=contiguous, device=\"cuda\")"}) {
    std::string ops =
        "  %3: " + std::string(op) + " {fwd}\n  %4: f32[] = aten.sum(%3) {fwd}\n  output(%4) {fwd name=\"loss\"}\n";
    EXPECT_EQ(RunText(With(ops), "canonicalize"), RunText(With(ops), "")) << op;
  }
  std::string part =
      "  %3: f32[2,8] in %2+0 = view(%2) {fwd}\n  %4: f32[2,8] = aten.clone(%3) {fwd}\n  %5: f32[] = aten.sum(%4) "
      "{fwd}\n"
      "  output(%5) {fwd name=\"loss\"}\n";
  EXPECT_EQ(RunText(With(part), "canonicalize"), RunText(With(part), ""));
}

TEST(Canonicalize, ACopyOfABufferThatChangesLaterStays) {
  std::string ops =
      "  %3: f32[4,8] = aten.clone(%1) {fwd}\n"
      "  assign(%1, %2) {fwd}\n"
      "  %4: f32[] = aten.sum(%3) {fwd}\n"
      "  output(%4) {fwd name=\"loss\"}\n";
  EXPECT_EQ(RunText(With(ops), "canonicalize"), RunText(With(ops), ""));
}

TEST(Canonicalize, ACopyThatIsAnOutputStays) {
  std::string ops = "  %3: f32[4,8] = aten.clone(%2) {fwd}\n  output(%3) {fwd name=\"copy\"}\n";
  EXPECT_EQ(RunText(With(ops), "canonicalize"), RunText(With(ops), ""));
}

TEST(Canonicalize, DeadOpsGoEvenRandomOnesButEffectsStay) {
  EXPECT_EQ(After("  %3: f32[4,8] = aten.bernoulli.p(%2, 0.5) {fwd rng=1}\n"
                  "  %4: f32[4,8] = aten.mul.Tensor(%3, %2) {fwd}\n"
                  "  %5: f32[4,8] in %1+0 = aten.add_.Tensor(%1, %2) {fwd writes=[%1]}\n"
                  "  %6: f32[4,8] = torchvision.thing(%2) {fwd}\n"),
            "  %3: f32[4,8] in %1+0 = aten.add_.Tensor(%1, %2) {fwd writes=[%1]}\n"
            "  %4: f32[4,8] = torchvision.thing(%2) {fwd}\n");
}

TEST(Canonicalize, WhatIsReadOfATensorWrittenInPartsIsThePart) {
  // Both halves of %2 are written, each is read, and so is what one of them was before the other was written.
  EXPECT_EQ(After("  %3: f32[4,4]{8,1} in %2+0 = aten.slice.Tensor(%2, 1, 0, 4) {fwd}\n"
                  "  %4: f32[4,4] = aten.sigmoid(%3) {fwd}\n"
                  "  %5: f32[4,8] = aten.as_strided_scatter(%2, %4, [4, 4], [8, 1], 0) {fwd}\n"
                  "  %6: f32[4,4]{8,1} in %5+4 = aten.slice.Tensor(%5, 1, 4, 8) {fwd}\n"
                  "  %7: f32[4,4] = aten.tanh(%6) {fwd}\n"
                  "  %8: f32[4,8] = aten.as_strided_scatter(%5, %7, [4, 4], [8, 1], 4) {fwd}\n"
                  "  %9: f32[4,4]{8,1} in %8+0 = aten.slice.Tensor(%8, 1, 0, 4) {fwd}\n"
                  "  %10: f32[4,4]{8,1} in %8+4 = aten.slice.Tensor(%8, 1, 4, 8) {fwd}\n"
                  "  %11: f32[4,4] = aten.mul.Tensor(%9, %10) {fwd}\n"
                  "  %12: f32[] = aten.sum(%11) {fwd}\n"
                  "  output(%12) {fwd name=\"loss\"}\n"),
            "  %3: f32[4,4]{8,1} in %2+0 = view(%2) {fwd}\n"
            "  %4: f32[4,4] = aten.sigmoid(%3) {fwd}\n"
            "  %5: f32[4,4]{8,1} in %2+4 = view(%2) {fwd}\n"
            "  %6: f32[4,4] = aten.tanh(%5) {fwd}\n"
            "  %7: f32[4,4] = aten.mul.Tensor(%4, %6) {fwd}\n"
            "  %8: f32[] = aten.sum(%7) {fwd}\n"
            "  output(%8) {fwd name=\"loss\"}\n");
}

TEST(Canonicalize, ATensorWrittenInPartsStaysWhereMoreIsRead) {
  const std::string write =
      "  %3: f32[4,4] = aten.ones([4, 4]) {fwd}\n"
      "  %4: f32[4,8] = aten.as_strided_scatter(%2, %3, [4, 4], [8, 1], 0) {fwd}\n";
  for (const std::string read : {"  %5: f32[] = aten.sum(%4) {fwd}\n",             // all of it
                                 "  %5: f32[4,2]{8,1} in %4+3 = view(%4) {fwd}\n"  // both sides of the border
                                 "  %6: f32[] = aten.sum(%5) {fwd}\n",
                                 "  %5: f32[2,4]{8,1} in %4+0 = view(%4) {fwd}\n"  // half of what was written
                                 "  %6: f32[] = aten.sum(%5) {fwd}\n",
                                 "  %5: f32[8]{4} in %4+0 = view(%4) {fwd}\n"  // no part of its shape
                                 "  %6: f32[] = aten.sum(%5) {fwd}\n"}) {
    const std::string last = read.substr(read.rfind("  %"), 4);
    const std::string ops = write + read + "  output(" + last.substr(2) + ") {fwd name=\"loss\"}\n";
    EXPECT_EQ(After(ops), ops);
  }
  // What was written is written over elsewhere: %1 is a buffer.
  const std::string assigned =
      "  %3: f32[4,4] = aten.ones([4, 4]) {fwd}\n"
      "  %4: f32[4,8] = aten.as_strided_scatter(%1, %3, [4, 4], [8, 1], 0) {fwd}\n"
      "  %5: f32[4,4]{8,1} in %4+4 = view(%4) {fwd}\n"
      "  assign(%1, %2) {fwd}\n"
      "  %6: f32[] = aten.sum(%5) {fwd}\n"
      "  output(%6) {fwd name=\"loss\"}\n";
  EXPECT_EQ(After(assigned), assigned);
}

}  // namespace
}  // namespace interlace
