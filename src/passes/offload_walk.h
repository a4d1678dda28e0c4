// offload_walk.h — gives intervals their places by walking the step with a clock and two lanes.
//
//   compute  |==op==|==op==|..held..|==op==|
//   d2h         [--- u3.exp_avg ---][--- u3.exp_avg_sq ---]      leaves as soon as its use ends
//   h2d      [--- u2.exp_avg ---][--- u2.exp_avg_sq ---]         in order of need, as soon as there is room until then
//
// A fresh interval copies nothing: its memory goes behind the one use and comes before the next.
// A copy out is waited for where it has ended, or where its room is needed; a copy in where its storage is used. While
// the compute lane is held, copies that end make room for others, which start then. What is out when an op runs is
// known exactly, so no op is ever above the limit.
#pragma once

#include "passes/offload_intervals.h"

namespace interlace {

struct WalkCosts {
  int64_t latency_ps = 0, work_ps = 0;  // of one copy
};

struct WalkOptions {
  int64_t limit = 0;
  double slack = 1.2;      // times its own work after which a copy out counts as ended where nothing waits for it
  bool overlap = false;    // a copy that waits behind another has its latency behind it (CPUs)
  bool next_step = false;  // input: Interval::next_step stays as it is; else the walk decides which copies out
                           // wait for the next step
};

struct WalkResult {
  int64_t time_ps = 0;
  int32_t over = -1;  // the index of an op that does not fit, or -1
  int64_t bytes = 0;  // that it would need
};

// Sets leave, free, back, need, order and next_step of every interval. `out` and `in` by interval.
WalkResult WalkStep(const StepLine& line, const std::vector<WalkCosts>& out, const std::vector<WalkCosts>& in,
                    const WalkOptions& options, std::vector<Interval>& intervals);

}  // namespace interlace
