// simulate_set.h — predicts a step of a pipeline: each rank runs the program of its stage (ir/program_set.h).
#pragma once

#include <memory>
#include <vector>

#include "cost/cluster.h"
#include "cost/profile_table.h"
#include "ir/program_set.h"
#include "sim/engine.h"
#include "sim/memory_curve.h"

namespace interlace {

struct SetSimulation {
  std::vector<std::unique_ptr<Lowered>> stages;
  EngineInput input;  // every rank
  EngineOutput output;
  std::vector<MemoryCurve> memory;  // by stage
};

// `set` is checked, and outlives the result. Error: of the cost model or the engine, with the stage.
Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile);

}  // namespace interlace
