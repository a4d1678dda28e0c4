// What the parser says about bad files: tests/golden/ir_parse_errors.txt; and that no input, however mangled, harms it.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "ir/testing/evaluate_rule.h"
#include "ir/testing/golden.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace {
namespace {

constexpr char kBase[] = R"(interlace 1 sharded
meta model "net"
mesh dp 2
symbol batch 2 64
step 1 reduce_each
group 0 adamw
module 0 "" "Net"
source 0 "net.py:1"
unit u0 dp f32 numel 64 shard 32
param %0: f32[4,8] "w" trainable group 0 unit u0+0 alias "v"
buffer %1: f32[4] "stats" persistent
input %2: f32[batch,8] "x"
const %3: f32[2] "c" = [1.0, 2]
state %4: f32[32] u0.shard persistent
phase micro_batch takes (%5: f32[8]) gives (%9) {
  %8: f32[batch,8] = aten.add.Tensor(%2, 1.5, alpha=2*batch) {fwd m0 s0}
  %9: f32[8], _ = aten.pair(%5, [%8, none], "text") {bwd lane=gather units=[u0] rng=3 writes=[%1] x=y}
}
)";

struct Case {
  const char* what;
  std::string text;
};

// The base with one replacement.
std::string With(const std::string& from, const std::string& to) {
  std::string text = kBase;
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

constexpr char kRule[] = R"(rule 0 "R" (sum) {
  form {
    sum = mul(sum, n1)
    t0 = sqrt(sum)
    w = add(w, g, n0)
  }
}
group 0 rule 0)";

// The base with a rule, with one replacement.
std::string WithRule(const std::string& from, const std::string& to) {
  std::string text = With("group 0 adamw", kRule);
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

std::vector<Case> Cases() {
  std::string base = kBase;
  return {
      {"empty", ""},
      {"only a comment", "# nothing here\n\n"},
      {"another kind of file", "{\"model\": 1}\n"},
      {"binary", std::string("\x7f\x45LF\x02\x01\0\0", 8)},
      {"newer version", With("interlace 1", "interlace 2")},
      {"version 0", With("interlace 1", "interlace 0")},
      {"unknown level", With("1 sharded", "1 shraded")},
      {"unknown line", With("buffer %1", "bufer %1")},
      {"cut inside a phase", base.substr(0, base.find("  %9"))},
      {"cut inside an op", base.substr(0, base.find(", alpha"))},
      {"cut inside a declaration", base.substr(0, base.find(" \"stats\""))},
      {"cut inside a string", base.substr(0, base.find("ts\" pers"))},
      {"closing brace lost", With("x=y}\n}\n", "x=y}\nphase update once takes () gives () {\n}\n")},
      {"line after the end", base + "}\n"},
      {"value id that is no number", With("%9: f32[8]", "%x: f32[8]")},
      {"value id too large for the file", With("%9: f32[8]", "%123456789: f32[8]")},
      {"value id beyond 64 bits", With("%9: f32[8]", "%99999999999999999999: f32[8]")},
      {"value defined twice", With("%9: f32[8]", "%8: f32[8]")},
      {"value never defined", With("[%8, none]", "[%77, none]")},
      {"place of a value never defined", With("%5: f32[8]", "%5: f32[8] in %55+0")},
      {"value placed in itself", With("%5: f32[8]", "%5: f32[8] in %5+0")},
      {"unknown dtype", With("f32[4,8]", "fp32[4,8]")},
      {"unknown symbol", With("f32[batch,8] \"x\"", "f32[bacth,8] \"x\"")},
      {"unknown rank symbol", With("%5: f32[8]", "%5: f32[8] in %4+rank_tp")},
      {"negative size", With("f32[4,8]", "f32[4,-8]")},
      {"size that overflows", With("f32[4,8]", "f32[4611686018427387904,8]")},
      {"symbolic size that overflows", With("f32[batch,8]", "f32[4611686018427387904,batch]")},
      {"strides that overflow", With("f32[4,8]", "f32[4,8]{9223372036854775807,1}")},
      {"too few strides", With("f32[4,8]", "f32[4,8]{8}")},
      {"expression that divides by zero", With("alpha=2*batch", "alpha=batch//0")},
      {"expression nested too deep",
       With("alpha=2*batch", "alpha=" + std::string(200, '(') + "batch" + std::string(200, ')'))},
      {"lists nested too deep", With("[%8, none]", std::string(100, '[') + "1" + std::string(100, ']'))},
      {"number that is none", With("1.5", "1.5.5")},
      {"number beyond a double", With("1.5", "1.5e999")},
      {"unknown tag", With("{fwd m0", "{fdw m0")},
      {"two parts", With("{fwd m0", "{fwd bwd m0")},
      {"module not declared", With("{fwd m0", "{fwd m4")},
      {"source not declared", With("m0 s0", "m0 s9")},
      {"unit not declared", With("units=[u0]", "units=[u3]")},
      {"unknown lane", With("lane=gather", "lane=gahter")},
      {"attribute twice", With("x=y", "x=y x=z")},
      {"positional after named", With("1.5, alpha=2*batch", "alpha=1.5, 3")},
      {"missing comma", With("%2, 1.5", "%2 1.5")},
      {"missing parenthesis", With("2*batch) {fwd", "2*batch {fwd")},
      {"no op", With("= aten.pair(", "= (")},
      {"rubbish after an op", With("{fwd m0 s0}", "{fwd m0 s0} and more")},
      {"unknown escape", With("\"text\"", "\"te\\qxt\"")},
      {"axis twice", With("mesh dp 2", "mesh dp 2\nmesh dp 3")},
      {"stage along no axis", With("mesh dp 2", "mesh dp 2\nstage pp 0")},
      {"stage beyond the axis", With("mesh dp 2", "mesh dp 2\nstage dp 2")},
      {"two stages", With("mesh dp 2", "mesh dp 2\nstage dp 0\nstage dp 1")},
      {"axis of size 0", With("mesh dp 2", "mesh dp 0")},
      {"unit along no axis", With("unit u0 dp", "unit u0 pd")},
      {"saved under no name", With("gives (%9) {", "gives (%9) saves (%9) {")},
      {"saved without a value", With("gives (%9) {", "gives (%9) saves (c as %9) {")},
      {"loaded without a type", With("gives (%9) {", "gives (%9) loads (%7 of c) {")},
      {"loads before saves", With("gives (%9) {", "gives (%9) loads (%7: f32[8] of c) saves (%9 as c) {")},
      {"cut over no axis", With("unit u0+0", "unit u0+0 cut tp 0")},
      {"cut along no dimension", With("unit u0+0", "unit u0+0 cut dp")},
      {"cut of one block", With("unit u0+0", "unit u0+0 cut dp 0 blocks 1")},
      {"unit ids out of order", With("unit u0 dp", "unit u1 dp")},
      {"symbol with a reserved name", With("symbol batch", "symbol none")},
      {"symbol named like a dtype", With("symbol batch", "symbol f32")},
      {"symbol range upside down", With("2 64", "64 2")},
      {"unknown optimizer", With("group 0 adamw", "group 0 adamv")},
      {"group of no rule", With("group 0 adamw", "group 0 rule 0")},
      {"orthogonal matrices without steps", WithRule("group 0 rule 0", "group 0 rule 0 orthogonal apply 0 by 1 1 1")},
      {"orthogonal matrices by two coefficients",
       WithRule("group 0 rule 0", "group 0 rule 0 orthogonal apply 0 steps 5 by 1 2 eps 1e-07 ratio none")},
      {"orthogonal matrices of an unknown ratio",
       WithRule("group 0 rule 0", "group 0 rule 0 orthogonal apply 0 steps 5 by 1 2 3 eps 1e-07 ratio no")},
      {"averages without a group to apply them",
       WithRule("group 0 rule 0", "group 0 rule 0 factored average 0 eps 1 1 clip 1")},
      {"averages with one least value",
       WithRule("group 0 rule 0", "group 0 rule 0 factored average 0 apply 0 eps 1 clip 1")},
      {"rule without a form", With("group 0 adamw", "rule 0 \"R\" (sum) {\n}")},
      {"rule with an unknown op", WithRule("  w = add(w, g, n0)", "  w = ad(w, g, n0)")},
      {"rule with an unknown state", WithRule("sum = mul(sum, n1)", "smu = mul(sum, n1)")},
      {"rule that writes a number", WithRule("sum = mul", "n0 = mul")},
      {"rule with a number for memory", WithRule("sqrt(sum)", "sqrt(n2)")},
      {"rule with memory for a number", WithRule("add(w, g, n0)", "add(w, g, t0)")},
      {"rule that reads what nobody wrote", WithRule("w = add(w, g, n0)", "w = add(w, t1, n0)")},
      {"rule with too many registers", WithRule("t0 = sqrt", "t77 = sqrt")},
      {"rule whose state has a reserved name", WithRule("(sum)", "(n1)")},
      {"rule with a state twice", WithRule("(sum)", "(sum, sum)")},
      {"rule that does not end", base.substr(0, base.find("group")) + "rule 0 \"R\" (sum) {\n  form {\n"},
      {"unknown accumulation mode", With("reduce_each", "reduce_eahc")},
      {"group not declared", With("trainable group 0", "trainable group 2")},
      {"phase twice", base + "phase micro_batch takes () gives () {\n}\n"},
      {"constant without a list", With("= [1.0, 2]", "= 1.0")},
      {"state without a role", With("u0.shard persistent", "u0. persistent")},
      {"trainable or frozen missing", With("trainable group", "group")},
  };
}

TEST(Parse, BaseRoundTrips) {
  Result<Program> program = Parse(kBase);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(Print(*program), kBase);
}

TEST(Parse, RuleRoundTrips) {
  const std::string text = With("group 0 adamw", kRule);
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(Print(*program), text);
  ASSERT_EQ(program->rules.size(), 1u);
  EXPECT_EQ(program->rules[0].RowSize(), 3u);
  EXPECT_EQ(program->rules[0].forms[0].registers, 4);
  std::vector<double> registers = {1, 2, 16, 0};
  EvaluateRule(program->rules[0].forms[0], std::vector<double>{-0.5, 0.25}, registers);
  EXPECT_EQ(registers, (std::vector<double>{0, 2, 4, 2}));
}

TEST(Parse, Messages) {
  std::string text;
  for (const Case& test : Cases()) {
    Result<Program> program = Parse(test.text, "net.il");
    ASSERT_FALSE(program.ok()) << test.what;
    text += "== " + std::string(test.what) + "\n" + program.error().ToString() + "\n";
  }
  testing::ExpectGolden("ir_parse_errors.txt", text);
}

TEST(Parse, LayoutIsFree) {
  std::string text = kBase;
  std::string loose;
  for (char c : text) loose += c == '\n' ? " # why not\r\n\n" : std::string(1, c);
  loose = "# first\n\n" + loose;
  for (size_t at = 0; (at = loose.find(", ", at)) != std::string::npos; ++at) loose.replace(at, 2, " ,\t");
  Result<Program> program = Parse(loose);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(Print(*program), kBase);
}

TEST(Parse, NumbersRoundTrip) {
  std::string text = "interlace 1 captured\nstep 1 reduce_each\nphase micro_batch takes () gives () {\n  aten.x(";
  const char* numbers[] = {"0.1",
                           "1e+300",
                           "-2.5",
                           "inf",
                           "-inf",
                           "nan",
                           "5e-324",
                           "1.0",
                           "-0.0",
                           "9223372036854775807",
                           "-9223372036854775808",
                           "true",
                           "none",
                           "f32",
                           "channels_last",
                           "\"q\\\"\\\\\\x07\xc3\xa9\""};
  for (const char* number : numbers) text += std::string(number) + (number == numbers[15] ? "" : ", ");
  text += ")\n}\n";
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  EXPECT_EQ(Print(*program), text);
  EXPECT_EQ(program->op(0).args[4].real, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(program->op(0).args[15].text, "q\"\\\x07\xc3\xa9");
}

// Whatever the parser accepts prints to something it accepts again, and the verifier survives it.
void Feed(const std::string& text, int& accepted) {
  Result<Program> program = Parse(text);
  if (!program.ok()) {
    EXPECT_LT(program.error().message.size(), 2000u);
    return;
  }
  ++accepted;
  std::string printed = Print(*program);
  Result<Program> again = Parse(printed);
  ASSERT_TRUE(again.ok()) << again.error().ToString() << "\n" << text;
  EXPECT_EQ(Print(*again), printed);
  (void)VerifyAll(*program);
  program->Compact();
  Result<Program> compact = Parse(Print(*program));
  EXPECT_TRUE(compact.ok()) << compact.error().ToString();
}

TEST(Parse, MutatedFiles) {
  std::mt19937_64 random(11);
  std::vector<std::string> seeds = {kBase};
  for (uint64_t seed = 1; seed <= 3; ++seed)
    seeds.push_back(Print(testing::RandomProgram({.seed = seed, .layers = 2})));
  const std::vector<std::string> pieces = {
      "%",  "%0", "[",           "]",  "(",      ")",     "{",  "}",    ",",  "=", ":",        "in ", "into ", "_",
      "\"", "-",  "99999999999", "u0", "phase ", "batch", "//", "max(", "\n", " ", "\x00\xff", "1e9", "f32["};
  int accepted = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text = seeds[random() % seeds.size()];
    int edits = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < edits; ++i) {
      size_t at = random() % text.size();
      size_t length = random() % 6;
      switch (random() % 5) {
        case 0:
          text.erase(at, length + 1);
          break;
        case 1:
          text.insert(at, pieces[random() % pieces.size()]);
          break;
        case 2:
          text[at] = static_cast<char>(random());
          break;
        case 3:
          text.replace(at, length, pieces[random() % pieces.size()]);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 80));
          break;
      }
      if (text.empty()) text = " ";
    }
    Feed(text, accepted);
    if (HasFailure()) return;
  }
  EXPECT_GT(accepted, 300);  // the mutations reach beyond the parser
}

TEST(Parse, EveryPrefixIsHandled) {
  std::string text = kBase;
  int accepted = 0;
  for (size_t length = 0; length <= text.size(); ++length) Feed(text.substr(0, length), accepted);
  EXPECT_GE(accepted, 1);
}

}  // namespace
}  // namespace interlace
