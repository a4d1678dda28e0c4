#include "sim/simulate_set.h"

#include <gtest/gtest.h>

#include "base/digest.h"
#include "ir/testing/two_stages.h"
#include "sim/testing/random_step.h"

namespace interlace {
namespace {

TEST(SimulateSet, TwoStagesOfTwoRanks) {
  const std::string texts[] = {testing::FirstStage(testing::k1F1BOfTwo), testing::SecondStage()};
  std::string file = "interlace-set 1\naxis pp\n";
  for (int i = 0; i < 2; ++i)
    file += "stage " + std::to_string(i) + " \"" + std::to_string(i) + "\" digest \"" + Digest(texts[i]) + "\"\n";
  Result<ProgramSet> set = ParseProgramSet(
      file, "net.set", [&](const std::string& name) -> Result<std::string> { return texts[name == "1"]; });
  ASSERT_TRUE(set.ok()) << set.error().ToString();
  ASSERT_TRUE(CheckProgramSet(*set).ok());
  Result<SetSimulation> s = SimulateSet(*set, RoundCluster(4, 4), nullptr);
  ASSERT_TRUE(s.ok()) << s.error().ToString();
  // Ranks 0 and 1 are the first stage. Of each pair four activations of 128 bytes go on, and four gradients come back.
  int messages = 0;
  for (const TransferRecord& t : s->output.transfers) {
    if (!t.op->IsMessage()) continue;
    ++messages;
    ASSERT_EQ(t.members.size(), 2u);
    EXPECT_EQ(t.members[1] - t.members[0], 2);
    EXPECT_EQ(t.end_ps - t.start_ps, 128'000);
  }
  EXPECT_EQ(messages, 2 * (4 + 4));
  // The second stage stands still until the first activation has come, and the first stage while a gradient is made.
  const RankRecord &first = s->output.ranks[0], &second = s->output.ranks[2];
  EXPECT_EQ(s->output.ranks[1].end_ps, first.end_ps);
  EXPECT_EQ(s->output.ranks[3].end_ps, second.end_ps);
  for (const std::vector<int64_t>* ends : {&first.end_ps, &second.end_ps})
    EXPECT_LE(ends->back(), s->output.makespan_ps);
  // The first stage holds one activation more while it works on the next: begin, f0 f1 b0 f2 b1 f3 b2 b3, update.
  EXPECT_EQ(s->memory[0].through, (std::vector<int64_t>{0, 0, 128, 128, 128, 128, 128, 128, 0, 0}));
  EXPECT_TRUE(s->memory[1].through.empty());
}

}  // namespace
}  // namespace interlace
