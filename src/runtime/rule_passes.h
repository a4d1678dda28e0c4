// rule_passes.h — which ops of a rule's form (ir/rule.h) are one pass over memory.
//
//   square_avg = mul(square_avg, n0)              ┐
//   square_avg = addcmul(square_avg, g, g, n1)    │
//   t0 = sqrt(square_avg)                         ├ one loop
//   t0 = add(t0, n2, n3)                          │
//   w = addcdiv(w, g, t0, n4)                     ┘
//
// An op that hands its value on to one other op alone is carried out by it: a product with a number by the sum behind
// it, a root (and what is divided and added) by the quotient that it goes into. The averages that most optimizers keep
// and the quotient that is made of them are one loop. Every operation rounds as it would alone.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/rule.h"

namespace interlace {

inline constexpr RuleOperand kNothing = INT16_MIN;

// An op, with what it does for others.
struct RulePass {
  RuleOp op;
  RuleOperand before = kNothing;  // of a sum: a number that the first operand is multiplied by
  bool root = false;  // of addcdiv, and of sqrt itself: the last vector is the root of what the operand names,
  RuleOperand divisor = kNothing;  // over this number,
  RuleOperand addend = kNothing;   // plus this number
  RuleOperand factor = kNothing;   // times this one
  // Of addcdiv: the averages that it is made of, brought up to date in the same loop.
  RuleOperand square = kNothing;  // square = square * square_before + square_k * g * g
  RuleOperand square_before = kNothing;
  RuleOperand square_k = kNothing;
  RuleOperand mean = kNothing;  // mean = lerp(mean, g, mean_weight); else g is what is divided
  RuleOperand mean_weight = kNothing;
  RuleOperand largest = kNothing;   // largest = max(largest, square), and the root is of it
  RuleOperand gradient = kNothing;  // the register that is g here
};

// `flats`: the registers that are memory, the first of all.
std::vector<RulePass> PassesOf(const RuleForm& form, int flats);
// Whether every pass that reads the gradient can multiply it by a scale.
bool FoldsScale(const std::vector<RulePass>& passes);

}  // namespace interlace
