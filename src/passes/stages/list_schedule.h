// list_schedule.h — orders of a pipeline's runs made by running it: whoever is free takes what is there, a backward
// part before a forward part before gradients of weights, which fill what would be waits. With equal times that is
// ZB-H1 of Qi et al. 2024; with those of the stages it fits them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "passes/stages/schedules.h"

namespace interlace::stages {

struct ListOptions {
  // Micro-batches that stage k holds at most, from their forward part until nothing needs their values: `ranks` - k as
  // 1F1B does, or `ranks` on all, as many as its first stage.
  bool as_1f1b = false;
  double worth = 0;  // gradients of weights begin where the wait that is known is this part of their time
};

// One list a stage. `times`: of each; the first stage has no gradients of weights apart.
std::vector<std::vector<Run>> ListSchedule(const std::vector<StageTime>& times, int64_t micro_batches,
                                           const ListOptions& options);
// When the last run of such lists ends, each begun as soon as its rank is free and what it needs is there (gradients of
// weights also need that the stage before has begun to take what the backward part sent). -1: never.
int64_t EndOf(const std::vector<std::vector<Run>>& runs, const std::vector<StageTime>& times);
// The one that ends first of 1F1B with gradients of weights behind their backward parts and of list schedules that hold
// no more micro-batches on any stage than 1F1B does on its first, annealed: runs that others wait for change places.
std::vector<std::vector<Run>> FastestSchedule(const std::vector<StageTime>& times, int64_t micro_batches);

}  // namespace interlace::stages
