#include "ir/testing/optimizers.h"

#include <cmath>

namespace interlace::testing {

std::vector<double> DefaultHyper(const std::string& optimizer) {
  if (optimizer == "sgd")
    return {0.05, 0.9, 0.1, 0.02, 0, 1, 0};   // lr momentum dampening weight_decay nesterov t maximize
  return {0.01, 0.9, 0.95, 1e-8, 0.1, 1, 0};  // lr beta1 beta2 eps weight_decay t maximize
}

Status StepElement(const std::string& optimizer, const std::vector<double>& hyper, double grad, double* weight,
                   double* first, double* second) {
  if (hyper.size() < 7) return MakeError("optimizer ", optimizer, " needs 7 hyper-parameters, not ", hyper.size());
  double lr = hyper[0], t = hyper[kStepIndex];
  if (hyper[6] != 0) grad = -grad;
  if (optimizer == "sgd") {
    double momentum = hyper[1];
    grad += hyper[3] * *weight;
    if (first != nullptr && momentum != 0) {
      *first = t <= 1 ? grad : momentum * *first + (1 - hyper[2]) * grad;
      grad = hyper[4] != 0 ? grad + momentum * *first : *first;
    }
    *weight -= lr * grad;
    return Ok{};
  }
  if (optimizer == "adamw") {
    *weight *= 1 - lr * hyper[4];
  } else {
    grad += hyper[4] * *weight;
  }
  *first += (grad - *first) * (1 - hyper[1]);
  *second = *second * hyper[2] + (1 - hyper[2]) * grad * grad;
  double correction1 = 1 - std::pow(hyper[1], t), correction2 = 1 - std::pow(hyper[2], t);
  *weight -= lr / correction1 * *first / (std::sqrt(*second) / std::sqrt(correction2) + hyper[3]);
  return Ok{};
}

}  // namespace interlace::testing
