// That gradients leave the states, where they may, and no bit changes.
#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace interlace
