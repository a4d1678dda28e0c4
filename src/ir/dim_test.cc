#include "ir/dim.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace interlace {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::string Canonical(std::string_view text) {
  DimTable table;
  Result<Dim> dim = table.Parse(text);
  return dim.ok() ? table.ToString(*dim) : dim.error().message;
}

TEST(Dim, CanonicalForm) {
  EXPECT_EQ(Canonical("s*2+b*s"), "b*s+2*s");
  EXPECT_EQ(Canonical("b*s+2*s"), "b*s+2*s");
  EXPECT_EQ(Canonical("1+b-1"), "b");
  EXPECT_EQ(Canonical("b-b"), "0");
  EXPECT_EQ(Canonical("(b+1)*(b-1)"), "b*b-1");
  EXPECT_EQ(Canonical("-b+3"), "-b+3");
  EXPECT_EQ(Canonical("-2*(s//2)+s//2"), "-(s//2)");
  EXPECT_EQ(Canonical("(s//2)//3"), "(s//2)//3");
  EXPECT_EQ(Canonical("(4*s+8)//4"), "s+2");
  EXPECT_EQ(Canonical("(4*s+8)%4"), "0");
  EXPECT_EQ(Canonical("b*((s+1)%4)"), "((s+1)%4)*b");
  EXPECT_EQ(Canonical("max(s,b)+max(b,s)"), "2*max(b,s)");
  EXPECT_EQ(Canonical("min(3,4)"), "3");
  EXPECT_EQ(Canonical("-7//2"), "-4");
  EXPECT_EQ(Canonical("-7%4"), "1");
  EXPECT_EQ(Canonical("512*rank_dp"), "512*rank_dp");
}

TEST(Dim, Errors) {
  EXPECT_EQ(Canonical(""), "the expression ends too early");
  EXPECT_EQ(Canonical("b+"), "the expression ends too early");
  EXPECT_EQ(Canonical("b/2"), "use '//' for division in an expression");
  EXPECT_EQ(Canonical("b//0"), "division by zero");
  EXPECT_EQ(Canonical("b%(1-1)"), "division by zero");
  EXPECT_EQ(Canonical("b $"), "unexpected ' ' in an expression");
  EXPECT_EQ(Canonical("9223372036854775808"), "this integer does not fit in 64 bits");
  const std::string too_long = "the expression overflows 64 bits or is longer than 1024 characters";
  EXPECT_EQ(Canonical("9223372036854775807+1"), too_long);
  EXPECT_EQ(Canonical("9223372036854775807*b+b"), too_long);
  EXPECT_EQ(Canonical("4611686018427387904*b*2"), too_long);
  EXPECT_EQ(Canonical("-9223372036854775808//-1"), too_long);
  EXPECT_EQ(Canonical(std::string(100, '(') + "b" + std::string(100, ')')), "the expression is nested deeper than 64");
  EXPECT_EQ(Canonical(std::string(100, '-') + "b"), "the expression is nested deeper than 64");
  std::string product = "(a+b+c+d+e+f+g+h)";
  EXPECT_EQ(Canonical(product + "*" + product + "*" + product + "*" + product), too_long);
  EXPECT_EQ(Canonical("a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a"), too_long);
}

TEST(Dim, ArithmeticSaturatesInsteadOfFailing) {
  DimTable table;
  EXPECT_EQ(table.Mul(kMax, 2), Dim(kMax));
  EXPECT_EQ(table.Add(kMax, 1), Dim(kMax));
  EXPECT_FALSE(table.CheckedMul(kMax, 2).ok());
  EXPECT_EQ(table.Add(table.Symbol("b"), 0), table.Symbol("b"));
}

TEST(Dim, Evaluate) {
  DimTable table;
  auto eval = [&](std::string_view text, const Binding& binding) {
    Result<int64_t> value = table.Evaluate(*table.Parse(text), binding);
    return value.ok() ? std::to_string(*value) : value.error().message;
  };
  EXPECT_EQ(eval("b*s+2*s", {{"b", 4}, {"s", 128}}), "768");
  EXPECT_EQ(eval("(b+3)//4*max(b,10)-b%2", {{"b", 5}}), "19");
  EXPECT_EQ(eval("b*s", {{"b", 4}}), "symbol 's' has no value; bind it first");
  EXPECT_EQ(eval("b*s", {{"b", kMax}, {"s", 2}}), "'b*s' overflows 64 bits under this binding");
  EXPECT_EQ(eval("4//b", {{"b", 0}}), "'4//b' divides by zero under this binding");
}

// Random expressions: canonical text reads back to itself, and substitution agrees with evaluation.
TEST(Dim, RandomExpressions) {
  std::mt19937_64 random(7);
  const char* atoms[] = {"a", "b", "c", "2", "3", "7"};
  for (int round = 0; round < 400; ++round) {
    std::string text = atoms[random() % 6];
    int length = static_cast<int>(random() % 6);
    for (int i = 0; i < length; ++i) {
      const char* ops[] = {"+", "-", "*", "//", "%"};
      size_t op = random() % 7;
      std::string right = atoms[random() % 6];
      if (op < 5) {
        text = "(" + text + ")" + ops[op] + right;
      } else {
        text = (op == 5 ? "max(" : "min(") + text + "," + right + ")";
      }
    }
    DimTable table;
    Result<Dim> dim = table.Parse(text);
    ASSERT_TRUE(dim.ok()) << text << ": " << dim.error().message;
    std::string canonical = table.ToString(*dim);
    DimTable fresh;
    Result<Dim> again = fresh.Parse(canonical);
    ASSERT_TRUE(again.ok()) << canonical;
    EXPECT_EQ(fresh.ToString(*again), canonical) << text;
    Binding all = {{"a", 5}, {"b", 11}, {"c", 4}};
    Result<int64_t> direct = table.Evaluate(*dim, all);
    Result<Dim> part = table.Substitute(*dim, {{"b", 11}});
    if (!direct.ok() || !part.ok()) {
      EXPECT_NE((direct.ok() ? part.error() : direct.error()).message.find("zero"), std::string::npos) << text;
      continue;
    }
    EXPECT_EQ(*table.Evaluate(*part, all), *direct) << text;
    for (const std::string& name : table.SymbolsOf(*part)) EXPECT_NE(name, "b") << text;
  }
}

}  // namespace
}  // namespace interlace
