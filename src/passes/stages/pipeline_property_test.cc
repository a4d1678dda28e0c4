// Random programs cut into random stages: what the ranks of a program set compute together under each schedule has the
// bits of textbook training. INTERLACE_SOAK=1 runs more of them.
#include <gtest/gtest.h>

#include <random>

#include "base/testing/rounds.h"
#include "ir/program_set.h"
#include "passes/testing/training_case.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::InterpretSet;
using testing::RunResult;

struct Counts {
  int run = 0, refused = 0, sent = 0, shared = 0, v = 0, recomputed = 0;
};

// What stands in the way of a cut, said before anything runs.
bool IsRefusal(const Error& error) {
  for (const char* known : {"cannot be cut into", "nothing to train", "choose other borders", "choose another border",
                            "leave it to one", "leaves gaps in memory", "needs as many of both"}) {
    if (error.message.find(known) != std::string::npos) return true;
  }
  return false;
}

void Check(uint64_t seed, Counts& counts) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed * 6151 + 3);
  TrainingCase test;
  test.shape.seed = seed + 40000;
  test.shape.layers = 4 + static_cast<int>(random() % 10);
  test.shape.max_width = 24;
  test.shape.dtype = DType::kF64;
  test.shape.cross_entropy = random() % 2 == 0;
  test.run.ranks = 1 + static_cast<int64_t>(random() % 2);
  test.run.accumulation = int64_t{1} << (random() % 4);
  if (random() % 2) test.run.clip = 0.05;
  if (random() % 2) test.run.accumulate_mode = "reduce_last";
  const int64_t stages = 2 + static_cast<int64_t>(random() % 3);
  const int64_t chunks = random() % 4 == 0 ? 2 : 1;
  const bool v = chunks > 1 && random() % 2;
  const bool split = v || (chunks == 1 && random() % 3 == 0);
  std::string schedule = "1f1b";
  if (split && random() % 2) schedule = random() % 2 ? "zero_bubble" : "auto";
  if (v) schedule = random() % 2 ? "v" : "auto";
  if (chunks > 1 && !v) schedule = test.run.accumulation % stages == 0 && random() % 2 ? "interleaved" : "gpipe";
  if (chunks == 1 && random() % 3 == 0) schedule = "gpipe";
  const char* strategies[] = {"shard", "zero1", "replicate"};
  const std::string strategy = strategies[random() % 3];
  const std::string rest = "," + strategy + "(axis=dp),accumulate(steps=" + std::to_string(test.run.accumulation) +
                           ",mode=" + test.run.accumulate_mode + "),update" + (test.run.clip ? "(clip=0.05)" : "") +
                           ",order(schedule=" + schedule + ")" +
                           (random() % 4 == 0 ? ",search(recompute=none,breadth_first=none,evaluations=12)" : "");
  const std::string again = random() % 3 == 0 ? "recompute(mode=full)," : "";
  const std::string start = "canonicalize," + again + "mesh(axes=pp:" + std::to_string(stages) +
                            "+dp:" + std::to_string(test.run.ranks) + ")";
  ProgramSet set;
  set.axis = "pp";
  for (int64_t s = 0; s < stages; ++s) {
    Program program = test.Captured();
    const std::string pipeline = start + ",pipeline(stage=" + std::to_string(s) + ",chunks=" + std::to_string(chunks) +
                                 (v ? ",deal=v" : "") + ",backward=" + (split ? "split" : "whole") +
                                 ",cluster=h100-80gb-16)" + rest;
    SCOPED_TRACE(pipeline);
    const Status done = Apply(program, pipeline);
    if (!done.ok() && IsRefusal(done.error())) {
      ++counts.refused;
      return;
    }
    ASSERT_TRUE(done.ok()) << done.error().ToString() << "\n" << Print(test.Captured());
    if (Print(program).find("message=") != std::string::npos) ++counts.sent;
    set.stages.push_back({"s" + std::to_string(s) + ".il", std::move(program)});
  }
  SCOPED_TRACE(start + ",pipeline(chunks=" + std::to_string(chunks) + ")" + rest);
  std::string texts;
  for (const auto& stage : set.stages) texts += Print(stage.program);
  const Status fits = CheckProgramSet(set);
  ASSERT_TRUE(fits.ok()) << fits.error().ToString() << "\n" << texts;
  const Result<RunResult> actual = InterpretSet(set, test.run);
  ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << texts;
  const bool shares = texts.find(" shared ") != std::string::npos;
  const std::string difference = FirstDifference(test.Expected(), *actual);
  EXPECT_TRUE(shares || difference.empty()) << difference << "\n" << texts;
  // Parts of a shared gradient are added up over micro-batches before they are added to one another.
  const RunResult expected = test.Expected();
  for (const auto& [name, values] : expected.params) {
    ASSERT_TRUE(actual->params.contains(name)) << name << "\n" << texts;
    EXPECT_LT(Apart(values, actual->params.at(name)), 1e-9) << name << "\n" << texts;
  }
  for (const auto& [name, runs] : expected.outputs) {
    for (size_t i = 0; i < runs.size(); ++i) EXPECT_LT(Apart(runs[i], actual->outputs.at(name)[i]), 1e-9) << name;
  }
  counts.shared += shares ? 1 : 0;
  counts.v += v ? 1 : 0;
  counts.recomputed += texts.find("meta recompute") != std::string::npos;
  ++counts.run;
}

TEST(PipelineProperty, StagesTogetherHaveTheBitsOfTheTextbookStep) {
  Counts counts;
  const int rounds = Rounds(80);
  for (int seed = 0; seed < rounds && !HasFailure(); ++seed) Check(static_cast<uint64_t>(seed), counts);
  EXPECT_GT(counts.run, rounds / 4) << counts.refused << " refused";
  EXPECT_GT(counts.sent, counts.run);
  EXPECT_GT(counts.shared, 0);
  EXPECT_GT(counts.v, 0);
  EXPECT_GT(counts.recomputed, 0);
  RecordProperty("refused", counts.refused);
}

}  // namespace
}  // namespace interlace
