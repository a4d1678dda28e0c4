// What is kept, and that the program around it stays right; unshard_test.cc has the choice.
#include "passes/keep.h"

#include "ir/verifier.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

Program Sharded(const std::string& pipeline) {
  Result<Program> program = Parse(RunText(std::string(kTwoLayers), pipeline), "sharded");
  EXPECT_TRUE(program.ok());
  return std::move(*program);
}

TEST(Keep, OneMicroBatch) {
  Program program = Sharded("shard(ranks=2,ahead=0)");
  EXPECT_EQ(KeepableUnits(program), (std::vector<UnitId>{0, 1}));
  Result<bool> changed = KeepGathered(program, {1});
  ASSERT_TRUE(changed.ok());
  EXPECT_TRUE(*changed);
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  EXPECT_EQ(
      Outline(Print(program)),
      "gather:u0 wait mul release gather:u1 wait mul sum mul reduce:u1 mul release mul wait_reduce release reduce:u0 "
      "gather:u0 wait mul release wait_reduce release");
  EXPECT_EQ(KeepableUnits(program), (std::vector<UnitId>{0}));
  Result<bool> again = KeepGathered(program, {1});
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(*again) << "it is kept already";
}

TEST(Keep, ThroughAllMicroBatches) {
  Program program = Sharded("shard(ranks=2,ahead=0),accumulate(steps=4),update");
  ASSERT_TRUE(KeepGathered(program, {0}).ok());
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString() << Print(program);
  const auto outline = [&](const char* phase) { return Outline(Print(program), phase); };
  EXPECT_EQ(outline("micro_batch.first"),
            "gather:u0 wait mul gather:u1 wait mul release sum mul reduce:u1 gather:u1 wait mul release mul "
            "wait_reduce release "
            "reduce:u0 mul wait_reduce release");
  EXPECT_EQ(outline("micro_batch.middle").find("u0 wait"), std::string::npos);
  EXPECT_EQ(outline("micro_batch.last").find("gather:u0"), std::string::npos);
  EXPECT_EQ(program.phases[0].gives.size(), 1u);
  EXPECT_EQ(program.phases[1].takes.size(), 1u);
  EXPECT_EQ(program.phases[1].gives.size(), 1u);
  EXPECT_EQ(program.phases[2].takes.size(), 1u);
  EXPECT_EQ(program.phases[2].gives.size(), 0u) << "released before the update";
}

TEST(Keep, AUnitThatOnlyTheForwardPartUsesIsKeptAcrossMicroBatches) {
  EXPECT_EQ(BitsDiffer(std::string(kChain), "shard(ranks=2),accumulate(steps=3),update,unshard(units=all)", 3), "");
  EXPECT_EQ(RunText(std::string(kChain), "shard(ranks=2),update,unshard(units=u0)"),
            "error: pass 'unshard': option units: u0 is not gathered more than once in a step, so there is nothing "
            "to keep");
}

TEST(Keep, NothingToKeep) {
  Program program = Sharded("zero1(ranks=2)");
  EXPECT_TRUE(KeepableUnits(program).empty());
  Result<bool> changed = KeepGathered(program, {0, 1});
  ASSERT_TRUE(changed.ok());
  EXPECT_FALSE(*changed);
}

}  // namespace
}  // namespace interlace
