// That gradients leave the states, where they may, and no bit changes; and that the search judges memory so.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/testing/rounds.h"
#include "ir/testing/random_program.h"
#include "passes/cost_options.h"
#include "passes/predict.h"
#include "passes/runner.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

bool HasGradStates(const std::string& text) {
  return text.find(".grad step") != std::string::npos;
}

TEST(TransientGradients, OneMicroBatchOfOneRankHasNone) {
  for (const char* const before : {"update", "update(clip=1.0)", "update,overlap_update"}) {
    const std::string pipeline = "shard(ranks=1)," + std::string(before), all = pipeline + ",transient_gradients";
    EXPECT_TRUE(HasGradStates(RunText(std::string(kTwoLayers), pipeline)));
    EXPECT_FALSE(HasGradStates(RunText(std::string(kTwoLayers), all))) << RunText(std::string(kTwoLayers), all);
    EXPECT_EQ(BitsDiffer(std::string(kTwoLayers), all, 1, "reduce_each", 1), "");
  }
}

TEST(TransientGradients, SumsStayStates) {
  for (const char* const before :
       {"shard(ranks=2),update", "replicate(ranks=2),update", "shard(ranks=1),accumulate(steps=2),update",
        "shard(ranks=1),update,reposition_update", "shard(ranks=1),update,offload_sync(kinds=states)",
        "shard(ranks=1)"}) {
    const std::string without = RunText(std::string(kTwoLayers), before);
    EXPECT_TRUE(HasGradStates(without)) << without;
    EXPECT_EQ(RunText(std::string(kTwoLayers), std::string(before) + ",transient_gradients"), without);
  }
}

// A limit between a program's peak with gradients as values and that with states is met as the program will run.
TEST(TransientGradients, SearchKnowsThatTheyWillBeNoStates) {
  int between = 0;
  for (uint64_t seed = 1, last = Rounds(4); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 4;
    const Program captured = testing::RandomProgram(options);
    const auto search = [&](const std::string& more) {
      Program program = captured.Clone();
      Result<std::vector<PassCall>> calls =
          ParsePipeline("canonicalize,shard(ranks=1),update,search(recompute=none,evaluations=4" + more + ")");
      EXPECT_TRUE(calls.ok()) << ErrorOf(calls);
      const Result<std::vector<PassReport>> done = RunPasses(program, *calls);
      return std::pair{done.ok(), std::move(program)};
    };
    Result<PassCosts> read = ReadCosts(captured, {});
    ASSERT_TRUE(read.ok()) << ErrorOf(read);
    PassCosts& costs = *read;
    const int64_t states = Predict(search("").second, costs)->bytes;
    costs.transient = true;
    const int64_t values = Predict(search("").second, costs)->bytes;
    EXPECT_LE(values, states);
    const std::string limit = ",limit=" + std::to_string(states - 1);
    if (!search(limit + ",transient=true").first) continue;
    ++between;
    EXPECT_FALSE(search(limit).first);
  }
  EXPECT_GT(between, 0);
}

}  // namespace
}  // namespace interlace
