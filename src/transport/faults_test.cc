// Everything that can go wrong between ranks, by seed (testing/faults.h). INTERLACE_FAULT_SEED=n runs one seed and prints
// what happened; INTERLACE_SOAK=1 runs forty times as many.
#include "transport/testing/faults.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "base/testing/rounds.h"

namespace interlace {
namespace {

std::string Problems(const FaultCase& one, const FaultRun& run, const char* test = "RanksEndWell") {
  std::string text;
  for (const std::string& problem : run.problems) text += "  " + problem + "\n";
  if (text.empty()) return "";
  return one.Text() + "\n" + text + "alone: INTERLACE_FAULT_SEED=" + std::to_string(one.seed) +
         " transport_test --gtest_filter=Faults." + test + "\n";
}

void RanksEndWell(const char* test, bool encrypts) {
  const char* given = std::getenv("INTERLACE_FAULT_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  const uint64_t count = given != nullptr ? 1 : static_cast<uint64_t>(Rounds(250));
  uint64_t struck = 0, failed = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const FaultCase one = DrawCase(seed);
    const FaultRun run = RunCase(one, {.keep_trace = given != nullptr, .encrypts = encrypts});
    if (given != nullptr) std::printf("%s\n%s", one.Text().c_str(), run.trace.c_str());
    EXPECT_TRUE(run.problems.empty()) << Problems(one, run, test);
    struck += run.struck;
    failed += std::any_of(run.ranks.begin(), run.ranks.end(), [](const RankEnd& end) { return !end.error.empty(); });
  }
  if (given != nullptr) return;
  std::printf("%lu seeds: in %lu a fault struck, in %lu ranks had errors\n", count, struck, failed);
  EXPECT_GT(struck, count / 2);
  EXPECT_GT(failed, count / 4);
}

TEST(Faults, RanksEndWell) { RanksEndWell("RanksEndWell", /*encrypts=*/false); }

TEST(Faults, RanksThatEncryptEndWell) {
  if (!FindCrypto().ok()) GTEST_SKIP() << "no libcrypto here";
  RanksEndWell("RanksThatEncryptEndWell", /*encrypts=*/true);
}

// Seeds, from 1 on, with a fault that `wanted` wants; how many of `count` have a problem whose text has `part`.
int Noticed(int count, const std::string& part, const RunOptions& options,
            const std::function<bool(const FaultCase&)>& wanted) {
  int noticed = 0;
  for (uint64_t seed = 1; count > 0; ++seed) {
    const FaultCase one = DrawCase(seed);
    if (!wanted(one)) continue;
    --count;
    const FaultRun run = RunCase(one, options);
    noticed += std::any_of(run.problems.begin(), run.problems.end(),
                           [&](const std::string& problem) { return problem.find(part) != std::string::npos; });
  }
  return noticed;
}

bool Changes(const FaultCase& one) {
  return one.kind == FaultCase::kStream && one.fault.kind == StreamFault::kFlip && !one.keyed;
}
bool Stalls(const FaultCase& one) { return one.kind == FaultCase::kStall && one.size > 2; }

// The checks above can fail: each defect here is planted, and has to be noticed.
TEST(Faults, MissingChecksumsAreNoticed) {
  EXPECT_EQ(Noticed(40, "wrong numbers", {}, Changes), 0);
  FrameSum::LeaveOut(true);
  EXPECT_GT(Noticed(40, "wrong numbers", {}, Changes), 5);
  FrameSum::LeaveOut(false);
}

TEST(Faults, RanksThatDoNotAskAroundAreNoticed) {
  EXPECT_GT(Noticed(30, "blames an innocent rank", {.lost_patience_ms = 0, .silent_patience_ms = 0}, Stalls), 3);
}

TEST(Faults, RanksThatWaitForTooLongAreNoticed) {
  EXPECT_GT(Noticed(12, "waited ", {.waits_longer = 3}, Stalls), 3);
}

TEST(Faults, ASeedGivesTheSameRunAgain) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const FaultCase one = DrawCase(seed);
    const FaultRun first = RunCase(one, {.keep_trace = true}), second = RunCase(one, {.keep_trace = true});
    EXPECT_EQ(first.trace, second.trace);
    EXPECT_EQ(first.digest, second.digest);
    EXPECT_FALSE(first.trace.empty());
  }
  EXPECT_NE(RunCase(DrawCase(1)).digest, RunCase(DrawCase(2)).digest);
}

// Rank 0 waits when it is stopped, and its time is over when it goes on: what rank 1 sent meanwhile is there.
TEST(Faults, ARankThatWasStoppedTakesWhatHasCome) {
  for (const int64_t elements : {8, 40'000}) {  // the second goes through buffers that it does not fit into
    FaultCase one;
    one.seed = 1;
    one.network.buffer_bytes = 64 << 10;
    one.kind = FaultCase::kHiccup;
    one.when_ns = 10 * kMs;
    one.for_ns = 1'200 * kMs;
    one.ops = {{.kind = FaultCase::Op::kSend, .elements = elements, .root = 1, .to = 0, .compute_ns = {0, 900 * kMs}}};
    const FaultRun run = RunCase(one);
    EXPECT_TRUE(run.struck);
    EXPECT_TRUE(run.problems.empty()) << Problems(one, run);
  }
}

}  // namespace
}  // namespace interlace
