// comparisons.h — how much slower the best plans of other spaces are: why not the obvious alternatives. Inside the room
// only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/baselines.h"

namespace interlace::plan {

struct Comparison {
  std::string name = {}, what = {};
  bool skipped = false;         // the time was up
  std::string impossible = {};  // why there can be no such plan; empty: there may be one
  double step_us = 0;           // of the best found; 0: none
  bool complete = false;        // none of the space is faster by more than the tolerance
  double bound_us = 0;          // none is faster than this; 0: nothing is known
  int64_t least_bytes = 0;      // of a device, where nothing was found to fit
};

// Each is searched by a thread of its own, as many at a time as options.threads says, all within so many seconds of
// wall time; what one leaves of its share goes to those after it. `options` as for Tune, but for space and time limit.
// `begun(i)` is called now and then, by this thread.
std::vector<Comparison> CompareAll(const std::vector<Baseline>& others, const LayerSource& layers,
                                   const ClusterSpec& cluster, const TuneOptions& options, double seconds,
                                   const std::function<void(size_t)>& begun);

}  // namespace interlace::plan
