#include "ir/testing/evaluate_rule.h"

#include <cmath>

namespace interlace {
namespace {

double Apply(RuleCode code, double a, double b, double c, double n) {
  switch (code) {
    case RuleCode::kCopy:
      return a;
    case RuleCode::kNeg:
      return -a;
    case RuleCode::kAbs:
      return std::abs(a);
    case RuleCode::kSign:
      return a > 0 ? 1 : a < 0 ? -1 : 0;
    case RuleCode::kSqrt:
      return std::sqrt(a);
    case RuleCode::kRsqrt:
      return 1 / std::sqrt(a);
    case RuleCode::kReciprocal:
      return 1 / a;
    case RuleCode::kExp:
      return std::exp(a);
    case RuleCode::kLog:
      return std::log(a);
    case RuleCode::kTanh:
      return std::tanh(a);
    case RuleCode::kMul:
      return a * b;
    case RuleCode::kDiv:
      return a / b;
    case RuleCode::kMax:
      return a > b || a != a ? a : b;
    case RuleCode::kMin:
      return a < b || a != a ? a : b;
    case RuleCode::kPow:
      return std::pow(a, b);
    case RuleCode::kGt:
      return a > b;
    case RuleCode::kGe:
      return a >= b;
    case RuleCode::kLt:
      return a < b;
    case RuleCode::kLe:
      return a <= b;
    case RuleCode::kEq:
      return a == b;
    case RuleCode::kNe:
      return a != b;
    case RuleCode::kAdd:
      return a + n * b;
    case RuleCode::kLerp:
      return std::abs(c) < 0.5 ? a + c * (b - a) : b - (b - a) * (1 - c);
    case RuleCode::kWhere:
      return a != 0 ? b : c;
    case RuleCode::kAddcmul:
      return a + n * b * c;
    case RuleCode::kAddcdiv:
      return a + n * b / c;
  }
  return 0;
}

}  // namespace

void EvaluateRule(const RuleForm& form, std::span<const double> numbers, std::span<double> registers) {
  for (const RuleOp& op : form.ops) {
    const RuleTraits& traits = TraitsOf(op.code);
    std::array<double, 4> x = {};
    for (int i = 0; i < traits.operands; ++i) {
      const RuleOperand operand = op.operands[i];
      x[i] = IsNumber(operand) ? numbers[NumberIndex(operand)] : registers[operand];
    }
    const double n = traits.scaled ? x[traits.operands - 1] : 0;
    registers[op.result] = Apply(op.code, x[0], x[1], x[2], n);
  }
}

}  // namespace interlace
