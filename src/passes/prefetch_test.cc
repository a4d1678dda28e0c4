// Prefetch by hand. P(o) of kChain after shard(ranks=2,ahead=0), in bytes, shards 384:
//   gather a 640, mul 896, release a 896, gather b 896, mul 1152, release b 896, gather c 896, mul 1152, release c 896
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

std::string Prefetched(const std::string& options, std::string_view captured = kChain) {
  return Outline(
      RunText(std::string(captured), "shard(ranks=2,ahead=0),prefetch(" + HandCluster() + "," + options + ")"));
}

TEST(Prefetch, WithoutRoomEveryGatherStaysAtItsFirstUse) {
  EXPECT_EQ(Prefetched("limit=900"),
            "gather:u0 wait mul release gather:u1 wait mul release gather:u2 wait mul release");
}

TEST(Prefetch, AnOpPassesOnlyUnderTheLimit) {
  // c before the mul of b: P(mul b) + 256 = 1408.
  EXPECT_EQ(Prefetched("limit=1408,alpha=9"),
            "gather:u0 gather:u1 wait mul release wait mul gather:u2 release wait mul release")
      << "c stops at the release behind the mul of b; b alone has room up to the head";
  EXPECT_EQ(Prefetched("limit=1409,alpha=9"),
            "gather:u0 gather:u1 gather:u2 wait mul release wait mul release wait mul release");
}

TEST(Prefetch, TheGatherThatOverflowsIsNotLost) {
  // Together b and c overflow the set (512 is not under 512): c stays behind b's place and b goes on, until it meets a.
  EXPECT_EQ(Prefetched("limit=1MB,prefetch=512,alpha=9"),
            "gather:u0 gather:u1 wait mul release gather:u2 wait mul release wait mul release");
  EXPECT_EQ(Prefetched("limit=1MB,prefetch=513,alpha=9"),
            "gather:u0 gather:u1 gather:u2 wait mul release wait mul release wait mul release")
      << "b and c move together, and stop behind a's place";
  EXPECT_EQ(Prefetched("limit=1MB,prefetch=256,alpha=9"),
            "gather:u0 wait mul release gather:u1 wait mul release gather:u2 wait mul release")
      << "a gather that is too large by itself stays";
}

TEST(Prefetch, FusesNeighboursWhileItPays) {
  // T(256) = 16, T(512) = 24, T(768) = 32 us.
  const std::string rest = " wait mul release wait mul release wait mul release";
  EXPECT_EQ(Prefetched("alpha=1.5"), "gather:u0 gather:u1 gather:u2" + rest) << "32 > 36 does not hold";
  EXPECT_EQ(Prefetched("alpha=1.3"), "gather:u0+u1 gather:u2" + rest) << "32 > 31.2, then 40 > 41.6 does not";
  EXPECT_EQ(Prefetched("alpha=1.25"), "gather:u0+u1 gather:u2" + rest) << "40 > 40 does not hold";
  EXPECT_EQ(Prefetched("alpha=1.2"), "gather:u0+u1+u2" + rest);
}

TEST(Prefetch, ACallThatIsSentUnitByUnitIsNotFused) {
  const std::string cluster = HandCluster("gb_per_s = 0.016\n", "gb_per_s = 0.016\ncoalesce = false\n");
  EXPECT_EQ(Outline(RunText(std::string(kChain), "shard(ranks=2,ahead=0),prefetch(alpha=1.2," + cluster + ")")),
            "gather:u0 gather:u1 gather:u2 wait mul release wait mul release wait mul release");
}

// An op with a large transient (a log-softmax in a model) between the uses of a and of b.
constexpr std::string_view kSpike = R"(interlace 1 captured
module 0 "" "Spike"
param %0: f32[64] "a.w" frozen
param %1: f32[64] "b.w" frozen
input %2: f32[64] "x"
phase micro_batch takes () gives () {
  %3: f32[64] = aten.mul.Tensor(%2, %0) {fwd}
  %4: f32[64] = aten.neg(%3) {fwd}
  %5: f32[64] = aten.exp(%4) {fwd}
  %6: f32[64] = aten.neg(%5) {fwd}
  %7: f32[64] = aten.mul.Tensor(%6, %1) {fwd}
  output(%7) {fwd name="y"}
}
)";

TEST(Prefetch, ASpikeBetweenTwoGathersStopsTheSecond) {
  // P(exp) = 256 of shards + 512 + 10000 inside; where b would start, only 256 + 512 live.
  const std::string profile =
      HandProfile("op \"aten.exp(f32[64])->f32[64]\" us 1 bytes 256 transient 10000 measured\n");
  EXPECT_EQ(Prefetched("limit=11024," + profile, kSpike),
            "gather:u0 wait mul release neg exp gather:u1 neg wait mul release")
      << "10768 + 256 is not under 11024";
  EXPECT_EQ(Prefetched("alpha=9,limit=11025," + profile, kSpike),
            "gather:u0 gather:u1 wait mul release neg exp neg wait mul release");
}

TEST(Prefetch, BackwardIsScannedByItself) {
  const std::string text =
      RunText(std::string(kTwoLayers), "shard(ranks=2,ahead=0),prefetch(alpha=9," + HandCluster() + ")");
  EXPECT_EQ(Outline(text),
            "gather:u0 gather:u1 wait mul release wait mul release sum gather:u1 gather:u0 mul reduce:u1 wait mul "
            "release mul "
            "wait_reduce release reduce:u0 wait mul release wait_reduce release");
}

TEST(Prefetch, DoesNotDependOnWhereGathersWere) {
  for (const char* options : {"limit=1408", "limit=1409,alpha=1.3", "limit=1MB,prefetch=513"}) {
    const std::string pass = ",prefetch(" + HandCluster() + "," + options + ")";
    const std::string expected = Outline(RunText(std::string(kChain), "shard(ranks=2,ahead=0)" + pass));
    EXPECT_EQ(Outline(RunText(std::string(kChain), "shard(ranks=2,ahead=2)" + pass)), expected);
  }
}

TEST(Prefetch, Errors) {
  EXPECT_EQ(RunText(std::string(kChain), "shard(ranks=2),prefetch(cluster=h100-80gb-1)"),
            "error: pass 'prefetch': the program's mesh has 2 ranks, the cluster 'h100-80gb-1' has 1 device; take a "
            "larger cluster or a smaller mesh");
  EXPECT_EQ(
      RunText(std::string(kChain), "shard(ranks=2),prefetch(limit=much)"),
      "error: pass 'prefetch': option limit=much: expected a number of bytes such as 20GiB, 512MB or 1000000, or none");
}

}  // namespace
}  // namespace interlace
