#include "base/min_cut.h"

#include <gtest/gtest.h>

#include <random>

#include "base/testing/rounds.h"

namespace interlace {
namespace {

std::string Sides(const std::vector<CutNode>& nodes) {
  std::string out;
  for (CutSide side : MinCut(nodes)) out += "<|>"[static_cast<int>(side)];
  return out;
}

TEST(MinCut, ChainIsCutWhereItIsCheapest) {
  EXPECT_EQ(Sides({{3, {1}, true}, {2, {2}}, {4, {}, false, true}}), "<|>");
  EXPECT_EQ(Sides({{2, {1}, true}, {2, {2}}, {2, {}, false, true}}), "<<|");  // of equal ones the nearest to the sink
  EXPECT_EQ(Sides({{0, {1}, true}, {2, {}, false, true}}), "|>");
  EXPECT_EQ(Sides({{5, {}, true, true}, {7, {}}}), "|<");  // what leads nowhere stays at the sources
}

TEST(MinCut, OneNodeForTwoBehindIt) {
  EXPECT_EQ(Sides({{5, {1, 2}, true}, {3, {}, false, true}, {3, {}, false, true}}), "|>>");
  EXPECT_EQ(Sides({{7, {1, 2}, true}, {3, {}, false, true}, {3, {}, false, true}}), "<||");
  EXPECT_EQ(Sides({{kNeverCut, {2}, true}, {1, {2}, true}, {9, {}, false, true}}), "<<|");
}

// Against all cuts of small graphs: none is cheaper, no path is left, and the sides are those of the cut.
TEST(MinCut, RandomGraphsAgainstAllCuts) {
  std::mt19937 random(1);
  for (int round = 0; round < Rounds(200); ++round) {
    const int count = 1 + static_cast<int>(random() % 9);
    std::vector<CutNode> nodes(count);
    for (int i = 0; i < count; ++i) {
      nodes[i].cost = static_cast<int64_t>(random() % 6);
      nodes[i].source = random() % 3 == 0;
      nodes[i].sink = random() % 3 == 0;
      for (int j = i + 1; j < count; ++j)
        if (random() % 3 == 0) nodes[i].next.push_back(j);
    }
    const auto parted = [&](uint32_t cut) {  // edges lead upwards: one sweep
      std::vector<char> reached(count, 0);
      for (int i = 0; i < count; ++i) {
        if (cut >> i & 1 || !(nodes[i].source || reached[i])) continue;
        if (nodes[i].sink) return false;
        for (int32_t next : nodes[i].next) reached[next] = 1;
      }
      return true;
    };
    const auto cost = [&](uint32_t cut) {
      int64_t sum = 0;
      for (int i = 0; i < count; ++i) sum += cut >> i & 1 ? nodes[i].cost : 0;
      return sum;
    };
    int64_t least = kNeverCut;
    for (uint32_t cut = 0; cut < 1U << count; ++cut)
      if (parted(cut)) least = std::min(least, cost(cut));
    uint32_t found = 0;
    const std::vector<CutSide> sides = MinCut(nodes);
    for (int i = 0; i < count; ++i) {
      found |= static_cast<uint32_t>(sides[i] == CutSide::kCut) << i;
      EXPECT_FALSE(sides[i] == CutSide::kSink && nodes[i].source);
      for (int32_t next : nodes[i].next) EXPECT_FALSE(sides[i] == CutSide::kSource && sides[next] == CutSide::kSink);
    }
    EXPECT_TRUE(parted(found));
    EXPECT_EQ(cost(found), least);
  }
}

}  // namespace
}  // namespace interlace
