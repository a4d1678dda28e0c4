// carried_places.h — places for what runs save for later runs of the same micro-batch: each storage keeps one from its
// save to its last load, or until a transfer that still reads it has been waited for, and one that became free is taken
// by the next save of that size (with very many runs, under that name). How many are needed is the window of the run
// order:
//
//   all forward first   f0 f1 f2 f3 b0 b1 b2 b3    four places       f0 saves 0, f1 1, f2 2, f3 3
//   1F1B                f0 f1 b0 f2 b1 f3 b2 b3    two places        f0 saves 0, f1 1, b0 loads 0, f2 saves 0, ...
#pragma once

#include <cstdint>
#include <vector>

#include "ir/program.h"

namespace interlace {

struct CarriedRun {
  const Phase* phase = nullptr;
  std::vector<int32_t> loads,
      saves;                     // places, by entry of the phase's lists; what is loaded and saved again keeps its own
  std::vector<int32_t> through;  // places in use before the run and behind it that it does not touch
};

struct CarriedPlaces {
  std::vector<CarriedRun> runs;          // of a step, in order
  std::vector<const Carried*> saved_by;  // by place: the first save into it, for its size
};

// Of a verified program. Error: so many runs or values at once that they are not planned.
Result<CarriedPlaces> PlaceCarried(const Program& program);

// Bytes that are saved across each run of a step; empty: the program carries nothing.
Result<std::vector<int64_t>> BytesThroughRuns(const Program& program);

}  // namespace interlace
