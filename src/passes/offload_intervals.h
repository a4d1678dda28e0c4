// offload_intervals.h — offload intervals: from one use of a storage to the next it is out of memory. As data: which
// storage, and between which ops of the step line.
//
//   use            interval                                                next use
//   %6   ...  a ][  leave ......... free | . . . . . . . . . . | back ....... need  ][
//               offload.start   offload.wait              reload.start   reload.wait
//
// A storage is in memory at every op but those in [free, back). Over the step's end an interval goes on in the next
// step: then the state is `out` between steps, unless its interval begins at the head of the next one.
#pragma once

#include <string>
#include <vector>

#include "passes/step_line.h"

namespace interlace {

struct Interval {
  int32_t movable = 0;            // index in StepLine::movables
  int32_t after = 0, before = 0;  // the last op of one use and the first of the next, as indices in the line
  bool wraps = false;             // it goes over the end of the step
  bool clean = false;             // nothing was written since it came back: no copy out
  bool fresh = false;             // the next use fills it anew: no copy out, none back, and memory only from then on
  // The ops of the line before which the four ops go. Where it wraps, leave and free are in this step, or, with
  // `next_step`, both at its beginning; back and need are in the next one, counted from its beginning.
  int32_t leave = 0, free = 0, back = 0, need = 0;
  bool next_step = false;
  // Of the four ops among all that go before one op: ascending; equal ones by kind (out of memory first, then into it),
  // then by interval.
  int32_t order[4] = {0, 0, 0, 0};
};

// Between all uses of all movables. Where the ops go, and `clean`, is not decided yet.
std::vector<Interval> IntervalsOf(const StepLine& line);
// Those, of states that end with their step, that need no copy at all, with all decided.
std::vector<Interval> FreshIntervals(const StepLine& line);
// Whether it never is: it was used before it had gone. (One that goes and comes before one op makes room for what comes
// between.)
bool IsEmpty(const Interval& interval);
// Bytes at each op with these intervals.
std::vector<int64_t> BytesWith(const StepLine& line, const std::vector<Interval>& intervals);
// Decides which copy nothing out: those of a storage that came back unchanged from an earlier interval of the step.
void FindClean(const StepLine& line, std::vector<Interval>& intervals);
// Puts the ops in, declares states that lie out between steps, and leaves in `meta offload` the bytes that a step
// copies, and `more`.
void WriteIntervals(Program& program, const StepLine& line, const std::vector<Interval>& intervals,
                    const std::string& more = "");

}  // namespace interlace
