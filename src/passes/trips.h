// trips.h — journeys of storages out of memory and back, as data: which, and between which ops of the step line.
//
//   use            gap                                                     next use
//   %6   ...  a ][  leave ......... free | . . . . . . . . . . | back ....... need  ][
//               offload.start   offload.wait              reload.start   reload.wait
//
// A storage is in memory at every op but those in [free, back). Over the step's end a gap goes on in the next step:
// then the state is `out` between steps, unless its journey begins at the head of the next one.
#pragma once

#include <vector>

#include "passes/step_line.h"

namespace interlace {

struct Trip {
  int32_t movable = 0;            // index in StepLine::movables
  int32_t after = 0, before = 0;  // the gap: places of the last op of one use and the first of the next
  bool wraps = false;             // the gap goes over the end of the step
  bool clean = false;             // nothing was written since it came back: no copy out
  bool blank = false;             // the next use fills it anew: no copy out, none back, and memory only from then on
  // Places before whose op the four ops go. In a gap that wraps, leave and free are in this step, or, with `next_step`,
  // both at its beginning; back and need are in the next one, counted from its beginning.
  int32_t leave = 0, free = 0, back = 0, need = 0;
  bool next_step = false;
  // Of the four ops among all that go before one op: ascending; equal ones by kind (out of memory first, then into it),
  // then by trip.
  int32_t order[4] = {0, 0, 0, 0};
};

// Every gap of every movable that a trip could fill. `clean` is not decided yet.
std::vector<Trip> GapsOf(const StepLine& line);
// Those gaps, of states that end with their step, that need no copy at all: trips with all their places.
std::vector<Trip> BlankTrips(const StepLine& line);
// Whether the storage is out while the op at `place` runs.
bool IsOutAt(const Trip& trip, int32_t place);
// Whether it never is: it was used before it had gone. (One that goes and comes before one op makes room for what comes
// between.)
bool StaysIn(const Trip& trip);
// Bytes at each op with these trips.
std::vector<int64_t> BytesWith(const StepLine& line, const std::vector<Trip>& trips);
// Which trips copy nothing out: those of a storage that came back unchanged on an earlier trip of the step.
void FindClean(const StepLine& line, std::vector<Trip>& trips);
// Puts the ops in, declares states that lie out between steps.
void WriteTrips(Program& program, const StepLine& line, const std::vector<Trip>& trips);
// Bytes that trips copy out and in, in a step.
struct Traffic {
  int64_t out = 0, in = 0;
};
Traffic TrafficOf(const StepLine& line, const std::vector<Trip>& trips);

}  // namespace interlace
