// alternatives.h — the spaces that a request for a plan searches, and what the plan found is compared with. Inside the
// room only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "plan/baselines.h"

namespace interlace::plan {

struct Training {
  std::string dtype = "bfloat16";  // of weights and gradients
  bool runnable = false;           // only what this runtime trains, predicted as it does
  bool cpu = false;                // on CPUs
  bool tied = false;               // embedding and head share a parameter
};

// Bytes of a parameter. `as_run`: as the runtime trains, whose gradients have the dtype of the master weights. Error:
// dtype.
Status SetBytes(StageOptions& stage, std::string_view dtype, bool as_run);

// The spaces of a baseline, with the dtype and what the runtime cannot do taken out. Error: unknown name or dtype (did
// you mean).
Result<Baseline> SpacesOf(std::string_view name, const Training& training);

// What a person would try first: the same space without one of the things that the best plan does.
std::vector<Baseline> AlternativesOf(const Baseline& searched, const Plan& best);

}  // namespace interlace::plan
