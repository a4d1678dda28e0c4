// rules.h — how an operator's dimensions belong together: the factors of its loops, as data.
//
// A factor is a loop index of the computation, and each dimension of an operand or result walks along one (or none: it
// must be whole). Sharding propagation needs nothing else: along a cut factor every operand and result that has it is
// cut, those that lack it are whole, and a result that lacks it is a sum over the ranks.
//
//   aten.mm             ik,kj->ij        cut along k: both operands are cut, the result is a sum
//   aten.add.Tensor     pointwise        cut along a dimension of the result; an operand broadcast along it is whole
//   aten._softmax       all but dim      never cut along the dimension that it sums over
//
// Source of the idea: Shardy's `([i,k],[k,j])->([i,j])`, GSPMD (Xu et al. 2021). An operator without a row is made
// whole before: it computes the same on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ir/program.h"
#include "passes/tensor/placement.h"

namespace interlace::tensor {

inline constexpr int32_t kWholeDim = -1;

struct Rule {
  std::vector<std::vector<int32_t>> operands;  // factor by operand (ForEachOperand's order) and dimension
  std::vector<std::vector<int32_t>> results;   // likewise; results that are not produced have no dimensions
  std::vector<int64_t> sizes;                  // by factor: of its longest dimension
  std::vector<int64_t> joins;  // by factor: operands that a result has side by side along it (cat), else 1
  // Sets of operands in which the results are linear while the others stay as they are: f(a + b) = f(a) + f(b).
  std::vector<std::vector<bool>> linear;  // by set, by operand
  bool shape_only = false;                // no operand is read
  int32_t sizes_argument = -1;            // the positional argument that repeats the sizes of result 0
  int32_t bias_sizes = -1;                // likewise, of result 2
  bool known = false;                     // else every operand and result is whole
};

using GeometryOfValue = std::function<const Geometry&(ValueId)>;

// The rule for one op, by its name, the geometry of its values and its arguments.
Rule RuleOf(const Op& op, const GeometryOfValue& geometry);

// What propagation reads of a program before it changes it: made once for all ways to cut it.
struct Facts {
  Layout layout;
  std::vector<std::string> names;  // by op of the phase
  std::vector<Rule> rules;         // likewise
};
Facts FactsOf(const Program& program, const Phase& phase, const NumberOf& number);

// Whether an op reads no more of its operands than their sizes.
bool ReadsSizesOnly(const Op& op);
// Whether an argument is the number zero, which is a part of any sum.
bool IsZero(const Arg& arg);
// "aten.mul" of "aten.mul.Tensor".
std::string_view BaseName(std::string_view name);
// A dimension argument, counted from the front. -1: no number, or out of range.
int64_t DimArgument(const Op& op, size_t index, size_t rank);

}  // namespace interlace::tensor
