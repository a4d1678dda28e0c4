// simulate_set.h — predicts a step of a pipeline (ir/program_set.h): all stages together, each with its own program.
//
//   Result<SetSimulation> s = SimulateSet(set, cluster, &profile, {});
//
// The ranks of a stage that are alike are simulated as one. They are where every host of a stage has the same ranks of
// the same stages, and ranks send to other stages only.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cost/cost_model.h"
#include "ir/program_set.h"
#include "sim/critical_path.h"
#include "sim/engine.h"
#include "sim/memory_curve.h"
#include "trace/timeline.h"

namespace interlace {

struct SetOptions {
  bool every_rank = false;   // simulate all ranks although they are alike
  std::string machine = {};  // fingerprint that the profile must have; "" accepts any
  bool foreign = false;      // use a profile of another machine, and mark the result
};

// Where the time of a stage goes, on its first rank; the sum is that of the step. Of a wait, what passes until the
// other side has begun is the other's; then the transfer's.
struct StageUse {
  int64_t compute_ps = 0;    // of micro-batches
  int64_t optimizer_ps = 0;  // of what runs once a step, with the waits for its transfers
  int64_t before_ps = 0;     // for activations that a stage before it had not made, or gradients that it had not taken
  int64_t behind_ps = 0;     // for gradients, or activations, of a stage behind it
  int64_t fill_ps = 0;       // whatever the wait, before its first op of a micro-batch
  int64_t drain_ps = 0;      // for other stages, after its last
  int64_t transfers_ps = 0;  // for transfers under way
  int64_t launch_ps = 0;     // for the host
  int64_t Bubble() const { return before_ps + behind_ps + fill_ps + drain_ps + transfers_ps + launch_ps; }
  int64_t Sum() const { return compute_ps + optimizer_ps + Bubble(); }
};

struct SetSimulation {
  ClusterSpec cluster;
  std::vector<std::string> files;                // of the stages
  std::vector<std::unique_ptr<Lowered>> stages;  // their programs
  EngineInput input;
  EngineOutput output;
  std::vector<int32_t> stage_of;  // by simulated rank
  int64_t ranks = 1;              // of the mesh
  std::vector<StageUse> use;
  std::vector<MemoryCurve> memory;
  std::vector<PathPiece> path;
  CostModel::Coverage coverage;
  std::string fingerprint;  // of the profile
  bool foreign = false;
  int64_t makespan_ps() const { return output.makespan_ps; }
};

// `set` is checked. Error: of the cost model, with the stage; of the engine; a profile of another machine; too many
// ops.
Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                  const SetOptions& options = {});

std::string SetSimulationJson(const SetSimulation& simulation);
std::string SetSimulationSummary(const SetSimulation& simulation);
Timeline SetTimeline(const SetSimulation& simulation);

// All of it as text, for bindings. `cluster_text` is a file's text or a preset's name; `profile_text` may be "".
// `output` is "json", "summary" or "trace". Error: also what CheckProgramSet finds.
Result<std::string> SimulateSetText(const ProgramSet& set, std::string_view cluster_text, std::string_view profile_text,
                                    std::string_view output, const SetOptions& options);

}  // namespace interlace
