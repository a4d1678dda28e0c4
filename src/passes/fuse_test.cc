#include <gtest/gtest.h>

#include "passes/pass_test_support.h"

namespace interlace {
namespace {

std::string Program1(const std::string& ops) {
  return "interlace 1 captured\nstep 1 reduce_each\ngroup 0 sgd\nmodule 0 \"\" \"Net\"\nmodule 1 \"a\" \"Layer\"\n"
         "param %0: f32[4,4] \"w\" trainable group 0\ninput %1: f32[2,4] \"x\"\nphase micro_batch takes () gives () "
         "{\n" +
         ops + "}\n";
}

std::string Fused(const std::string& ops, const std::string& pipeline = "fuse") {
  const std::string text = RunText(Program1(ops), pipeline);
  const size_t at = text.find("\"x\"\n");
  return at == std::string::npos ? text : text.substr(at + 4);
}

TEST(Fuse, RegionsLieBetweenProducts) {
  EXPECT_EQ(Fused(R"(  %2: f32[2,4] = aten.mm(%1, %0) {fwd m1}
  %3: f32[2,4] = aten.silu(%2) {fwd m1}
  %4: f32[2,4] = aten.mul.Tensor(%3, %2) {fwd m1}
  %5: f32[2,4] = aten.mm(%4, %0) {fwd m1}
  %6: f32[2,4] = aten.silu(%5) {fwd m1}
  %7: f32[2,4] = aten.mul.Tensor(%6, %5) {fwd m1}
  output(%7) {fwd name="y"}
)"),
            R"(func f0(%0: f32[2,4]) gives (%2) {
  %1: f32[2,4] = aten.silu(%0)
  %2: f32[2,4] = aten.mul.Tensor(%1, %0)
}
phase micro_batch takes () gives () {
  %2: f32[2,4] = aten.mm(%1, %0) {fwd m1}
  %3: f32[2,4] = call f0(%2) {fwd m1}
  %4: f32[2,4] = aten.mm(%3, %0) {fwd m1}
  %5: f32[2,4] = call f0(%4) {fwd m1}
  output(%5) {fwd name="y"}
}
)");
}

// What the backward part alone needs was captured in the middle of the forward part, and would be kept from there.
TEST(Fuse, BackwardOpsSinkToTheirUsers) {
  EXPECT_EQ(Fused(R"(  %2: f32[2,4] = aten.mm(%1, %0) {fwd}
  %3: f32[2,4] = aten.exp(%2) {fwd}
  %4: f32[2,4] = aten.mul.Tensor(%2, 2.0) {bwd}
  %5: f32[2,4] = aten.neg(%3) {fwd}
  %6: f32[2,4] = aten.mm(%5, %0) {fwd}
  %7: f32[2,4] = aten.mul.Tensor(%4, %6) {bwd}
  output(%7) {bwd name="y"}
)"),
            R"(func f0(%0: f32[2,4]) gives (%2) {
  %1: f32[2,4] = aten.exp(%0)
  %2: f32[2,4] = aten.neg(%1)
}
func f1(%0: f32[2,4], %1: f32[2,4]) gives (%3) {
  %2: f32[2,4] = aten.mul.Tensor(%0, 2.0)
  %3: f32[2,4] = aten.mul.Tensor(%2, %1)
}
phase micro_batch takes () gives () {
  %2: f32[2,4] = aten.mm(%1, %0) {fwd}
  %3: f32[2,4] = call f0(%2) {fwd}
  %4: f32[2,4] = aten.mm(%3, %0) {fwd}
  %5: f32[2,4] = call f1(%2, %4) {bwd}
  output(%5) {bwd name="y"}
}
)");
}

// A view of what a region makes is made inside where it is read there, and outside where it is read there.
TEST(Fuse, ViewsAreReplayed) {
  EXPECT_EQ(Fused(R"(  %2: f32[2,4] = aten.exp(%1) {fwd}
  %3: f32[4,2]{1,4} in %2+0 = view(%2) {fwd}
  %4: f32[4,2]{1,4} = aten.neg(%3) {fwd}
  %5: f32[4,4] = aten.mm(%4, %2) {fwd}
  %6: f32[4,4] = aten.mm(%3, %2) {fwd}
  output(%5) {fwd name="y"}
  output(%6) {fwd name="z"}
)"),
            R"(func f0(%0: f32[2,4]) gives (%1, %3) {
  %1: f32[2,4] = aten.exp(%0)
  %2: f32[4,2]{1,4} in %1+0 = view(%1)
  %3: f32[4,2]{1,4} = aten.neg(%2)
}
phase micro_batch takes () gives () {
  %2: f32[2,4], %3: f32[4,2]{1,4} = call f0(%1) {fwd}
  %4: f32[4,2]{1,4} in %2+0 = view(%2) {fwd}
  %5: f32[4,4] = aten.mm(%3, %2) {fwd}
  %6: f32[4,4] = aten.mm(%4, %2) {fwd}
  output(%5) {fwd name="y"}
  output(%6) {fwd name="z"}
}
)");
}

TEST(Fuse, WhatStaysOutside) {
  const std::string draws = R"(  %2: f32[2,4] = aten.bernoulli.p(%1, 0.5) {fwd rng=1}
  %3: f32[2,4] = aten.neg(%2) {fwd}
  output(%3) {fwd name="y"}
)";
  EXPECT_EQ(Fused(draws), "phase micro_batch takes () gives () {\n" + draws + "}\n");  // one op is no region
  EXPECT_NE(Fused(draws, "fuse(min=1)").find("call f0(%2)"), std::string::npos);
  const std::string in_module = R"(  %2: f32[2,4] = aten.exp(%1) {fwd m1}
  %3: f32[2,4] = aten.neg(%2) {fwd m1}
  output(%3) {fwd name="y"}
)";
  EXPECT_NE(Fused(in_module, "fuse(modules=a)").find("call f0(%1) {fwd m1}"), std::string::npos);
  EXPECT_EQ(Fused(in_module, "fuse(modules=b)"), "phase micro_batch takes () gives () {\n" + in_module + "}\n");
  EXPECT_EQ(RunText(Program1(in_module), "fuse,fuse"), RunText(Program1(in_module), "fuse"));  // nothing is left
}

}  // namespace
}  // namespace interlace
