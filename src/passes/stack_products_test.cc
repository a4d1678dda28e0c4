#include "passes/pass_test_support.h"

namespace interlace {
namespace {

// The gradient of %0 as a sum over steps of two rows of inputs %1 and %2.
std::string Sum(const std::vector<std::string>& ops) {
  std::string text =
      "interlace 1 captured\nstep 1 reduce_each\nparam %0: f32[16,8] \"w\" trainable\ninput %1: f32[6,16] \"x\"\n"
      "input %2: f32[6,8] \"y\"\nphase micro_batch takes () gives () {\n";
  for (const std::string& op : ops) text += "  " + op + " {bwd}\n";
  return text + "}\n";
}

const std::vector<std::string> kProducts = {
    "%3: f32[16,2]{1,16} in %1+0 = view(%1)",  "%4: f32[2,8] in %2+0 = view(%2)",   "%5: f32[16,8] = aten.mm(%3, %4)",
    "%6: f32[16,2]{1,16} in %1+32 = view(%1)", "%7: f32[2,8] in %2+16 = view(%2)",  "%8: f32[16,8] = aten.mm(%6, %7)",
    "%9: f32[16,2]{1,16} in %1+64 = view(%1)", "%10: f32[2,8] in %2+32 = view(%2)", "%11: f32[16,8] = aten.mm(%9, %10)",
};

std::vector<std::string> With(std::vector<std::string> more) {
  std::vector<std::string> ops = kProducts;
  ops.insert(ops.end(), more.begin(), more.end());
  return ops;
}

std::string Stacked(const std::vector<std::string>& ops, const std::string& least = "3") {
  return RunText(Sum(ops), "stack_products(least=" + least + "),canonicalize");
}

TEST(StackProducts, ASumOfProductsIsOneOfAllRows) {
  EXPECT_EQ(
      Stacked(With(
          {"%12: f32[16,8] = aten.add.Tensor(%5, %8)", "%13: f32[16,8] = aten.add.Tensor(%12, %11)", "grad(%0, %13)"})),
      Sum({"%3: f32[2,8] in %2+0 = view(%2)", "%4: f32[2,8] in %2+16 = view(%2)", "%5: f32[2,8] in %2+32 = view(%2)",
           "%6: f32[2,16] in %1+64 = view(%1)", "%7: f32[2,16] in %1+0 = view(%1)", "%8: f32[2,16] in %1+32 = view(%1)",
           "%9: f32[6,16] = aten.cat([%6, %7, %8], 0)", "%10: f32[6,8] = aten.cat([%5, %3, %4], 0)",
           "%11: f32[16,6]{1,16} in %9+0 = view(%9)", "%12: f32[16,8] = aten.mm(%11, %10)", "grad(%0, %12)"}));
}

TEST(StackProducts, WhatElseIsAddedStaysSo) {
  const std::string text = Stacked(With(
      {"%12: f32[16,8] = aten.mul.Tensor(%0, 0.5)", "%13: f32[16,8] = aten.add.Tensor(%5, %12)",
       "%14: f32[16,8] = aten.add.Tensor(%13, %8)", "%15: f32[16,8] = aten.add.Tensor(%11, %14)", "grad(%0, %15)"}));
  EXPECT_NE(text.find("%13: f32[16,8] = aten.mm(%12, %11) {bwd}\n  %14: f32[16,8] = aten.add.Tensor(%13, %6) {bwd}\n"),
            std::string::npos)
      << text;
}

TEST(StackProducts, WhatIsReadByItselfAndFewProductsStay) {
  const std::vector<std::string> sum = {"%12: f32[16,8] = aten.add.Tensor(%5, %8)",
                                        "%13: f32[16,8] = aten.add.Tensor(%12, %11)"};
  std::vector<std::string> read = sum, few = sum;
  read.push_back("%14: f32[16,8] = aten.add.Tensor(%13, %8)");  // %8 twice: by two ops
  read.push_back("grad(%0, %14)");
  few.push_back("grad(%0, %13)");
  EXPECT_EQ(Stacked(With(read)), Sum(With(read)));
  EXPECT_EQ(Stacked(With(few), "4"), Sum(With(few)));
}

TEST(StackProducts, ManyRowsStay) {
  // 2 k (m + n) = 24 k numbers to write once more, 3 m n = 96 for an addition: up to four rows.
  for (const int rows : {4, 5}) {
    const std::string k = std::to_string(rows), in = std::to_string(8 * rows), in2 = std::to_string(4 * rows);
    std::string text = "interlace 1 captured\nstep 1 reduce_each\nparam %0: f32[8,4] \"w\" trainable\ninput %1: f32[" +
                       std::to_string(2 * rows) + ",8] \"x\"\ninput %2: f32[" + std::to_string(2 * rows) +
                       ",4] \"y\"\nphase micro_batch takes () gives () {\n"
                       "  %3: f32[8," +
                       k + "]{1,8} in %1+0 = view(%1) {bwd}\n  %4: f32[" + k +
                       ",4] in %2+0 = view(%2) {bwd}\n"
                       "  %5: f32[8,4] = aten.mm(%3, %4) {bwd}\n"
                       "  %6: f32[8," +
                       k + "]{1,8} in %1+" + in + " = view(%1) {bwd}\n  %7: f32[" + k + ",4] in %2+" + in2 +
                       " = view(%2) {bwd}\n  %8: f32[8,4] = aten.mm(%6, %7) {bwd}\n"
                       "  %9: f32[8,4] = aten.add.Tensor(%5, %8) {bwd}\n  grad(%0, %9) {bwd}\n}\n";
    EXPECT_EQ(RunText(text, "stack_products(least=2)") == text, rows == 5);
  }
}

}  // namespace
}  // namespace interlace
