// tune.h — the best training plan of a model on a cluster: accumulation steps, stages, and everything within each
// stage.
//
// For every G that divides the batch and every number of stages S: frontiers of the stages (stage_model.h), joined by
// the exact choice between stages (inter_stage.h). Frontiers take most of the time, so a frontier is computed only
// where it can matter. At first a bound stands for each frontier (its least time, whatever the memory). The best plan
// over bounds and computed frontiers is found, the frontiers that it uses are computed, and so on, until the best plan
// uses computed frontiers alone; no plan is better. Pairs (G, S) are taken in order of their bounds; a pair whose bound
// does not beat the best plan so far is left out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cost/cluster.h"
#include "plan/inter_stage.h"
#include "plan/layer_cost.h"
#include "plan/plan.h"
#include "plan/stage_model.h"

namespace interlace::plan {

// Which plans there are to choose from. Default: all.
struct Space {
  std::string name = "full";
  StageOptions stage;          // Tune fills in the batch and the memory limits
  bool free_devices = true;    // stages may differ in their number of devices
  bool one_layout = false;     // one (b, dp, tp) for all stages
  bool one_tp = false;         // one tp for all stages
  int32_t layer_slack = -1;    // layers of a stage are within so many of the average; -1: any
  bool equal_layers = false;   // only S that divides the blocks
  bool powers_of_two = false;  // G only
  // False: chosen as if every micro-batch took t + d / G. Such plans, and those of stage.overlap = false, are then
  // costed by the true model.
  bool imbalance_aware = true;
  std::vector<int32_t> stages = {};  // S only these; empty: any
};
Space FullSpace();
Space PaperSpace();     // Mist, Table 2
Space ArtifactSpace();  // what its artifact searches: ALGORITHMS "Choice within and between stages"

// Bytes that a program may use of a device and of a node's host: what is given, or nine tenths of what the cluster has.
int64_t DeviceBytesFor(const ClusterSpec& cluster, int64_t given);
int64_t HostBytesFor(const ClusterSpec& cluster, int64_t given);

struct TuneProgress {
  int64_t done = 0, total = 0;  // (G, S) pairs
  int64_t frontiers = 0;
  double best_us = 0, bound_us = 0;  // 0: no plan yet
};

struct TuneOptions {
  Space space;
  std::string model;  // name, for the plan
  int64_t global_batch = 1, sequence = 1;
  bool flash_attention = true;
  int64_t device_bytes = 0;    // 0: what the cluster leaves a program, less a tenth
  int64_t host_bytes = 0;      // of a node; 0: nine tenths of what the cluster says, no limit where it says nothing
  int32_t top = 1;             // plans wanted, each of other shape
  int32_t threads = 0;         // 0: all cores
  double time_limit_s = 0;     // 0: none
  double tolerance = 0;        // relative: a plan faster by less is not looked for
  const Plan* warm = nullptr;  // of before something changed, a plan that keeps its rules: tried first
  std::function<void(const TuneProgress&)> progress = {};
};

struct TuneResult {
  std::vector<Plan> plans;              // best first; empty: nothing fits
  double bound_us = 0;                  // no plan of the space is faster
  bool complete = true;                 // false: out of time
  int64_t pairs = 0, pairs_solved = 0;  // (G, S): in all, and not left out by their bound
  int64_t frontiers = 0, points = 0, checks = 0;
  double warm_us = 0;  // the best on the stages of `warm`; 0: there are none here, or it was not looked at
};

// Error: a batch that no accumulation, micro-batch and data parallelism divide; a cluster of uneven nodes; layer costs;
// no plans wanted.
Result<TuneResult> Tune(const LayerSource& layers, const ClusterSpec& cluster, const TuneOptions& options);

// The times and memory of a plan's strategies under other options (another model of overlap, another memory limit), and
// its totals. Error: a strategy that the model does not know.
Result<Plan> Reprice(const Plan& plan, const LayerSource& layers, const ClusterSpec& cluster,
                     const StageOptions& options);

// One micro-batch's activation of `bytes` in all from stage to stage and its gradient back, microseconds. Every device
// sends its share (tensor parallel carries sequence parallel); unequal layouts take more messages.
double BoundaryUs(const ClusterSpec& cluster, double bytes, const Layout& from, const Layout& to, bool inside_node);

}  // namespace interlace::plan
