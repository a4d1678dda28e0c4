// simulate_set.h — predicts a step of a pipeline (ir/program_set.h): all stages together, each with its own program.
//
//   Result<SetSimulation> s = SimulateSet(set, cluster, &profile, {});       everything about one set
//   Result<SetModel> m = SetModel::Create(set, cluster, &profile, {});       what each op takes, looked up once,
//   m->Predict(orders)                                                      for as many orders of the runs as one likes
//
// The ranks of a stage that are alike are simulated as one. They are where every host of a stage has the same ranks of
// the same stages, and ranks send to other stages only.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
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

// A run of a phase: its index in Program::phases, and the first micro-batch (kNone: it runs once a step).
struct StageRun {
  int32_t phase = 0;
  int64_t micro_batch = kNone;
};
using StageOrder = std::vector<StageRun>;  // of a step

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

struct SetPrediction {
  int64_t makespan_ps = 0;
  std::vector<StageUse> use;        // by stage
  std::vector<int64_t> peak_bytes;  // by stage
};

struct SetSimulation {
  ClusterSpec cluster;
  std::vector<std::string> files;                // of the stages
  std::vector<std::unique_ptr<Lowered>> stages;  // their programs
  EngineInput input;
  EngineOutput output;
  std::vector<int32_t> stage_of;    // by simulated rank
  std::vector<int32_t> first_rank;  // by stage: a simulated one
  int64_t ranks = 1;                // of the mesh
  std::vector<StageUse> use;
  std::vector<MemoryCurve> memory;
  std::vector<PathPiece> path;
  CostModel::Coverage coverage;
  std::string fingerprint;  // of the profile
  bool foreign = false;
  int64_t makespan_ps() const { return output.makespan_ps; }
};

class SetModel {
 public:
  // `set` is checked, and it and the profile outlive the model. Error: of the cost model, with the stage; a profile of
  // another machine; too many ops.
  static Result<SetModel> Create(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                 const SetOptions& options);
  // In the programs' own orders. Error: of the engine.
  Result<SetSimulation> Simulate() const;
  // In other orders, one for each stage, in which what phases hand on, save and load fits as in the programs' own.
  // Error: stages that wait for one another for ever.
  Result<SetPrediction> Predict(const std::vector<StageOrder>& orders) const;
  // The programs' own.
  std::vector<StageOrder> Orders() const;

 private:
  // Bytes of a phase, for the peak of any order.
  struct PhaseBytes {
    int64_t peak = 0, loads = 0, saves = 0;
  };
  explicit SetModel(const ProgramSet& set) : set_(&set) {}
  Status AddStage(size_t stage, const ClusterSpec& cluster, const ProfileTable* profile);
  void FoldRanks();
  EngineInput InputOf(const std::vector<const Lowered*>& stages) const;
  int64_t PeakOf(size_t stage, const Lowered& lowered) const;

  const ProgramSet* set_;
  std::vector<CostModel> models_;  // by stage
  std::vector<Lowered> lowered_;
  std::vector<std::vector<PhaseBytes>> bytes_;  // by stage and distinct phase
  std::optional<EngineInput::Stages> folded_;
  std::vector<int32_t> stage_of_, first_rank_;
  std::string fingerprint_;
  bool foreign_ = false;
};

Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                  const SetOptions& options = {});

std::string SetSimulationJson(const SetSimulation& simulation);
std::string SetSimulationSummary(const SetSimulation& simulation);
Timeline SetTimeline(const SetSimulation& simulation);

// As SimulateText: `output` is "json", "summary" or "trace". Error: also what CheckProgramSet finds.
Result<std::string> SimulateSetText(const ProgramSet& set, std::string_view cluster_text, std::string_view profile_text,
                                    std::string_view output, const SetOptions& options);

}  // namespace interlace
