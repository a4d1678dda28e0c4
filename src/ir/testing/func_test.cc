// Regions: text, rules, meaning, and what they are known by.
#include "ir/func.h"

#include <gtest/gtest.h>

#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace {
namespace {

constexpr char kBody[] = R"(func f0(%0: f32[2,3], %1: f32[3]) gives (%2, %4) {
  %2: f32[2,3] = aten.mul.Tensor(%0, %0)
  %3: f32[3] in %2+0 = view(%2)
  %4: f32[3] = aten.add.Tensor(%3, %1)
}
)";
std::string ProgramText(const std::string& funcs, const std::string& phase) {
  return "interlace 1 captured\nstep 1 reduce_each\ninput %0: f32[2,3] \"x\"\ninput %1: f32[3] \"y\"\n" + funcs + phase;
}

std::string Phase(const std::string& ops) {
  return "phase micro_batch takes () gives () {\n" + ops + "}\n";
}

constexpr char kCall[] = "  %2: f32[2,3], %3: f32[3] = call f0(%0, %1) {fwd}\n";

// The message of the parser or the verifier, its first line.
std::string Problem(const std::string& text) {
  Result<Program> program = Parse(text, "p");
  const std::string all = program.ok() ? ErrorOf(Verify(*program)) : ErrorOf(program);
  return all.substr(0, all.find('\n'));
}

TEST(Func, IsPrintedAsItWasRead) {
  const std::string text = ProgramText(kBody, Phase(kCall));
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok()) << ErrorOf(program);
  EXPECT_EQ(Print(*program), text);
  EXPECT_EQ(Print(program->Clone()), text);
  EXPECT_EQ(ErrorOf(Verify(*program)), "no error");
  EXPECT_EQ(FuncOf(*program, program->op(program->phases[0].ops[0])), 0);
}

TEST(Func, RulesOfBodiesAndCalls) {
  const auto with_body = [](const std::string& body) { return Problem(ProgramText(body, Phase(""))); };
  const auto with_call = [](const std::string& call) { return Problem(ProgramText(kBody, Phase(call))); };
  EXPECT_EQ(with_body("func f1() gives () {\n}\n"), "p:5:6: funcs count up from f0: this one is f0");
  EXPECT_EQ(with_body("func f0() gives () {\n}\n"), "line 1: func f0: it gives nothing");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%0) {\n}\n"), "line 1: func f0: %0 is given, but it is an operand");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%1) {\n  %1: f32[2] in %0+0 = view(%0)\n}\n"),
            "line 1: func f0: %1 is given, but does not own its storage");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%1, %1) {\n  %1: f32[2] = aten.neg(%0)\n}\n"),
            "line 1: func f0: %1 is given twice");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%1) {\n  %1: f32[2] = aten.neg(%0) {rng=1}\n}\n"),
            "line 1: func f0: a region draws no random numbers");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%1) {\n  %1: f32[2] = copy(%0)\n}\n"),
            "line 1: func f0: a region has ATen ops and views, not copy");
  EXPECT_EQ(with_body("func f0(%0: f32[2]) gives (%7) {\n}\n"), "p:5:28: %7 is used but nothing defines it");
  EXPECT_EQ(Problem(ProgramText("func f0(%0: f32[2]) gives (%1) {\n  %1: f32[2] = aten.neg(%0)\n", "")),
            "p:5:6: func 'f0' has no closing '}'; the file seems to be cut");
  EXPECT_EQ(with_body("func f0(%900: f32[2]) gives (%900) {\n}\n").substr(0, 35),
            "p:5:9: value id %900 is too large f");
  EXPECT_EQ(with_body("func f0(%0: f32[b]) gives (%0) {\n}\n").substr(0, 26), "p:5:17: unknown symbol 'b'");
  EXPECT_EQ(with_call("  %2: f32[2,3] = call f7(%0, %1)\n"), "p:11:23: 'f7' is no func that is declared above");
  EXPECT_EQ(with_call("  %2: f32[2,3] = call (%0, %1)\n"),
            "p:11:23: expected the func that is called, such as f0, found '('");
  EXPECT_EQ(with_call("  %2: f32[2,3] = call f0(%0, %1)\n"), "line 11: call f0 has 2 results, not 1");
  EXPECT_EQ(with_call("  %2: f32[2,3], %3: f32[3] = call f0(%0)\n"), "line 11: call f0 takes 2 operands, not 1");
  EXPECT_EQ(with_call("  %2: f32[2,3], %3: f32[3] = call f0(%0, %0)\n"),
            "line 11: %0 must be f32[3] as in the body, not f32[2,3]");
  EXPECT_EQ(with_call("  %2: f32[3,2], %3: f32[3] = call f0(%0, %1)\n"),
            "line 11: %2 must be f32[2,3] as in the body, not f32[3,2]");
  EXPECT_EQ(with_call(kCall), "no error");
}

TEST(Func, ACallIsWhatItsBodySays) {
  const std::string funcs = ProgramText(kBody, Phase(std::string(kCall) + "  %4: f32[] = aten.sum(%3)\n"
                                                                          "  output(%4) {name=\"loss\"}\n"));
  const std::string plain =
      ProgramText("", Phase("  %2: f32[2,3] = aten.mul.Tensor(%0, %0)\n  %5: f32[3] in %2+0 = view(%2)\n"
                            "  %3: f32[3] = aten.add.Tensor(%5, %1)\n  %4: f32[] = aten.sum(%3)\n"
                            "  output(%4) {name=\"loss\"}\n"));
  Result<Program> a = Parse(funcs), b = Parse(plain);
  ASSERT_TRUE(a.ok() && b.ok()) << ErrorOf(a) << ErrorOf(b);
  Result<testing::RunResult> with = testing::Interpret(*a), without = testing::Interpret(*b);
  ASSERT_TRUE(with.ok() && without.ok()) << ErrorOf(with) << ErrorOf(without);
  ASSERT_FALSE(with->outputs.at("loss").empty());
  EXPECT_EQ(testing::FirstDifference(*with, *without), "");
}

TEST(Func, IsKnownByItsBody) {
  Result<Program> program = Parse(ProgramText(kBody, Phase(kCall)));
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(AddFunc(*program, program->funcs[0].body->Clone()), 0);  // the same body again
  EXPECT_EQ(program->funcs.size(), 1u);
  const std::string key = program->funcs[0].key;
  EXPECT_EQ(key.size(), 64u);
  // Another number in another program: the same key, another body: another one.
  const std::string other = "func f0(%0: f32[2]) gives (%1) {\n  %1: f32[2] = aten.neg(%0)\n}\n";
  std::string second = kBody;
  second.replace(second.find("f0"), 2, "f1");
  Result<Program> two = Parse(ProgramText(other + second, Phase("")));
  ASSERT_TRUE(two.ok()) << ErrorOf(two);
  EXPECT_EQ(two->funcs[1].key, key);
  EXPECT_NE(two->funcs[0].key, key);
}

}  // namespace
}  // namespace interlace
