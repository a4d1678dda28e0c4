// evaluate_rule.h — a rule's step of one element, op by op in float64: what the kernels are compared with.
#pragma once

#include <span>

#include "ir/rule.h"

namespace interlace {

// One element in double: the reference of the kernels. `registers`: as many as the form has, changed in place.
void EvaluateRule(const RuleForm& form, std::span<const double> numbers, std::span<double> registers);

}  // namespace interlace
