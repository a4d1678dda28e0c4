// step_inputs.h — whether what a step is given is what its program takes.
#pragma once

#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/step_runner.h"
#include "runtime/view.h"

namespace interlace {

// Copies inputs that are views of something larger, or that need gradients. Error: other counts, shapes or devices than
// the program's.
Status CheckInputs(const Program& program, const std::vector<Geometry>& geometry, c10::Device device,
                   MicroBatches& micro_batches);
// hyper[k]: numbers of optimizer group k (docs/architecture.md).
Status CheckHyper(const Program& program, const std::vector<std::vector<double>>& hyper);

}  // namespace interlace
