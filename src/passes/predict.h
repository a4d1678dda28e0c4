// predict.h — time and memory of many variants of one program, by simulation.
//
//   INTERLACE_ASSIGN(Prediction p, Predict(variant, costs));   p.time_ps, p.bytes, p.stalls
#pragma once

#include <vector>

#include "base/result.h"
#include "passes/cost_options.h"
#include "sim/lowered.h"

namespace interlace {

// Time that the compute lane was held by waits for one transfer, summed over a step.
struct Stall {
  bool reduce = false;
  Part part = Part::kNone;
  UnitId unit = kNone;  // the first of the call
  int64_t time_ps = 0;
};

struct Prediction {
  int64_t time_ps = 0;        // of a step
  int64_t bytes = 0;          // peak of a rank
  std::vector<Stall> stalls;  // longest first
};

// Error: of the cost model, the engine, the memory curve. `with_stalls` costs a walk over the step. `known`: ops of the
// program that this one is a variant of (KnownOps: only transfers differ).
Result<Prediction> Predict(const Program& program, const PassCosts& costs, bool with_stalls = false,
                           const KnownOps& known = {});
// What a rank needs for sure to run it: `live_bytes` (Prediction::bytes), and on CPUs what they take with all in its
// place (sim/memory_curve.h). Costs about as much as judging.
Result<int64_t> PlacedBytesOf(const Program& program, const PassCosts& costs, int64_t live_bytes);
Result<KnownOps> KnownOpsOf(const Program& program, const PassCosts& costs);
// No execution of the program's ops, in whatever order, is faster (sim/bounds.h).
Result<int64_t> LowerBoundPs(const Program& program, const PassCosts& costs);

}  // namespace interlace
