// planning.h — `interlace plan` as one function from a request to JSON: the plans, where their bytes and times go, why
// not the obvious alternatives, and what to change when nothing fits.
//
//   {"plans": [{...plan_json.h..., "text": "interlace-plan 1...", "explained": [{"bytes": [...], "phases": [...]}]}],
//    "complete": true, "bound_us": ..., "seconds": ..., "pairs": ..., "frontiers": ...,
//    "why_not": [{"name": "one stage", "step_us": ..., "slower": 0.31, "complete": true} |
//                {"name": ..., "least_bytes": ..., "over_bytes": ...}],
//    "from_us": ...,
//    "nothing_fits": {"least_bytes": ..., "over_bytes": ..., "host_memory": ..., "devices": 64, "sequence": 1024}}
//
// A comparison that was stopped has "at_least": 0.12, how much slower it is for certain. "from_us" is there with
// `before`: the best step on its stages, 0 where they are no help.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "cost/cluster.h"
#include "plan/plan_text.h"
#include "plan/tune.h"

namespace interlace::plan {

struct PlanRequest {
  std::string model_text;  // model_text.h
  std::string model;       // name, for the plan
  ClusterSpec cluster;
  std::string space = "full";  // of Baselines()
  bool runnable = false;       // only what the runtime can train, predicted as it does: tp alike on all stages
  bool flash_attention = true;
  std::string dtype = "bfloat16";  // of weights and gradients; float32 masters beside bfloat16
  int64_t global_batch = 1, sequence = 1;
  int64_t memory_limit = 0;  // bytes of a device; 0: what the cluster leaves a program, less a tenth
  int64_t host_limit = 0;    // bytes of a node's host; 0: none
  double time_limit_s = 0;   // of everything: the search and what it is compared with; 0: none for the search, and for
                             // comparisons as long as the search took, 20 s at least
  int32_t top = 1;
  int32_t threads = 0;
  bool why_not = true;
  std::optional<Plan>
      before;  // of before something changed, a plan that keeps its rules: the search begins with its stages
};

// (what is being done, done, total, best step so far in us or 0)
using PlanProgress = std::function<void(std::string_view, int64_t, int64_t, double)>;

// Error: what Tune refuses (a batch that nothing divides, uneven nodes), an unknown space or dtype (did you mean).
Result<std::string> MakePlans(const PlanRequest& request, const PlanProgress& progress = {});

// A plan file with its predictions made anew on a model and cluster, those of stages, boundaries and the whole. Error:
// what VerifyPlan says of it, memory included; strategies that the model's sizes do not allow.
// With `over_memory` peaks may be above the limit: what a plan takes that does not fit.
Result<PlanFile> PredictPlan(const PlanFile& file, std::string_view model_text, const ClusterSpec& cluster,
                             bool over_memory = false);

// One model at one sequence length, for many plans and clusters: its layers are read and counted once.
class PlanPredictor {
 public:
  static Result<PlanPredictor> Create(std::string_view model_text, int64_t sequence);
  // As above. Not for several threads at once.
  Result<PlanFile> Predict(const PlanFile& file, const ClusterSpec& cluster, bool over_memory);
  // Standard deviation of ln(measured / predicted) of a predicted plan: that of the stack's whole steps, and of the
  // links as far as they are not hidden. 0: the cluster does not say.
  Result<double> ErrorOf(const PlanFile& predicted, const ClusterSpec& cluster);

 private:
  std::shared_ptr<LayerSource> layers_;
};

// Where the bytes and times of a predicted plan's stages go: the list that MakePlans calls "explained".
Result<std::string> ExplainPlan(const PlanFile& file, std::string_view model_text, const ClusterSpec& cluster);

// The pipeline of a plan as a Chrome trace: a rank is a stage. Error: times beyond 64 bits.
Result<std::string> PlanTrace(const PlanFile& file);

}  // namespace interlace::plan
