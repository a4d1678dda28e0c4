#include "passes/transfers.h"

#include "ir/verifier.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

Program FromText(const std::string& text) {
  Result<Program> program = Parse(text, "transfers");
  EXPECT_TRUE(program.ok()) << text;
  return std::move(*program);
}

Program TwoLayers(const std::string& pipeline) {
  return FromText(RunText(std::string(kTwoLayers), pipeline));
}

TEST(Transfers, WhatIsReadIsWrittenBack) {
  for (const char* pipeline :
       {"shard(ranks=2)", "shard(ranks=2,ahead=0,wait=now)", "zero1(ranks=2)", "replicate(ranks=3)",
        "shard(ranks=2),accumulate(steps=3),update", "zero1(ranks=2),accumulate(steps=2,mode=reduce_last),update"}) {
    Program program = TwoLayers(pipeline);
    const std::string before = Print(program);
    for (Phase& phase : program.phases) {
      Result<Transfers> transfers = Transfers::Read(program, phase);
      ASSERT_TRUE(transfers.ok());
      ASSERT_TRUE(transfers->Write().ok()) << pipeline;
    }
    EXPECT_EQ(Print(program), before) << pipeline;
  }
}

TEST(Transfers, Positions) {
  Program program = TwoLayers("shard(ranks=2,ahead=0)");
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  ASSERT_EQ(t->gathers.size(), 4u);
  EXPECT_EQ(t->op(t->gathers[0].need).name, "gather.wait");
  EXPECT_EQ(t->op(t->gathers[0].end).name, "release");
  EXPECT_EQ(t->gathers[0].bytes, 256);
  EXPECT_EQ(t->gathers[0].shard_bytes, 128);
  EXPECT_LT(t->gathers[1].need, t->backward_begin());
  EXPECT_GE(t->gathers[2].need, t->backward_begin());
  EXPECT_EQ(t->gathers[2].units, (std::vector<UnitId>{1}));
  ASSERT_EQ(t->reduces.size(), 2u);
  EXPECT_EQ(t->reduces[0].units, (std::vector<UnitId>{1}));
  EXPECT_EQ(t->reduces[0].tail.size(), 2u) << "wait, release";
  EXPECT_EQ(t->reduces[0].ready, t->reduces[0].at);
  EXPECT_EQ(t->reduces[0].latest, t->size());
}

TEST(Transfers, MergedGathersAndReductionsKeepTheirWaits) {
  Program program = TwoLayers("shard(ranks=2,ahead=0)");
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  t->Merge(t->gathers[0], t->gathers[1]);
  t->Merge(t->reduces[0], t->reduces[1]);
  EXPECT_TRUE(t->gathers[1].units.empty());
  ASSERT_TRUE(t->Write().ok());
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  EXPECT_EQ(Outline(Print(program)),
            "gather:u0+u1 wait mul release wait mul release sum mul gather:u1 wait mul release mul reduce:u1+u0 "
            "gather:u0 wait mul "
            "release wait_reduce release wait_reduce release");
}

TEST(Transfers, SumsThatEveryRankTakesAreGatheredWhereTheirReductionEnds) {
  Program program = TwoLayers("replicate(ranks=2)");
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  EXPECT_TRUE(t->gathers.empty()) << "no parameter is";
  ASSERT_EQ(t->reduces.size(), 2u);
  t->Merge(t->reduces[0], t->reduces[1]);
  ASSERT_TRUE(t->Write().ok());
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  EXPECT_EQ(Outline(Print(program)),
            "mul mul sum mul mul mul reduce:u1+u0 mul wait_reduce release wait_reduce release gather:u1+u0 wait wait");
  for (const char* passes : {"bucket(modules=net)", "bucket(modules=net,pack=copy),reorder", "reorder",
                             "schedule(reduce=u0+u1)", "schedule(reduce=u1:1;u0)"}) {
    for (const char* wait : {"next", "now"}) {
      const std::string pipeline = std::string("replicate(ranks=2,wait=") + wait + "),accumulate(steps=2),update,";
      if (std::string(wait) == "now" && std::string(passes).starts_with("bucket")) continue;  // cannot wait, so refused
      EXPECT_EQ(BitsDiffer(std::string(kTwoLayers), pipeline + passes, 2), "") << wait << ", " << passes;
    }
  }
}

TEST(Transfers, WhatCannotBeIsRefused) {
  Program program = TwoLayers("shard(ranks=2,ahead=0)");
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  const Gather gather = t->gathers[1];
  t->gathers[1].at = gather.need + 1;
  EXPECT_EQ(t->Write().error().message, "the gather of u1 would start after it is needed");
  t->gathers[1] = gather;
  const Reduce reduce = t->reduces[0];
  t->reduces[0].at = reduce.ready - 1;
  EXPECT_EQ(t->Write().error().message, "the reduction of u1 would start before its gradients are there");
  t->reduces[0] = reduce;
  t->reduces[0].wait = reduce.at;
  t->reduces[0].wait_order = reduce.order;
  EXPECT_EQ(t->Write().error().message, "the wait for the reduction of u1 would be before its start or too late");
}

// A gradient that is an output is read behind the start of its reduction, and its buffer released behind that.
TEST(Transfers, AReleaseThatComesLaterDoesNotHoldTheWait) {
  std::string text(kTwoLayers);
  text.insert(text.find("  output(%9)"), "  output(%6) {bwd name=\"gradient\"}\n");
  Program program = FromText(RunText(text, "shard(ranks=2,ahead=0,wait=now)"));
  const std::string before = Print(program);
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  for (const Reduce& reduce : t->reduces) EXPECT_EQ(reduce.latest, t->size());
  ASSERT_TRUE(t->Write().ok());
  EXPECT_EQ(Print(program), before);
  EXPECT_EQ(BitsDiffer(text, "shard(ranks=2,wait=now),update,bucket(modules=net),reorder"), "");
}

// The same where the wait came behind the last reader: brought to the start, it does not take the release along.
TEST(Transfers, ABufferIsReleasedAfterItsLastReaderWhereverTheWaitGoes) {
  std::string text(kTwoLayers);
  text.replace(text.find("%7: f32[64] = aten.mul.Tensor(%4"), 32, "%7: f32[64] = aten.mul.Tensor(%6");
  for (const std::string strategy : {"shard", "zero1", "replicate"}) {
    EXPECT_EQ(BitsDiffer(text, strategy + "(ranks=2),update,schedule(reduce=u1;u0)"), "") << strategy;
  }
}

// A gather whose shard is cast first takes the cast along; a cast that two gathers share keeps both where they are.
constexpr std::string_view kCast = R"(interlace 1 sharded
mesh dp 2
step 1 reduce_each
module 0 "" "Cast"
unit u0 dp f32 numel 64 shard 32
param %0: f32[64] "w" frozen unit u0+0
input %1: bf16[64] "x"
state %2: f32[32] u0.shard persistent
phase micro_batch takes () gives () {
  %3: bf16[64] = aten.neg(%1) {fwd}
  %4: bf16[32] = copy(%2) {fwd}
  %5: bf16[64] = gather.start(%4) {fwd units=[u0]}
  gather.wait(%5) {fwd}
  %6: bf16[64] = aten.mul.Tensor(%3, %5) {fwd}
  release(%5) {fwd}
  output(%6) {fwd name="y"}
}
)";

TEST(Transfers, ACastOfTheShardMovesWithTheGather) {
  Program program = FromText(std::string(kCast));
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  ASSERT_EQ(t->gathers.size(), 1u);
  EXPECT_EQ(t->gathers[0].lead.size(), 1u);
  EXPECT_EQ(t->gathers[0].bytes, 128);
  EXPECT_EQ(t->gathers[0].shard_bytes, 64);
  t->gathers[0].at = 0;
  ASSERT_TRUE(t->Write().ok());
  ASSERT_TRUE(Verify(program).ok()) << Verify(program).error().ToString();
  EXPECT_EQ(Outline(Print(program)), "copy gather:u0 neg wait mul release");
}

TEST(Transfers, ASharedCastStays) {
  std::string text(kCast);
  text.insert(text.find("  output"),
              "  %7: bf16[64] = gather.start(%4) {fwd units=[u0]}\n  gather.wait(%7) {fwd}\n  release(%7) {fwd}\n");
  Program program = FromText(text);
  Result<Transfers> t = Transfers::Read(program, program.phases[0]);
  ASSERT_TRUE(t.ok());
  EXPECT_TRUE(t->gathers.empty());
  ASSERT_TRUE(t->Write().ok());
  EXPECT_EQ(Print(program), text);
}

}  // namespace
}  // namespace interlace
