// schedules.h — orders in which the ranks of a pipeline run forward parts (F), backward parts (B) and gradients of
// weights (W) of micro-batches; two stages, four micro-batches:
//
//   gpipe        F0 F1 F2 F3 B0 B1 B2 B3           Huang et al. 2019
//   1f1b         F0 F1 B0 F2 B1 F3 B2 B3           PipeDream-Flush, Narayanan et al. 2021: fewer micro-batches in flight
//   interleaved  1f1b over several stages a rank   Megatron-LM, Narayanan et al. 2021: the pipe fills in shorter parts
//   zero_bubble  F0 F1 B0 F2 B1 F3 B2 W0 B3 W1 ..  Qi et al. 2024, ZB-H1: W fills what the others leave
//   auto         the one that ends first by the times of the stages, of 1f1b and list schedules (list_schedule.h)
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

struct Run {
  Turn turn = Turn::kForward;
  int32_t chunk = 0;  // of the rank's stages: stage chunk * ranks + rank
  int64_t micro_batch = 0;
  friend bool operator==(const Run&, const Run&) = default;
};

struct Shape {
  int64_t rank = 0, ranks = 1, chunks = 1, micro_batches = 1;
  bool split = false;  // W apart from B, but on the first stage
};

// Picoseconds of one micro-batch on one stage, and until what it sends is there.
struct StageTime {
  int64_t forward = 1, backward = 1, weights = 1, message = 0;
  friend bool operator==(const StageTime&, const StageTime&) = default;
};

// `times`: of all stages, for "auto" only. Where what a B sent is waited for (S) stands behind the run that follows;
// with several stages a rank it stands later, since another chunk of the rank it goes to may have its turn first, and
// with "auto" right before its W, so that nothing else waits for the stage that takes it.
// Error: a schedule that does not go with the shape, and which does.
Result<std::vector<Run>> RunsOf(std::string_view schedule, const Shape& shape, const std::vector<StageTime>& times);
// Each W right behind its B where the shape is split.
std::vector<Run> OneForwardOneBackward(const Shape& shape);

}  // namespace interlace::stages
