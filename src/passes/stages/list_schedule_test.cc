// Orders of runs: what is in them, what they hold, and how much of a step is left empty.
#include "passes/stages/list_schedule.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "passes/stages/played.h"

namespace interlace::stages {
namespace {

// Micro-batches that a stage holds at most, from their forward part until nothing needs their values.
int64_t MostHeld(const std::vector<Run>& list, bool first) {
  int64_t held = 0, most = 0;
  for (const Run& run : list) {
    if (run.turn == Turn::kForward) most = std::max(most, ++held);
    if (run.turn == (first ? Turn::kBackward : Turn::kWeights)) --held;
  }
  return most;
}

Lists OneForwardOneBackwardOfAll(int64_t ranks, int64_t micro_batches) {
  Lists out;
  for (int64_t r = 0; r < ranks; ++r)
    out.push_back(OneForwardOneBackward({.rank = r, .deal = {ranks}, .micro_batches = micro_batches, .split = true}));
  return out;
}

// Time of the slowest stage's work alone, and what a schedule adds to it.
int64_t Busy(const std::vector<StageTime>& times, int64_t micro_batches) {
  int64_t busy = 0;
  for (size_t s = 0; s < times.size(); ++s) {
    busy = std::max(busy, micro_batches * (times[s].forward + times[s].backward + (s > 0 ? times[s].weights : 0)));
  }
  return busy;
}

Pipe Straight(std::vector<StageTime> times) {
  return {{static_cast<int64_t>(times.size())}, std::move(times), {}};
}

// The first stage makes its gradients of weights with its backward parts.
std::vector<StageTime> Even(size_t stages, int64_t message) {
  std::vector<StageTime> times(stages, {100, 100, 100, message});
  times[0] = {100, 200, 0, message};
  return times;
}

TEST(ListSchedule, EveryRunOnceAndInOrder) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 100; ++round) {
    const size_t stages = 2 + random() % 7;
    const auto micro_batches = static_cast<int64_t>(1 + random() % 20);
    std::vector<StageTime> times;
    for (size_t s = 0; s < stages; ++s) {
      const auto time = [&] { return static_cast<int64_t>(1 + random() % 100); };
      times.push_back({time(), time(), time(), static_cast<int64_t>(random() % 50)});
    }
    const Pipe pipe = Straight(times);
    const Lists found = FastestSchedule(pipe, micro_batches);
    for (size_t s = 0; s < stages; ++s) {
      std::array<int64_t, 4> next = {0, 0, 0, 0};
      for (const stages::Run& run : found[s]) EXPECT_EQ(run.micro_batch, next[static_cast<size_t>(run.turn)]++);
      EXPECT_EQ(next[static_cast<size_t>(Turn::kForward)], micro_batches);
      EXPECT_EQ(next[static_cast<size_t>(Turn::kBackward)], micro_batches);
      EXPECT_EQ(next[static_cast<size_t>(Turn::kWeights)], s == 0 ? 0 : micro_batches);
      EXPECT_LE(MostHeld(found[s], s == 0), static_cast<int64_t>(stages));
    }
    const int64_t end = Play(found, pipe);
    EXPECT_GE(end, Busy(times, micro_batches));
    EXPECT_LE(end, Play(OneForwardOneBackwardOfAll(static_cast<int64_t>(stages), micro_batches), pipe));
    EXPECT_LE(end, Play(ListSchedule(Straight(std::vector<StageTime>(stages)), micro_batches, {}), pipe));
  }
}

// Whose stages send gradients when those of weights are made, too.
int64_t BubbleOf1F1B(size_t stages, int64_t micro_batches, int64_t message) {
  const std::vector<StageTime> times(stages, {100, 200, 0, message});
  const auto ranks = static_cast<int64_t>(stages);
  Lists lists;
  for (int64_t r = 0; r < ranks; ++r)
    lists.push_back(OneForwardOneBackward({.rank = r, .deal = {ranks}, .micro_batches = micro_batches}));
  return Play(lists, Straight(times)) - micro_batches * 300;
}

TEST(ListSchedule, AtMostHalfOfTheBubbleOf1F1B) {
  for (const size_t stages : {4, 6, 8, 12, 16}) {
    for (const int64_t message : {0, 5}) {
      const std::vector<StageTime> times = Even(stages, message);
      const auto micro_batches = static_cast<int64_t>(4 * stages);
      const Pipe pipe = Straight(times);
      const int64_t found = Play(FastestSchedule(pipe, micro_batches), pipe) - Busy(times, micro_batches);
      EXPECT_LE(found, BubbleOf1F1B(stages, micro_batches, message) / 2) << stages << " stages, message " << message;
    }
  }
}

// Two stages of half the time on each rank, there and back.
Pipe Bent(int64_t ranks, int64_t message) {
  Pipe pipe{{ranks, 2, true}, std::vector<StageTime>(static_cast<size_t>(2 * ranks), {50, 50, 50, message}), {}};
  pipe.times[0].backward = 100, pipe.times[0].weights = 0;
  return pipe;
}

// The last rank has nothing to do until the first micro-batch has come down to it, and nobody waits for more.
TEST(ListSchedule, AVHoldsWhat1F1BHoldsAndHasASixthOfItsBubble) {
  for (const int64_t ranks : {2, 3, 4, 8, 16}) {
    const Pipe pipe = Bent(ranks, 0);
    const int64_t micro_batches = 4 * ranks;
    const Lists found = FastestSchedule(pipe, micro_batches);
    for (int64_t r = 0; r < ranks; ++r) {
      const auto rank = static_cast<size_t>(r);
      EXPECT_LE(MostBytes(found[rank], pipe, rank), 2 * ranks) << ranks << " ranks";
      std::array<std::array<int64_t, 4>, 2> next = {};
      for (const stages::Run& run : found[rank])
        EXPECT_EQ(run.micro_batch, next[static_cast<size_t>(run.chunk)][static_cast<size_t>(run.turn)]++);
      for (size_t chunk = 0; chunk < 2; ++chunk) {
        EXPECT_EQ(next[chunk][static_cast<size_t>(Turn::kForward)], micro_batches);
        EXPECT_EQ(next[chunk][static_cast<size_t>(Turn::kBackward)], micro_batches);
        EXPECT_EQ(next[chunk][static_cast<size_t>(Turn::kWeights)], r == 0 && chunk == 0 ? 0 : micro_batches);
      }
    }
    const int64_t bubble = Play(found, pipe) - micro_batches * 300;
    EXPECT_EQ(bubble, 50 * (ranks - 1)) << ranks << " ranks";
    EXPECT_EQ(6 * bubble, BubbleOf1F1B(static_cast<size_t>(ranks), micro_batches, 0)) << ranks << " ranks";
  }
}

// Whatever the times and bytes of stages: no rank holds more than 1F1B's fullest.
TEST(ListSchedule, NoMoreBytesThanThereIsRoomFor) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    const auto ranks = static_cast<int64_t>(2 + random() % 4), micro_batches = static_cast<int64_t>(1 + random() % 16);
    Pipe pipe{{ranks, 2, true}, {}, {}};
    for (int64_t s = 0; s < 2 * ranks; ++s) {
      const auto time = [&] { return static_cast<int64_t>(1 + random() % 100); };
      const int64_t held = time(), kept = std::min(held, time());
      pipe.times.push_back({time(), time(), time(), time() / 2, held, kept, {held, held, kept}});
    }
    const Lists start = Filled(pipe, micro_batches, 0);
    pipe.room.assign(start.size(), 0);  // with any, bytes count
    for (size_t rank = 0; rank < start.size(); ++rank) pipe.room[rank] = MostBytes(start[rank], pipe, rank);
    const Lists found = FastestSchedule(pipe, micro_batches);
    EXPECT_LE(Play(found, pipe), Play(start, pipe));
    EXPECT_TRUE(Fits(found, pipe));
  }
}

TEST(ListSchedule, WhatWaitsForItselfNeverEnds) {
  const Lists wrong = {{{Turn::kBackward, 0, 0}, {Turn::kForward, 0, 0}},
                       {{Turn::kForward, 0, 0}, {Turn::kBackward, 0, 0}}};
  EXPECT_EQ(Play(wrong, Straight(Even(2, 0))), -1);
}

}  // namespace
}  // namespace interlace::stages
