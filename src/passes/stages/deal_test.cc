// Stages dealt as a V: who has which, what is refused, and that ranks are balanced, not stages.
#include "passes/stages/deal.h"

#include <gtest/gtest.h>

#include <numeric>

#include "passes/stages/played.h"
#include "passes/stages/stage_times.h"
#include "passes/testing/training_case.h"

namespace interlace::stages {
namespace {

TEST(Deal, ThereAndBack) {
  const Deal v{3, 2, true}, turns{3, 2};
  std::vector<int32_t> of_v, of_turns;
  for (int64_t stage = 0; stage < 6; ++stage) {
    of_v.push_back(v.RankOf(stage)), of_turns.push_back(turns.RankOf(stage));
    EXPECT_EQ(v.StageOf(v.RankOf(stage), v.ChunkOf(stage)), stage);
    EXPECT_EQ(turns.StageOf(turns.RankOf(stage), turns.ChunkOf(stage)), stage);
  }
  EXPECT_EQ(of_v, (std::vector<int32_t>{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(of_turns, (std::vector<int32_t>{0, 1, 2, 0, 1, 2}));
}

TrainingCase Deep(uint64_t seed) {
  TrainingCase test;
  test.shape.seed = seed;
  test.shape.layers = 16;
  test.shape.max_width = 24;
  return test;
}

std::string RefusalOf(const std::string& passes) {
  Program program = Deep(1).Captured();
  const Status done = Apply(program, passes);
  return done.ok() ? "" : done.error().ToString();
}

TEST(Deal, WhatDoesNotGoTogether) {
  EXPECT_EQ(RefusalOf("canonicalize,mesh(axes=pp:2),pipeline(deal=v,cluster=local-2)"),
            "pass 'pipeline': deal=v gives each rank two stages, not 1; write chunks=2");
  const std::string rest = "replicate(axis=dp),accumulate(steps=2),update,";
  const std::string together =
      "pass 'order': schedule=v and stages that are dealt as a V go together: write pipeline(chunks=2,deal=v), "
      "or "
      "neither";
  const std::string bent =
      "canonicalize,mesh(axes=pp:2+dp:1),pipeline(deal=v,chunks=2,backward=split,cluster=local-2),";
  const std::string straight = "canonicalize,mesh(axes=pp:2+dp:1),pipeline(backward=split,cluster=local-2),";
  EXPECT_EQ(RefusalOf(bent + rest + "order(schedule=v)"), "");
  EXPECT_EQ(RefusalOf(bent + rest + "order(schedule=1f1b)"), together);
  EXPECT_EQ(RefusalOf(straight + rest + "order(schedule=v)"), together);
}

// The slowest rank's time of the stages that a pass makes, each of whose ranks has a stage and its mirror image.
int64_t Slowest(const TrainingCase& test, int64_t ranks, const std::string& deal) {
  Program program = test.Captured();
  const Status done = Apply(program, "canonicalize,mesh(axes=pp:" + std::to_string(ranks) +
                                         "),pipeline(chunks=2,deal=" + deal + ",cluster=h100-80gb-16)");
  if (!done.ok()) return -1;
  const Result<Pipe> pipe = ReadPipe(program, ranks, 2);
  EXPECT_TRUE(pipe.ok() && static_cast<int64_t>(pipe->times.size()) == 2 * ranks);
  int64_t slowest = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t time = 0;
    for (const int64_t stage : {rank, 2 * ranks - 1 - rank}) {
      const StageTime& of = pipe->times[static_cast<size_t>(stage)];
      time += of.forward + of.backward + of.weights;
    }
    slowest = std::max(slowest, time);
  }
  return slowest;
}

TEST(Deal, RanksAreBalancedNotStages) {
  int faster = 0, slower = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const int64_t ranks = 2 + static_cast<int64_t>(seed % 3);
    const int64_t bent = Slowest(Deep(seed), ranks, "v"), straight = Slowest(Deep(seed), ranks, "turns");
    if (bent < 0 || straight < 0) continue;
    faster += bent < straight ? 1 : 0;
    slower += bent > straight ? 1 : 0;
  }
  EXPECT_GT(faster, 10);
  EXPECT_LT(slower, faster / 2);  // what sums of gradients take is not known where borders are chosen
}

Pipe PipeOf(uint64_t seed, const std::string& options, int64_t chunks) {
  Program program = Deep(seed).Captured();
  const Status done =
      Apply(program, "canonicalize,mesh(axes=pp:2),pipeline(backward=split,micro_batches=12,cluster=h100-80gb-16," +
                         options + ")");
  if (!done.ok()) return {};
  const std::string* deal = program.Meta("stages.deal");
  const Result<Pipe> pipe = ReadPipe(program, 2, chunks > 0 ? chunks : deal == nullptr ? 1 : 2);
  EXPECT_TRUE(pipe.ok());
  return pipe.ok() ? *pipe : Pipe();
}

// Chosen by the times of the stages, and only where it fits.
TEST(Deal, AutoTakesWhatEndsFirst) {
  int bent = 0, straight = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Pipe chosen = PipeOf(seed, "deal=auto", 0), plain = PipeOf(seed, "deal=turns", 1);
    if (chosen.times.empty() || plain.times.empty()) continue;
    const Lists found = FastestSchedule(chosen, 12);
    EXPECT_TRUE(!chosen.deal.v || Fits(found, chosen)) << "seed " << seed;
    EXPECT_LE(Play(found, chosen), Play(FastestSchedule(plain, 12), plain)) << "seed " << seed;
    ++(chosen.deal.v ? bent : straight);
  }
  EXPECT_GT(bent, 0);
  EXPECT_GT(straight, 0);
}

}  // namespace
}  // namespace interlace::stages
