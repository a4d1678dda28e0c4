// reorder.h — gathers and waits for reductions take the places that SimpleFSDP gives them (3.2.2, Tables 5 and 6).
//
//   forward=before        forward=after        backward
//   gather.start(i+1)     wait(i)              reduce.wait(i)
//   wait(i)               gather.start(i+1)    reduce.start(i+1)
//
// Within one part of a phase, gather i+1 is issued just before or just after the wait for gather i, in the order of
// first uses; the first keeps its place. The wait for reduction i goes just before the start of reduction i+1, that for
// the last one to the end. The defaults are the paper's best row: forward=before, backward=after. Runs after shard,
// accumulate and bucket.
#pragma once

#include "base/result.h"
#include "passes/pass_options.h"

namespace interlace {

class Program;

Result<bool> Reorder(Program& program, const PassOptions& options = {});

}  // namespace interlace
