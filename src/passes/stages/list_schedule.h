// list_schedule.h — orders of a pipeline's runs made by running it: whoever is free takes what is there, a backward
// part before a forward part before gradients of weights, which fill what would be waits. With equal times that is
// ZB-H1 of Qi et al. 2024; with those of the stages it fits them. Of stages dealt as a V forward and backward parts are
// in the order of ZB-V at first, and gradients of weights fill the waits.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/stages/schedules.h"

namespace interlace::stages {

using Lists = std::vector<std::vector<Run>>;  // by rank

struct ListOptions {
  // Stage k holds `ranks` - k micro-batches at most, from their forward part until nothing needs their values, as 1F1B
  // does; else as many as there is room for.
  bool as_1f1b = false;
  double worth = 0;  // gradients of weights begin where the wait that is known is this part of their time
};

// One stage a rank; the first has no gradients of weights apart.
Lists ListSchedule(const Pipe& pipe, int64_t micro_batches, const ListOptions& options);
// Dealt as a V.
Lists Filled(const Pipe& pipe, int64_t micro_batches, double worth, const Less& less = {});
// The one that ends first of 1F1B (one stage a rank) with gradients of weights behind their backward parts and of list
// schedules, annealed: runs that others wait for change places. None holds more bytes on a rank than there is room for,
// but where 1F1B or all that there is does. The last few that were asked for are remembered: all stages ask the same.
Lists FastestSchedule(const Pipe& pipe, int64_t micro_batches);

}  // namespace interlace::stages
