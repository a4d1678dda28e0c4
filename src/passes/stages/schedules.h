// schedules.h — orders in which the ranks of a pipeline run forward parts (F), backward parts (B) and gradients of
// weights (W) of micro-batches; two stages, four micro-batches:
//
//   gpipe        F0 F1 F2 F3 B0 B1 B2 B3           Huang et al. 2019
//   1f1b         F0 F1 B0 F2 B1 F3 B2 B3           PipeDream-Flush, Narayanan et al. 2021: fewer micro-batches in flight
//   interleaved  1f1b over several stages a rank   Megatron-LM, Narayanan et al. 2021: the pipe fills in shorter parts
//   zero_bubble  F0 F1 B0 F2 B1 F3 B2 W0 B3 W1 ..  Qi et al. 2024, ZB-H1: W fills what the others leave
//   v            zero_bubble over two stages a rank, there and back (deal.h)     Qi et al. 2024, ZB-V
//   auto         the one that ends first by the times of the stages, of 1f1b and list schedules (list_schedule.h), with
//                stages dealt as a V of zero_bubble's kind
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

struct Run {
  Turn turn = Turn::kForward;
  int32_t chunk = 0;  // of the rank's stages
  int64_t micro_batch = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

// What a micro-batch takes on one stage.
struct StageTime {
  int64_t forward = 1, backward = 1, weights = 1;  // picoseconds
  int64_t message = 0;                             // until what it sends is there
  // Bytes behind its forward part, and behind its backward part until the gradients of weights are made.
  int64_t held = 1, kept = 1;
  std::array<int64_t, 3> peak = {1, 1, 1};  // bytes while F, B or W runs
  friend bool operator==(const StageTime&, const StageTime&) = default;
};

// What all ranks know of a pipeline.
struct Pipe {
  Deal deal;
  std::vector<StageTime> times;  // by stage
  std::vector<int64_t> room;     // by rank: bytes of micro-batches at most; empty: as many as 1F1B's first stage
  // By stage: the last one that takes what its backward part sends. Empty: the one before it.
  std::vector<int64_t> takers = {};
  int64_t TakerOf(int64_t stage) const { return takers.empty() ? stage - 1 : takers[static_cast<size_t>(stage)]; }
  int64_t RoomOf(size_t rank) const { return room.empty() ? deal.Stages() : room[rank]; }
  // Without room each counts as one.
  StageTime BytesOf(int64_t stage) const { return room.empty() ? StageTime() : times[static_cast<size_t>(stage)]; }
  friend bool operator==(const Pipe&, const Pipe&) = default;
};

struct Shape {
  int64_t rank = 0;
  Deal deal;
  int64_t micro_batches = 1;
  bool split = false;  // W apart from B, but on the first stage
};

// `pipe`: for "auto"; its takers for "v", too. Where what a B sent is waited for (S) stands behind the run that follows
// it or its W; with several stages a rank it stands later, since another chunk of the rank it goes to may have its turn
// first, and in lists that are made by running all ranks where that rank has begun to take it (Pipe::takers). Error: a
// schedule that does not go with the shape, and which does.
Result<std::vector<Run>> RunsOf(std::string_view schedule, const Shape& shape, const Pipe& pipe);
// Each W right behind its B where the shape is split.
std::vector<Run> OneForwardOneBackward(const Shape& shape);
// F and B of ZB-V on a rank, holding less where they ought to: `fewer` forward parts that it does not begin with, and
// `late` ones that run behind the first backward parts.
struct Less {
  int64_t fewer = 0, late = 0;
};
std::vector<Run> ThereAndBack(int64_t ranks, int64_t rank, int64_t micro_batches, const Less& less = {});

}  // namespace interlace::stages
