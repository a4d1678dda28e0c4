// schedule.h — when parameters are gathered and gradients reduced, as data: what the search changes, and what the pass
// `schedule` carries out. Text in, program out; every micro-batch phase gets the same schedule.
//
//   schedule(keep=u0+u7,forward=u1+u2:1;u3:2,backward=u3+u2:1;u1,reduce=u3:1;u1+u2)
//
// keep: units that stay gathered through the step (keep.h). forward, backward: coalesced gathers, one after the other
// as they are needed, each with the number of steps it is issued ahead (none: 0); a step is an op that first needs
// something gathered. reduce: coalesced reductions; the number says how many later reductions start before it is waited
// for. A unit that is not listed travels alone, `ahead` steps ahead (option; the reductions `late`).
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/pass_options.h"

namespace interlace {

struct Schedule {
  static constexpr int32_t kAtOnce = 1 << 20;  // steps ahead: at the head of the part
  struct Bucket {
    std::vector<UnitId> units;
    int32_t ahead = 0;
    friend bool operator==(const Bucket&, const Bucket&) = default;
  };
  std::vector<UnitId> keep;  // ascending
  std::vector<Bucket> forward, backward, reduce;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// The options of the pass, and the whole of it as text.
PassOptions OptionsOf(const Schedule& schedule);
std::string PrintSchedule(const Schedule& schedule);
// Error: a unit the program has not, one that is listed twice, bad syntax.
Result<Schedule> ReadSchedule(const Program& program, const PassOptions& options);

// What a program does now (gathers of its first micro-batch phase, reductions of its last one); kept units are those
// gathered once although `before`, the program before any such pass, gathers them more often.
Result<Schedule> ScheduleOf(Program& program, const Program& before);

// Carries it out on a program after shard, accumulate and update (in which nothing has been moved or merged before).
Status ApplySchedule(Program& program, const Schedule& schedule);

// The pass. Options: keep, forward, backward, reduce.
Result<bool> SchedulePass(Program& program, const PassOptions& options);

}  // namespace interlace
