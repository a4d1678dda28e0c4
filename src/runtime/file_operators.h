// file_operators.h — which operators of torch a program from a file may use, and with what.
//
// A kernel of ATen that captures call behind its autograd formula need not look at what it is given: a gradient of
// another size, or an index beyond its table, is memory that belongs to somebody else. So programs from files are held
// to a list (file_operators.inc), and where a kernel relies on sizes or on values of an operand, those are looked at
// here: sizes when the program is built, values before each call. Programs of models captured in this process are made
// by autograd, which keeps to the rules, and may use any operator.
#pragma once

#include <ATen/core/function_schema.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/op_kernel.h"

namespace interlace {

// Every value of an integer tensor lies in [low, high), or is `except`.
struct ValueCheck {
  ValueId value = kNone;
  int64_t low = 0, high = 0;
  std::optional<int64_t> except = std::nullopt;
};

// What is to be looked at before each call. Error: the operator is not on the list, or its operands do not fit.
Result<std::vector<ValueCheck>> CheckFileOperator(const BuildContext& context, const Op& op,
                                                  const c10::FunctionSchema& schema);
// Throws where a value is out of its range.
void CheckValues(const Frame& frame, const std::vector<ValueCheck>& checks);
// "aten::add", ...: the list.
std::vector<std::string> FileOperators();

}  // namespace interlace
