// Random programs through random pipelines: the verifier is content after every pass, and the interpreter gives the
// same bits of outputs, parameters, buffers and norm as the textbook step of the captured program. INTERLACE_SOAK=1
// runs more of them.
#include <gtest/gtest.h>

#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "passes/passes.h"
#include "passes/pipeline.h"
#include "passes/runner.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RandomProgram;
using testing::RandomProgramOptions;
using testing::RunResult;

struct Case {
  RandomProgramOptions program;
  InterpretOptions run;
  std::string describe;
};

template <typename T>
T Pick(std::mt19937_64& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

Case RandomCase(uint64_t seed) {
  std::mt19937_64 random(seed);
  Case out;
  out.program.seed = seed;
  out.program.layers = 1 + static_cast<int>(random() % 6);
  out.program.max_width = Pick<int64_t>(random, {3, 13, 40});
  out.program.dtype = Pick(random, {DType::kF32, DType::kF32, DType::kF64, DType::kBF16});
  out.run.steps = 2;
  out.run.ranks = 1 + static_cast<int64_t>(seed % 4);
  out.run.accumulation = Pick<int64_t>(random, {1, 1, 2, 3, 4});
  out.run.accumulate_mode = Pick<const char*>(random, {"reduce_each", "reduce_last"});
  if (random() % 2) out.run.clip = Pick(random, {0.05, 1.0, 1e6});
  return out;
}

constexpr char kRule[] = R"(interlace 1 captured
rule 0 "Averaged" (mean, largest) {
  form {
    mean = lerp(mean, g, n0)
    t0 = abs(g)
    largest = max(largest, t0)
    t0 = add(largest, n1, n2)
    w = addcdiv(w, mean, t0, n3)
  }
}
group 0 rule 0
phase micro_batch takes () gives () {
}
)";

// Of every third seed, some parameters are updated by a rule.
Program ProgramOf(const Case& test) {
  Program program = RandomProgram(test.program);
  if (test.program.seed % 3 == 0) {
    program.rules = std::move(Parse(kRule)->rules);
    program.groups[0] = {.id = 0, .optimizer = "rule", .rule = 0};
  }
  return program;
}

std::string Pipeline(std::mt19937_64& random, const std::string& sharding, const InterpretOptions& run) {
  std::string text = random() % 4 ? "canonicalize," : "";
  if (random() % 3 == 0) text += "fuse(min=1),";
  text += sharding + "(ranks=" + std::to_string(run.ranks);
  if (random() % 2) text += ",wait=now";
  if (sharding == "shard" && random() % 2) text += ",ahead=" + std::to_string(random() % 5);
  text += ")";
  if (random() % 4 == 0) text += ",canonicalize";
  text += ",accumulate(steps=" + std::to_string(run.accumulation) + ",mode=" + run.accumulate_mode + ")";
  if (random() % 4 == 0) text += ",canonicalize";
  text += ",update";
  if (run.clip) text += "(clip=" + std::to_string(*run.clip) + ")";
  return random() % 4 == 0 ? text + ",canonicalize" : text;
}

void CheckPipeline(const Case& test, const RunResult& expected, const std::string& pipeline) {
  SCOPED_TRACE(pipeline);
  Program program = ProgramOf(test);
  Result<std::vector<PassCall>> calls = ParsePipeline(pipeline);
  ASSERT_TRUE(calls.ok()) << calls.error().ToString();
  Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
  ASSERT_TRUE(reports.ok()) << reports.error().ToString();
  std::string text = Print(program);
  Result<Program> parsed = Parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
  EXPECT_EQ(Print(*parsed), text);
  Result<RunResult> actual = Interpret(program, test.run);
  ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
  EXPECT_EQ(FirstDifference(expected, *actual), "") << text;
}

class PassProperty : public ::testing::TestWithParam<int> {};

TEST_P(PassProperty, SameBitsAsTheTextbookStep) {
  constexpr int kEach = 25;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case test = RandomCase(seed);
    Program captured = ProgramOf(test);
    Result<RunResult> expected = Interpret(captured, test.run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    std::mt19937_64 random(seed * 77);
    for (const char* sharding : {"shard", "replicate", "zero1"}) {
      CheckPipeline(test, *expected, Pipeline(random, sharding, test.run));
      if (HasFailure()) return;
    }
  }
}

TEST_P(PassProperty, CanonicalizeKeepsBitsAndIsIdempotent) {
  constexpr int kEach = 25;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case test = RandomCase(seed);
    Program program = ProgramOf(test);
    Result<RunResult> expected = Interpret(program, test.run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    int64_t before = static_cast<int64_t>(program.phases[0].ops.size());
    Result<bool> changed = Canonicalize(program);
    ASSERT_TRUE(changed.ok());
    EXPECT_LE(static_cast<int64_t>(program.phases[0].ops.size()), before);
    Status valid = Verify(program);
    ASSERT_TRUE(valid.ok()) << valid.error().ToString();
    Result<RunResult> actual = Interpret(program, test.run);
    ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << Print(program);
    EXPECT_EQ(FirstDifference(*expected, *actual), "") << Print(program);
    program.Compact();
    std::string once = Print(program);
    Result<bool> again = Canonicalize(program);
    ASSERT_TRUE(again.ok());
    EXPECT_FALSE(*again);
    EXPECT_EQ(Print(program), once);
    if (HasFailure()) return;
  }
}

// Hybrid sharding: cut over one axis, replicated on another, or on two; also with an axis that concerns nobody.
TEST_P(PassProperty, SameBitsOnAMeshOfSeveralAxes) {
  constexpr int kEach = 8;
  struct Mesh {
    const char *axes, *axis, *replicas;
    int64_t ranks, copies;
  };
  constexpr Mesh kMeshes[] = {{"replica:2+dp:2", "dp", "replica", 4, 2},
                              {"replica:3+dp:2", "dp", "replica", 6, 3},
                              {"replica:2+dp:1", "dp", "replica", 2, 2},
                              {"replica:1+dp:3", "dp", "replica", 3, 1},
                              {"pod:2+host:2+dp:2", "dp", "pod+host", 8, 4}};
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Mesh& mesh = kMeshes[seed % std::size(kMeshes)];
    Case test = RandomCase(seed + 900);
    test.run.ranks = mesh.ranks;
    test.run.replicas = mesh.copies;
    Result<RunResult> expected = Interpret(ProgramOf(test), test.run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    std::mt19937_64 random(seed * 77);
    for (const char* sharding : {"shard", "replicate", "zero1"}) {
      InterpretOptions within = test.run;
      within.ranks = mesh.ranks / mesh.copies;
      const std::string text = Pipeline(random, sharding, within);
      const size_t at = text.find("(ranks=");
      const std::string before = std::string("mesh(axes=") + mesh.axes + ")," + text.substr(0, at);
      const std::string states = sharding != std::string("shard") ? ""
                                 : random() % 3 == 0              ? ",states=shard"
                                                                  : ",states=auto";
      CheckPipeline(
          test, *expected,
          before + "(axis=" + mesh.axis + ",replicas=" + mesh.replicas + states + ",ranks=" + text.substr(at + 7));
      if (HasFailure()) return;
      // And over all ranks, which add up in the same order.
      const size_t end = text.find_first_of(",)", at + 7);
      CheckPipeline(test, *expected,
                    before + "(axis=" + mesh.replicas + "+" + mesh.axis + ",ranks=" + std::to_string(mesh.ranks) +
                        text.substr(end));
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PassProperty, ::testing::Range(0, Rounds(4)));

}  // namespace
}  // namespace interlace
