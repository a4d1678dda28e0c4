// Random plans over random programs: what the ranks of tp compute together, with shards, accumulation and the optimizer
// step after it, is what the textbook step of the whole program gives. INTERLACE_SOAK=1 runs more of them.
#include <gtest/gtest.h>

#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"
#include "passes/testing/training_case.h"

namespace interlace {
namespace {

using testing::Interpret;
using testing::InterpretOptions;
using testing::RandomProgramOptions;
using testing::RunResult;

constexpr double kBound = 1e-9;

// A cut for some of the parameters, among them what the ranks do not divide.
std::string RandomPlan(std::mt19937_64& random, const Program& program) {
  std::string plan;
  for (const Param& param : program.params) {
    const auto rank = program.value(param.value).type.sizes.size();
    if (rank == 0 || random() % 3 == 0) continue;
    const int64_t blocks = random() % 4 == 0 ? 2 : 1;
    plan += (plan.empty() ? "" : "; ") + param.name + " " + std::to_string(random() % rank) +
            (blocks > 1 ? " blocks " + std::to_string(blocks) : "");
  }
  return plan;
}

void Check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed * 7919 + 1);
  RandomProgramOptions options;
  options.seed = seed;
  options.dtype = DType::kF64;
  options.layers = 1 + static_cast<int>(random() % 6);
  options.multiple = random() % 4 == 0 ? 1 : 6;
  options.max_width = 24;
  options.cross_entropy = random() % 2 == 0;
  const int64_t ranks = 2 + static_cast<int64_t>(random() % 2);
  InterpretOptions run;
  run.ranks = 1 + static_cast<int64_t>(random() % 2);
  run.accumulation = 1 + static_cast<int64_t>(random() % 2);
  if (random() % 2) run.clip = 0.05;
  Program program = testing::RandomProgram(options);
  const Result<RunResult> expected = Interpret(program, run);
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  bool trains = false;
  ForEachOp(program, [&](const Op& op) { trains = trains || op.kind == OpKind::kGrad; });
  const std::string plan = RandomPlan(random, program);
  if (plan.empty()) return;
  program.SetMeta("tensor", plan);
  const char* strategies[] = {"shard", "zero1", "replicate"};
  const std::string pipeline =
      "canonicalize,mesh(axes=dp:" + std::to_string(run.ranks) + "+tp:" + std::to_string(ranks) +
      "),tensor(plan=model,sequence=" + (random() % 3 ? "true" : "false") +
      ",regather=" + (random() % 3 ? "false" : "true") + (random() % 2 ? ",bucket=0" : "") + ")," +
      (random() % 2 ? "overlap," : "") + strategies[random() % 3] +
      "(axis=dp),accumulate(steps=" + std::to_string(run.accumulation) + "),update" + (run.clip ? "(clip=0.05)" : "");
  SCOPED_TRACE(pipeline + "  " + plan);
  const Status done = Apply(program, pipeline);
  ASSERT_TRUE(done.ok()) << done.error().ToString();
  const std::string text = Print(program);
  const bool cut =
      std::any_of(program.params.begin(), program.params.end(), [](const Param& p) { return !p.cuts.empty(); });
  if (!cut) return;  // no rank has a part: all would be ranks of their own
  const Result<RunResult> actual = Interpret(program, run);
  ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
  for (const auto& [name, runs] : expected->outputs) {
    const auto& each = actual->outputs.at(name);
    ASSERT_EQ(each.size(), runs.size() * static_cast<size_t>(ranks));
    for (size_t i = 0; i < each.size(); ++i) {
      ASSERT_LT(Apart(runs[i / static_cast<size_t>(ranks)], each[i]), kBound) << "output " << name << " " << i << "\n"
                                                                              << text;
    }
  }
  for (const auto& [name, value] : expected->params)
    ASSERT_LT(Apart(value, actual->params.at(name)), kBound) << "parameter " << name << "\n" << text;
  for (const auto& [name, by_rank] : expected->buffers) {
    const auto& each = actual->buffers.at(name);
    for (size_t i = 0; i < each.size(); ++i)
      ASSERT_LT(Apart(by_rank[i / static_cast<size_t>(ranks)], each[i]), kBound) << "buffer " << name << "\n" << text;
  }
  ASSERT_TRUE(!trains || Apart(expected->norms, actual->norms) < kBound) << text;
}

TEST(TensorProperty, RanksTogetherComputeWhatOneWould) {
  for (uint64_t seed = 1; seed <= static_cast<uint64_t>(Rounds(300)); ++seed) {
    Check(seed);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace interlace
