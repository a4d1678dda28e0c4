// rule.h — an elementwise optimizer step as a small program of its own: what one element of the weights, its gradient
// and its states become.
//
//   rule 0 "RMSprop" (square_avg) {
//     form {                                     # the first step, which makes the state
//       square_avg = copy(n0)
//       ...
//     }
//     form {                                     # every later step
//       square_avg = mul(square_avg, n0)
//       square_avg = addcmul(square_avg, g, g, n1)
//       t0 = sqrt(square_avg)
//       t0 = add(t0, n2, n3)
//       w = addcdiv(w, g, t0, n4)
//     }
//   }
//   group 0 rule 0
//
// w is the weight, g the gradient (times the update's scale and coefficient; writing it changes no gradient), states go
// by their names, t0, t1, ... live within one element, n0, n1, ... are numbers of the step: learning rates, bias
// corrections and the like, computed anew by the optimizer's own Python. A form is one way that this Python goes; the
// row of a group says which form its step takes, then the numbers. Every op is of one element, so a rule may run on any
// part of any flat buffer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace interlace {

enum class RuleCode : uint8_t {
  kCopy,
  kNeg,
  kAbs,
  kSign,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kExp,
  kLog,
  kTanh,  // (a)
  kMul,
  kDiv,
  kMax,
  kMin,
  kPow,
  kGt,
  kGe,
  kLt,
  kLe,
  kEq,
  kNe,     // (a, b); comparisons give 1 or 0
  kAdd,    // (a, b, n): a + n * b
  kLerp,   // (a, b, c): from a to b by c
  kWhere,  // (a, b, c): b where a is not 0, else c
  kAddcmul,
  kAddcdiv,  // (a, b, c, n): a + n * b * c, a + n * b / c
};
inline constexpr int kRuleCodes = static_cast<int>(RuleCode::kAddcdiv) + 1;
inline constexpr int kMaxRuleStates = 6;
inline constexpr int kMaxRuleRegisters = 32;  // weight, gradient, states and what lives within one element
inline constexpr int kMaxRuleNumbers = 256;   // of a form

// What an op takes: which operands may be numbers of the step, and whether the last one must be one.
struct RuleTraits {
  std::string_view name;
  int operands = 1;
  uint8_t numbers = 0;  // a bit each
  bool scaled = false;  // the last operand is a number
};
const RuleTraits& TraitsOf(RuleCode code);
std::optional<RuleCode> RuleCodeOf(std::string_view name);
std::vector<std::string_view> RuleOpNames();

// A register from 0 on, or a number: -1 is n0, -2 is n1.
using RuleOperand = int16_t;
constexpr bool IsNumber(RuleOperand operand) {
  return operand < 0;
}
constexpr int NumberIndex(RuleOperand operand) {
  return -1 - operand;
}

struct RuleOp {
  RuleCode code = RuleCode::kCopy;
  RuleOperand result = 0;
  std::array<RuleOperand, 4> operands = {};
  friend bool operator==(const RuleOp&, const RuleOp&) = default;
};

struct RuleForm {
  std::vector<RuleOp> ops;
  int numbers = 0;    // n0 up to this
  int registers = 0;  // weight, gradient, states, t0, ...
};

struct UpdateRule {
  int32_t id = 0;
  std::string name;                 // the optimizer's class
  std::vector<std::string> states;  // by PyTorch's names, in the order of the update's operands
  std::vector<RuleForm> forms;
  // Length of a group's row: which form, then its numbers.
  size_t RowSize() const;
};

}  // namespace interlace
