#include "ir/testing/interpreter.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ir/testing/random_program.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::testing {
namespace {

Program FromText(std::string_view text) {
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << program.error().ToString();
  if (!program.ok()) return Program();
  Status valid = Verify(*program);
  EXPECT_TRUE(valid.ok()) << valid.error().ToString();
  return std::move(*program);
}

TEST(RandomProgram, ValidRoundTripsAndRuns) {
  int finite = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    RandomProgramOptions options{.seed = seed, .layers = static_cast<int>(seed % 12)};
    Program program = RandomProgram(options);
    Status valid = Verify(program);
    ASSERT_TRUE(valid.ok()) << "seed " << seed << "\n" << valid.error().ToString();
    std::string text = Print(program);
    Result<Program> again = Parse(text);
    ASSERT_TRUE(again.ok()) << again.error().ToString();
    EXPECT_EQ(Print(*again), text);
    InterpretOptions interpret{.ranks = 2, .accumulation = 2};
    Result<RunResult> first = Interpret(program, interpret);
    ASSERT_TRUE(first.ok()) << "seed " << seed << ": " << first.error().ToString() << "\n" << text;
    Result<RunResult> second = Interpret(*again, interpret);
    ASSERT_TRUE(second.ok());
    EXPECT_EQ(FirstDifference(*first, *second), "") << "seed " << seed << "\n" << text;
    finite += std::isfinite(first->outputs.at("loss")[0][0]) ? 1 : 0;
  }
  EXPECT_EQ(finite, 60);
}

// The gradients of random programs against finite differences, so that the referee itself is checked.
TEST(RandomProgram, GradientsAreRight) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    RandomProgramOptions options{.seed = seed, .layers = 5, .dtype = DType::kF64, .buffers = false};
    Program program = RandomProgram(options);
    // One plain SGD step: the parameter moves by lr times its gradient.
    InterpretOptions one{.steps = 1};
    one.hyper.assign(3, {});
    for (Group& group : program.groups) {
      group.optimizer = "sgd";
      one.hyper[group.id] = {1.0, 0, 0, 0, 0, 1, 0};
    }
    Result<RunResult> after = Interpret(program, one);
    ASSERT_TRUE(after.ok()) << after.error().ToString();
    InterpretOptions none = one;
    none.steps = 0;
    Result<RunResult> before = Interpret(program, none);
    ASSERT_TRUE(before.ok());
    for (const Param& param : program.params) {
      if (!param.trainable) continue;
      std::vector<double> values = before->params.at(param.name);
      size_t i = values.size() / 2;
      double gradient = values[i] - after->params.at(param.name)[i];
      double losses[2];
      const double h = 1e-6;
      for (int side = 0; side < 2; ++side) {
        InterpretOptions moved = one;
        moved.params[param.name] = values;
        moved.params[param.name][i] += side == 0 ? -h : h;
        Result<RunResult> run = Interpret(program, moved);
        ASSERT_TRUE(run.ok());
        losses[side] = run->outputs.at("loss")[0][0];
      }
      double expected = (losses[1] - losses[0]) / (2 * h);
      EXPECT_NEAR(gradient, expected, 1e-4 * (1 + std::fabs(expected))) << "seed " << seed << " " << param.name;
    }
  }
}

constexpr char kCaptured[] = R"(interlace 1 captured
step 1 reduce_each
group 0 adamw
param %0: f32[3,5] "w" trainable group 0
param %1: f32[7] "unused" trainable group 0
input %2: f32[2,5] "x"
phase micro_batch takes () gives () {
  %3: f32[5,3]{1,5} in %0+0 = aten.t(%0) {fwd}
  %4: f32[2,3] = aten.mm(%2, %3) {fwd}
  %5: f32[2,3] = aten.tanh(%4) {fwd}
  %6: f32[] = aten.sum(%5) {fwd}
  output(%6) {fwd name="loss"}
  %7: f32[2,3] = aten.ones_like(%5) {bwd}
  %8: f32[2,3] = aten.tanh_backward(%7, %5) {bwd}
  %9: f32[3,2]{1,3} in %8+0 = aten.t(%8) {bwd}
  %10: f32[3,5] = aten.mm(%9, %2) {bwd}
  grad(%0, %10) {bwd}
}
)";

// The same step by hand: gathered weight, gradient placed into the flat buffer, reduce-scatter, clipped update.
constexpr char kSharded[] = R"(interlace 1 sharded
mesh dp 2
step 1 reduce_each
group 0 adamw
unit u0 dp f32 numel 64 shard 32
param %0: f32[3,5] "w" trainable group 0 unit u0+0
param %1: f32[7] "unused" trainable group 0 unit u0+32
input %2: f32[2,5] "x"
state %20: f32[32] u0.shard persistent
state %21: f32[32] u0.exp_avg persistent
state %22: f32[32] u0.exp_avg_sq persistent
state %23: f32[32] u0.grad step
phase micro_batch takes () gives () {
  %30: f32[64] = gather.start(%20) {fwd units=[u0]}
  gather.wait(%30) {fwd}
  %3: f32[5,3]{1,5} in %30+0 = view(%30) {fwd}
  %4: f32[2,3] = aten.mm(%2, %3) {fwd}
  release(%30) {fwd}
  %5: f32[2,3] = aten.tanh(%4) {fwd}
  %6: f32[] = aten.sum(%5) {fwd}
  output(%6) {fwd name="loss"}
  %7: f32[2,3] = aten.ones_like(%5) {bwd}
  %8: f32[2,3] = aten.tanh_backward(%7, %5) {bwd}
  %31: f32[64] = grad.begin() {bwd units=[u0] zero=true}
  %9: f32[3,2]{1,3} in %8+0 = view(%8) {bwd}
  %10: f32[3,5] into %31+0 = aten.mm(%9, %2) {bwd}
  %32: f32[32] into %23+0 = reduce.start(%31) {bwd units=[u0]}
  reduce.wait(%32) {bwd}
}
phase update once takes () gives () {
  %40: i64[68] = norm.partial(%23) {upd units=[u0]}
  %41: i64[68] = all_reduce.start(%40) {upd axis=dp}
  all_reduce.wait(%41) {upd}
  %42: f64[3] = norm.coef(%41) {upd max_norm=0.5 scale=0.5}
  update.adamw(%20, %23, %21, %22, %42) {upd units=[u0] scale=0.5 ranges=[0, 15, 0]}
}
)";

TEST(Interpreter, ShardedByHandEqualsTextbook) {
  Program captured = FromText(kCaptured), sharded = FromText(kSharded);
  Result<RunResult> expected = Interpret(captured, {.steps = 4, .ranks = 2, .clip = 0.5});
  Result<RunResult> got = Interpret(sharded, {.steps = 4});
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  EXPECT_EQ(FirstDifference(*expected, *got), "");
  ASSERT_EQ(got->norms.size(), 4u);
  EXPECT_GT(got->norms[0], 0.5);  // it did clip
  EXPECT_EQ(got->norms, expected->norms);
  EXPECT_EQ(got->outputs.at("loss").size(), 8u);
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// What the interpreter must notice, since passes are judged by it.
TEST(Interpreter, NoticesWrongPrograms) {
  Result<RunResult> expected = Interpret(FromText(kSharded), {});
  ASSERT_TRUE(expected.ok());
  auto run = [&](const std::string& text) {
    Result<Program> program = Parse(text);
    EXPECT_TRUE(program.ok()) << program.error().ToString();
    Result<RunResult> result = Interpret(*program, {});
    return result.ok() ? FirstDifference(*expected, *result) : result.error().ToString();
  };
  EXPECT_EQ(run(kSharded), "");
  // The wait comes after the use: the full buffer is still poison.
  std::string late = Replaced(kSharded, "  gather.wait(%30) {fwd}\n", "");
  late = Replaced(late, "  release(%30) {fwd}\n", "  gather.wait(%30) {fwd}\n");
  std::string difference = run(late);
  EXPECT_TRUE(difference.starts_with("output 'loss' run 0 element 0") && difference.ends_with(" and nan"))
      << difference;
  // Released before the use.
  std::string early = Replaced(kSharded, "  release(%30) {fwd}\n", "");
  early = Replaced(early, "  gather.wait(%30) {fwd}\n", "  gather.wait(%30) {fwd}\n  release(%30) {fwd}\n");
  EXPECT_EQ(
      run(early),
      "phase micro_batch: %4: f32[2,3] = aten.mm(%2, %3) {fwd}: %3 has no storage here: it was never computed, or its "
      "storage has ended");
  // The gradient of "w" never lands in the flat buffer.
  std::string forgotten = Replaced(kSharded, "%10: f32[3,5] into %31+0", "%10: f32[3,5]");
  forgotten = Replaced(forgotten, " zero=true", "");
  difference =
      run(forgotten);  // the norm is NaN, so the first update is skipped and the second step's loss is the first's
  EXPECT_TRUE(difference.starts_with("output 'loss' run 2 element 0")) << difference;
  // Another scale.
  EXPECT_NE(run(Replaced(kSharded, "upd units=[u0] scale=0.5", "upd units=[u0] scale=0.25")), "");
}

}  // namespace
}  // namespace interlace::testing
