// plan_text.h — a plan as a file that a person can read, compare and edit, and the rules that it has to keep.
//
//   interlace-plan 1
//   model "gpt-22b"
//   cluster "l4-24gb-32"
//   devices 32 per_node 8
//   blocks 48
//   global_batch 512
//   sequence 2048
//   flash_attention yes
//   dtype "bfloat16"                   # of weights and gradients in forward and backward; bfloat16 has float32 masters
//   memory_limit 23622320128           # bytes of a device
//   template overlap                   # or runtime: predicted as this runtime trains it; or no line
//   accumulation 64                    # micro-batches of a step, the same on every rank
//   space "full"
//   predicted step_us 41250000 pipeline_us 41100000 bound_us 41250000
//
//   stage 0
//     layers 12 embedding              # blocks 0 to 11
//     devices 0..7
//     micro_batch 2 dp 4 tp 2
//     zero 1
//     recompute full 8 selective 2     # 2 are kept
//     offload weights 0 gradients 0 states 0.25 activations 0
//     predicted t_us 512.5 d_us 20.5 forward_us 170 backward_us 342.5 first_us 12.5 last_us 8 send_us 3.5
//     predicted peak_forward 20123456789 peak_backward 21123456789 host 1048576
//
// What runs is everything but the `predicted` lines, which are what the planner said of it. Lines stand in any order
// within their part; '#' begins a comment. Micro-batches in flight follow from the stage's place and are not written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cost/cluster.h"
#include "plan/plan.h"

namespace interlace::plan {

inline constexpr std::string_view kPlanKind = "plan";  // a file begins with "interlace-plan" and the version
inline constexpr int64_t kPlanVersion = 1;

// A plan with what it was made for.
struct PlanFile {
  Plan plan;
  std::string dtype = "bfloat16";  // or "float32"
  int64_t blocks = 1;              // of the model
  int64_t devices = 1, per_node = 1;
  int64_t memory_limit = 0;  // bytes of one device
  bool as_run = false;       // predicted as this runtime trains it, not by the overlap template (stage_model.h)
  struct Place {
    int32_t line = 0;  // of `stage`, from 1; 0: not read from a file
    int64_t last_device = 0;
  };
  std::vector<Place> places;  // one a stage; empty: not read from a file
};

// The file of a plan, with comments. ParsePlan of it gives the same plan, and its print the same text.
std::string PrintPlan(const PlanFile& file);
// Error: another version, unknown or missing or repeated lines (did you mean), numbers out of range. Keeps no rule of
// VerifyPlan.
Result<PlanFile> ParsePlan(std::string_view text, std::string_view file);

// Every rule a plan keeps by itself and, given a cluster, there: error with up to eight broken ones, each with its
// stage and name.
//
//   layers    stages hold all blocks; the first alone has the embedding, the last alone the head
//   devices   dp * tp is the stage's range; ranges follow one another and use all devices of the cluster
//   mesh      a stage lies within a node or is whole nodes; tensor-parallel groups lie within a node
//   batch     accumulation * micro_batch * dp is the global batch, in every stage
//   zero      0 to 3
//   recompute full + selective blocks are at most the stage's layers
//   offload   shares are between 0 and 1
//   dtype     bfloat16 or float32
//   template  the runtime cuts all stages alike: one tp
//   memory    predicted peaks are within the limit, and the limit within the cluster's device
//   host      what a node holds on its host is within the cluster's memory_gib
//   cluster   devices and nodes are those of the given cluster
//
// `over_memory`: without the rules memory and host.
Status VerifyPlan(const PlanFile& file, const ClusterSpec* cluster = nullptr, bool over_memory = false);

}  // namespace interlace::plan
