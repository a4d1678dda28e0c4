// estimate.h — what a step takes when weights are cut so, as a sum: the cuts are propagated through the folded program
// (fold.h), and each op and transfer of what comes out is added up, each as often as its block is there.
//
//   transfers of the axis, nothing hidden
//   + the longer of compute and the transfers of gradients and shards over the other axes
//   + the optimizer step of what a rank holds
//
// About a millisecond for a transformer, and a tenth of that where its ops were seen before (steps.h). The simulator
// (auto.cc) has the last word.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "passes/cost_options.h"
#include "passes/tensor/cutter.h"
#include "passes/tensor/fold.h"
#include "passes/tensor/roles.h"
#include "passes/tensor/steps.h"

namespace interlace::tensor {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

// For one thread; several share `steps`. All that is given must outlive it, and it stays where it is.
class Estimate {
 public:
  static Result<std::unique_ptr<Estimate>> Create(const Folded& folded, const std::vector<Role>& roles, Steps& steps,
                                                  const CutterOptions& options, const PassCosts& costs);
  struct Time {
    double ps = 0;                // kNever: it cannot be cut so
    bool gathers_weight = false;  // a weight is made whole again for an operator: no gain
  };
  Time Of(const Choices& choices);

 private:
  Estimate(const Folded& folded, const std::vector<Role>& roles, Steps& steps, const CutterOptions& options,
           const PassCosts& costs);
  std::vector<std::pair<size_t, Held>> CutBy(const Choices& choices) const;
  Steps::Sum Propagate(const std::vector<std::pair<size_t, Held>>& cuts);
  void Cost(const Op& op, Steps::Left& left);
  double Times(const Op& op) const;  // that it stands for
  double SharedSums(const std::vector<ValueId>& gradients);

  const Folded& folded_;
  const std::vector<Role>& roles_;
  Steps& steps_;
  CutterOptions options_;
  const PassCosts& costs_;
  Facts facts_;
  Program variant_;
  std::unique_ptr<CostModel> model_;
  std::vector<std::pair<int32_t, int32_t>> owner_;  // by parameter: its role, and which of its biases it is (-1: none)
  std::vector<std::string> data_axes_;
  Steps::Walker walker_;
};

}  // namespace interlace::tensor
