// auto.h — plan=auto: which weights of a model are cut how, found by search.
//
//   roles      roles.h: one choice for the same weight of all blocks; biases follow
//   estimate   estimate.h: the cuts are propagated through the program with its blocks folded, and added up
//   search     neighbours in the order of use are chosen together, window after window, until nothing gets better; a
//              block of few enough combinations is then tried in all of them
//   judge      the best few, the model's own plan and no cut at all, each on the whole program with the strategy and the
//              optimizer step after it, in the simulator
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/cost_options.h"
#include "passes/tensor/cutter.h"
#include "passes/tensor/plan.h"
#include "passes/tensor/roles.h"

namespace interlace::tensor {

struct Judged {
  std::string name;  // "search", "the model's plan", "whole"
  std::vector<PlanEntry> plan;
  int64_t time_ps = 0, bytes = 0;  // of a step; peak of a rank
};

struct FoundPlan {
  std::vector<Judged> judged;  // the chosen first
  struct Reason {
    std::string pattern;
    Held held;
    int64_t time_ps = 0;                           // of the estimate
    std::vector<std::pair<Held, int64_t>> others;  // the same with this role held otherwise
  };
  std::vector<Reason> reasons;         // empty: no plan of the search was chosen
  std::vector<std::string> undivided;  // weights that stay whole along their longest dimension, and why
  int64_t estimates = 0;
};

// A captured program with the axis in its mesh; `own`: the model's plan, or empty. Never slower in prediction than that
// plan, or than the whole program, where both fit into the limit. Error: of the cost model.
Result<FoundPlan> FindPlan(const Program& program, const std::vector<PlanEntry>& own, const CutterOptions& options,
                           const PassCosts& costs);

// As meta lines, which explain.h reads: tensor.judged, tensor.reasons, tensor.estimates.
void WriteReasons(Program& program, const FoundPlan& found);

}  // namespace interlace::tensor
