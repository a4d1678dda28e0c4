// stage_times.h — what a pipeline's parts take, for `order(schedule=auto)`, whose ranks must all see the same: times of
// one micro-batch on each stage, the bytes that it leaves there, and how many of them a rank has room for.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "passes/cost_options.h"
#include "passes/stages/balance.h"
#include "passes/stages/schedules.h"

namespace interlace::stages {

struct Measured {
  Pipe pipe;                       // without room
  std::vector<int64_t> whole;      // by stage: bytes while a backward part runs that makes all gradients
  std::vector<int64_t> of_params;  // by rank: bytes
};

// Error: sizes that are not numbers yet.
Result<Measured> Measure(const Program& program, const Flow& flow, const Layout& layout,
                         const std::vector<Border>& borders, CostModel& model, const PassCosts& costs,
                         const std::string& axis);
// By rank of the deal that `of` has: bytes of micro-batches with which no rank's memory is above that of 1F1B's fullest
// rank, whose stages `plain` are of (one a rank), whatever of parameters, gradients and two moments is sharded over
// `data` ranks.
std::vector<int64_t> RoomOf1F1B(const Measured& plain, const Measured& of, int64_t micro_batches, int64_t data);

// The meta lines "stages.times" and "stages.room", from which `order` has it.
void WritePipe(Program& program, const Pipe& pipe);
// Of stages dealt as a V: "stages.deal" and, where a backward part sends to another stage than the one before,
// "stages.takers".
void WriteDeal(Program& program, const Layout& layout);
// Error: not what WritePipe writes. Without such lines no times.
Result<Pipe> ReadPipe(const Program& program, int64_t ranks, int64_t chunks);

}  // namespace interlace::stages
