#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

std::string Reordered(const std::string& options, std::string_view captured = kTwoLayers) {
  return Outline(RunText(std::string(captured), "shard(ranks=2,ahead=0,wait=now),reorder(" + options + ")"));
}

// SimpleFSDP's Table 6: forward and backward, each before or after.
TEST(Reorder, AllFourRows) {
  const std::string forward_before = "gather:u0 gather:u1 wait mul release wait mul release sum ";
  const std::string forward_after = "gather:u0 wait gather:u1 mul release wait mul release sum ";
  const std::string backward_before =
      "mul reduce:u1 gather:u1 gather:u0 wait mul release mul wait_reduce release reduce:u0 wait mul release "
      "wait_reduce release";
  const std::string backward_after =
      "mul reduce:u1 gather:u1 wait gather:u0 mul release mul wait_reduce release reduce:u0 wait mul release "
      "wait_reduce release";
  EXPECT_EQ(Reordered("forward=before,backward=before"), forward_before + backward_before);
  EXPECT_EQ(Reordered("forward=before,backward=after"), forward_before + backward_after);
  EXPECT_EQ(Reordered("forward=after,backward=before"), forward_after + backward_before);
  EXPECT_EQ(Reordered("forward=after,backward=after"), forward_after + backward_after);
  EXPECT_EQ(Outline(RunText(std::string(kTwoLayers), "shard(ranks=2,ahead=0),reorder")),
            forward_before + backward_after)
      << "the defaults are the best row";
}

TEST(Reorder, WaitOfAReductionIsJustBeforeTheNextOneStarts) {
  EXPECT_EQ(Outline(RunText(std::string(kTwoLayers), "zero1(ranks=2,wait=now),reorder")),
            "mul mul sum mul reduce:u1 mul mul wait_reduce release reduce:u0 mul wait_reduce release");
}

TEST(Reorder, ASecondRunChangesNothing) {
  const std::string once = RunText(std::string(kTwoLayers), "shard(ranks=2,ahead=0),reorder");
  EXPECT_EQ(RunText(once, "reorder"), once);
}

TEST(Reorder, Errors) {
  EXPECT_EQ(Reordered("forward=befor"),
            "error: pass 'reorder': option forward=befor: expected before or after, did you mean 'before'?");
}

TEST(Reorder, KeepsBits) {
  for (const char* forward : {"before", "after"}) {
    for (const char* backward : {"before", "after"}) {
      const std::string pipeline = std::string("shard(ranks=2),accumulate(steps=3),update,reorder(forward=") + forward +
                                   ",backward=" + backward + ")";
      EXPECT_EQ(BitsDiffer(std::string(kTwoLayers), pipeline, 3), "") << pipeline;
    }
  }
}

}  // namespace
}  // namespace interlace
