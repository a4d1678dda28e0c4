// simulate.h — predicts a training step: time, what it is made of, and memory. Text in, JSON or a summary or a trace
// out.
//
//   Result<Simulation> s = Simulate(program, cluster, &profile, {});
//   s->makespan_ps(), s->memory.peak.bytes, s->path, SimulationJson(*s), SimulationTimeline(*s)
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cost/cost_model.h"
#include "sim/arena_picture.h"
#include "sim/bounds.h"
#include "sim/critical_path.h"
#include "sim/engine.h"
#include "sim/memory_curve.h"
#include "sim/what_if.h"
#include "trace/timeline.h"

namespace interlace {

struct SimulateOptions {
  std::vector<std::pair<int64_t, double>> slow = {};  // rank, factor: its compute takes that many times longer
  bool every_rank = false;                            // simulate all ranks although they are alike
  std::string machine = {};                           // fingerprint that the profile must have; "" accepts any
  bool foreign = false;                               // use a profile of another machine, and mark the result
  WhatIf what_if = {};
};

// "gather"; of activations along an axis of their own (ActivationAxisOf) "gather tp".
std::string ShownLane(Lane lane, std::string_view axis);

struct LaneUse {
  std::string lane;  // ShownLane
  int64_t transfers = 0;
  int64_t bytes = 0;
  int64_t busy_ps = 0;
  int64_t exposed_ps = 0;  // busy while the rank computes nothing
};

struct RankUse {
  int64_t end_ps = 0;
  int64_t compute_ps = 0;
  int64_t blocked_ps = 0;      // held by waits
  std::vector<LaneUse> lanes;  // those that were used
};

struct Simulation {
  std::unique_ptr<Lowered> lowered;
  ClusterSpec cluster;
  EngineInput input;
  EngineOutput output;
  int64_t ranks = 1;         // of the program; input.programs.size() of them were simulated
  std::vector<RankUse> use;  // by simulated rank
  std::vector<Bound> bounds;
  std::vector<PathPiece> path;
  MemoryCurve memory;
  CostModel::Coverage coverage;
  std::string fingerprint;  // of the profile
  bool foreign = false;
  bool measured = false;  // the times are of a step that ran (measured.h)
  int64_t makespan_ps() const { return output.makespan_ps; }
  int64_t lower_bound_ps() const { return bounds.front().time_ps; }
  // Standard deviation of ln(measured / predicted) step time, from the cluster's whole steps and links; 0: not known,
  // as of a CPU whose ops no profile has.
  double error() const;
};

// `program` must outlive the simulation. Errors: of the cost model, the engine, the memory curve; ranks out of range; a
// profile of another machine.
Result<Simulation> Simulate(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile,
                            const SimulateOptions& options);

std::string SimulationJson(const Simulation& simulation);
// What a person wants to know, about 40 lines.
std::string SimulationSummary(const Simulation& simulation);
Timeline SimulationTimeline(const Simulation& simulation);
// Where everything lies on a simulated rank. Error: accelerators have no arena, or the program no plan.
Result<ArenaPicture> PictureOf(const Simulation& simulation, const RankRecord& rank);
// The trace and the memory snapshot as files (trace/chrome_trace.h, trace/memory_snapshot.h). On CPUs the snapshot has
// the planned addresses, elsewhere those that an allocator would give.
std::string SimulationTrace(const Simulation& simulation, int32_t rank = -1);
Result<std::string> SimulationSnapshot(const Simulation& simulation);

}  // namespace interlace
