// Unshard by hand. Units a, b, c of 256, 512 and 1024 bytes (shards 128, 256, 512: 896 persistent), each used in
// forward and backward by a sum. T(V)/V = (8 us + V/32) / V falls with V, so a ranks before b before c.
#include "ir/liveness.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

constexpr std::string_view kSums = R"(interlace 1 captured
module 0 "" "Sums"
param %0: f32[256] "c.w" frozen
param %1: f32[128] "b.w" frozen
param %2: f32[64] "a.w" frozen
phase micro_batch takes () gives () {
  %3: f32[] = aten.sum(%0) {fwd}
  %4: f32[] = aten.sum(%1) {fwd}
  %5: f32[] = aten.sum(%2) {fwd}
  %6: f32[] = aten.sum(%2) {bwd}
  %7: f32[] = aten.sum(%1) {bwd}
  %8: f32[] = aten.sum(%0) {bwd}
  %9: f32[] = aten.add.Tensor(%5, %8) {bwd}
  output(%9) {bwd name="loss"}
}
)";

// The units that are gathered once.
std::string Kept(const std::string& text) {
  Result<Program> program = Parse(text, "kept");
  if (!program.ok()) return text;
  std::vector<int> gathers(program->units.size(), 0);
  for (OpId id : program->phases[0].ops) {
    if (program->op(id).name != "gather.start") continue;
    for (UnitId unit : program->op(id).units) ++gathers[unit];
  }
  std::string out;
  for (size_t unit = 0; unit < gathers.size(); ++unit) {
    if (gathers[unit] == 1) out += (out.empty() ? "u" : "+u") + std::to_string(unit);
  }
  return out;
}

std::string Unsharded(const std::string& options, const std::string& before = "") {
  return Kept(RunText(std::string(kSums),
                      "shard(ranks=2,ahead=0)" + before + ",unshard(" + HandCluster() + "," + options + ")"));
}

// The peak without any kept unit is at the sums of c: shards 896, c 1024, and scalars of 4 bytes. At its first use one
// result (1924), at its second %5, which is used at the end, and the result (1928).
TEST(Unshard, TakesWhatStaysUnderTheLimit) {
  EXPECT_EQ(Unsharded("limit=1928"), "");
  // a (256 more at the second sum of c only if it is still held there, and it is not: its last use is before).
  EXPECT_EQ(Unsharded("limit=1929"), "u1+u2") << "a and b are gone before the peak, so they cost nothing there";
}

TEST(Unshard, CountsAUnitWhereItIsGatheredAlready) {
  // With c kept as well: at the sums of a, shards 896, c 1024, b 512, a 256 and scalars %5, %6: 2696.
  EXPECT_EQ(Unsharded("limit=2696"), "u1+u2");
  EXPECT_EQ(Unsharded("limit=2697"), "u0+u1+u2");
}

TEST(Unshard, SkipsAndGoesOn) {
  // b counts as twice as fast to have when its gather is slow: units of one size class are ranked by time per byte, so
  // a comes first, then b, then c. A spike while a is not gathered and b would be makes b too much, c is gathered there
  // already.
  constexpr std::string_view kText = R"(interlace 1 captured
module 0 "" "Skip"
param %0: f32[256] "c.w" frozen
param %1: f32[128] "b.w" frozen
phase micro_batch takes () gives () {
  %2: f32[] = aten.sum(%1) {fwd}
  %3: f32[256] = aten.exp(%0) {fwd}
  %4: f32[] = aten.sum(%0) {bwd}
  %5: f32[] = aten.sum(%1) {bwd}
  output(%5) {bwd name="loss"}
}
)";
  // Shards 768. Peak at exp: c 1024, its result 1024 (%2 and %3 are dead at once): 2816. Keeping b adds 512 there, c
  // nothing.
  const std::string shard = "shard(ranks=2,ahead=0),unshard(" + HandCluster() + ",";
  EXPECT_EQ(Kept(RunText(std::string(kText), shard + "limit=2817)")), "u0");
  EXPECT_EQ(Kept(RunText(std::string(kText), shard + "limit=3328)")), "u0") << "3328 is not under 3328";
  EXPECT_EQ(Kept(RunText(std::string(kText), shard + "limit=3329)")), "u0+u1");
}

TEST(Unshard, ThePeakIsWhatWasPredicted) {
  for (int64_t limit : {1929, 2200, 2697, 4000}) {
    const std::string text = RunText(std::string(kSums), "shard(ranks=2,ahead=0),accumulate(steps=3),unshard(" +
                                                             HandCluster() + ",limit=" + std::to_string(limit) + ")");
    Result<Program> program = Parse(text, "peak");
    ASSERT_TRUE(program.ok()) << text;
    for (const Phase& phase : program->phases) {
      Result<PhaseLiveness> liveness = ComputeLiveness(*program, phase);
      ASSERT_TRUE(liveness.ok());
      EXPECT_LT(liveness->peak_bytes + liveness->persistent_bytes, limit) << phase.name;
    }
  }
}

TEST(Unshard, AccumulationHoldsTheUnitThroughAllMicroBatches) {
  // Between micro-batches a kept unit is live everywhere: with c at its sums, a and b count too (896 + 1792 + 8).
  const auto kept = [](const std::string& limit) {
    const std::string text = RunText(std::string(kSums), "shard(ranks=2,ahead=0),accumulate(steps=2),unshard(" +
                                                             HandCluster() + ",limit=" + limit + ")");
    Result<Program> program = Parse(text, "kept");
    return program.ok() ? static_cast<int>(program->phases[0].gives.size()) : -1;
  };
  EXPECT_EQ(kept("1929"), 0);
  EXPECT_EQ(kept("1MB"), 3);
}

TEST(Unshard, AListIsTakenWhateverTheLimit) {
  EXPECT_EQ(Unsharded("limit=1,units=u0"), "u0");
  EXPECT_EQ(Unsharded("limit=1,units=u0+u2"), "u0+u2");
  EXPECT_EQ(Unsharded("limit=1,units=all"), "u0+u1+u2");
  EXPECT_EQ(Unsharded("limit=1MB,units=none"), "");
}

TEST(Unshard, Errors) {
  const std::string shard = "shard(ranks=2),unshard(units=";
  EXPECT_EQ(RunText(std::string(kSums), shard + "u0+3)"),
            "error: pass 'unshard': option units: expected units such as u0+u3, found '3'");
  EXPECT_EQ(RunText(std::string(kSums), shard + "u7)"),
            "error: pass 'unshard': option units: there is no u7; the program has 3 units");
  EXPECT_EQ(RunText(std::string(kSums), shard + "all),unshard(units=u1)"),
            "error: pass 'unshard': option units: u1 is not gathered more than once in a step, so there is nothing "
            "to keep");
}

TEST(Unshard, AfterPrefetchTheRestOfACoalescedGatherStays) {
  const std::string text =
      RunText(std::string(kSums), "shard(ranks=2,ahead=0),prefetch(alpha=1," + HandCluster() + "),unshard(units=u1)");
  EXPECT_EQ(Outline(text),
            "gather:u0+u1+u2 wait sum release wait sum wait sum release gather:u2+u0 wait sum release sum release "
            "wait sum release add");
}

TEST(Unshard, KeepsBits) {
  for (int64_t steps : {1, 2, 3}) {
    for (const char* units : {"all", "u0", "u1"}) {
      for (const char* before : {"", "prefetch(alpha=1),", "reorder,"}) {
        const std::string pipeline = "shard(ranks=2),accumulate(steps=" + std::to_string(steps) + "),update," + before +
                                     "unshard(units=" + units + ")";
        EXPECT_EQ(BitsDiffer(std::string(kTwoLayers), pipeline, steps), "") << pipeline;
      }
    }
  }
}

}  // namespace
}  // namespace interlace
