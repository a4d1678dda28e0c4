// optimizers.h — one element of an optimizer step, in double; the formulas of torch.optim.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/result.h"

namespace interlace::testing {

// `hyper` as in docs/architecture.md, with t set. `first` and `second` are exp_avg and exp_avg_sq, or momentum and
// nothing; they point at doubles that the caller rounds and stores. Error: too few hyper-parameters.
Status StepElement(const std::string& optimizer, const std::vector<double>& hyper, double grad, double* weight,
                   double* first, double* second);
// Values that exercise every term.
std::vector<double> DefaultHyper(const std::string& optimizer);
inline constexpr size_t kStepIndex = 5;  // position of t in hyper

}  // namespace interlace::testing
