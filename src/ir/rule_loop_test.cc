// The text of a form's loop; that it computes what it says is compared in tests/python/test_rule_loops.py.
#include "ir/rule_loop.h"

#include <gtest/gtest.h>

#include <string>

#include "base/digest.h"
#include "ir/text.h"

namespace interlace {
namespace {

constexpr char kTwoForms[] = R"(interlace 1 captured
rule 0 "R" (mean, double) {
  form {
    mean = copy(n0)
    w = add(w, g, n1)
  }
  form {
    g = add(g, w, n0)
    mean = lerp(mean, g, n1)
    double = mul(double, n2)
    double = addcmul(double, g, g, n3)
    t0 = sqrt(double)
    t1 = where(t0, mean, n4)
    w = addcdiv(w, t1, t0, n5)
  }
}
)";

RuleForm FormOf(int form) {
  Result<Program> program = Parse(kTwoForms);
  EXPECT_TRUE(program.ok()) << program.error().ToString();
  return program->rules[0].forms[form];
}

// States have other names, for theirs may be words of C++; the gradient is changed in a copy.
TEST(RuleLoop, IsTheFormsOwnLinesOverElements) {
  const RuleLoopText loop = LoopOf(FormOf(1), 2, DType::kBF16);
  const std::string body = R"((char* const* flats, const double* numbers, double scale, long begin, long end) {
  typedef float F;
  bf16* __restrict const p0 = (bf16*)flats[0];
  bf16* __restrict const p1 = (bf16*)flats[1];
  bf16* __restrict const p2 = (bf16*)flats[2];
  bf16* __restrict const p3 = (bf16*)flats[3];
  const F s = (F)scale;
  const F n0 = (F)numbers[0];
  const F n1 = (F)numbers[1];
  const F n2 = (F)numbers[2];
  const F n3 = (F)numbers[3];
  const F n4 = (F)numbers[4];
  const F n5 = (F)numbers[5];
  const weight<F> c1(n1);
#pragma GCC ivdep
  for (long i = begin; i < end; ++i) {
    F w = F(p0[i]), g = F(p1[i]) * s, s0 = F(p2[i]), s1 = F(p3[i]), t0, t1;
    g = add(g, w, n0);
    s0 = lerp(s0, g, c1);
    s1 = mul(s1, n2);
    s1 = addcmul(s1, g, g, n3);
    t0 = sqrt(s1);
    t1 = where(t0, s0, n4);
    w = addcdiv(w, t1, t0, n5);
    p0[i] = bf16(w);
    p2[i] = bf16(s0);
    p3[i] = bf16(s1);
  }
}
)";
  EXPECT_EQ(loop.text, "extern \"C\" void " + loop.name + body);
  EXPECT_EQ(loop.name, "rule_" + Digest(body).substr(0, 16));
}

// What is written alone is read for its sake.
TEST(RuleLoop, ReadsAndWritesNoMoreThanItHasTo) {
  const std::string text = LoopOf(FormOf(0), 2, DType::kF64).text;
  EXPECT_NE(text.find("    F w = F(p0[i]), g = F(p1[i]) * s, s0, s1;\n"), std::string::npos) << text;
  const std::string writes = "    p0[i] = double(w);\n    p2[i] = double(over(F(p2[i]), s0, none));\n  }\n";
  EXPECT_NE(text.find(writes), std::string::npos) << text;
  EXPECT_EQ(text.find("p3"), std::string::npos) << text;
}

TEST(RuleLoop, EachDtypeAndFormHasAFunctionOfItsOwn) {
  EXPECT_EQ(LoopOf(FormOf(0), 2, DType::kF32).name, LoopOf(FormOf(0), 2, DType::kF32).name);
  EXPECT_NE(LoopOf(FormOf(0), 2, DType::kF32).name, LoopOf(FormOf(0), 2, DType::kF16).name);
  EXPECT_NE(LoopOf(FormOf(0), 2, DType::kF32).name, LoopOf(FormOf(1), 2, DType::kF32).name);
}

// Two units and two groups with one rule, of which one is stepped on the host.
TEST(RuleLoop, AProgramHasThoseOfItsUpdates) {
  const auto count = [](const std::string& text) {
    int found = 0;
    for (size_t at = text.find("extern"); at != std::string::npos; at = text.find("extern", at + 1)) ++found;
    return found;
  };
  std::string text = kTwoForms;
  text.replace(text.find("captured"), 8, "sharded");
  text.insert(text.find("rule 0"), "mesh dp 1\n");
  text += R"(group 0 rule 0
group 1 rule 0
unit u0 dp f32 numel 64 shard 64
unit u1 dp bf16 numel 64 shard 64
phase update once takes (%0: f32[64], %1: bf16[64]) gives () {
  update.rule(%0, %0, %0, %0) {upd units=[u0] rule="R" states=[mean, double] scale=1.0 ranges=[0, 32, 0, 32, 64, 1]}
  update.rule(%1, %1, %1, %1) {upd lane=host units=[u1] rule="R" states=[mean, double] scale=1.0 ranges=[0, 64, 0]}
}
)";
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(count(RuleLoopsOf(*program)), 4);
  const std::string on_host = RuleLoopsOf(*program, /*on_host=*/true);
  EXPECT_EQ(count(on_host), 2);
  EXPECT_EQ(on_host.find("(float*)"), std::string::npos);
  EXPECT_EQ(RuleLoopsOf(Program()), "");
}

}  // namespace
}  // namespace interlace
