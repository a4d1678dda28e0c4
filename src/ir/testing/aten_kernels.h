// aten_kernels.h — the ATen ops of the reference interpreter, written for clarity: all arithmetic in double, fixed
// order.
#pragma once

#include <functional>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "ir/testing/dense.h"

namespace interlace::testing {

struct AtenCall {
  const Op& op;
  std::function<Dense(ValueId)> read;
  std::vector<std::vector<int64_t>> result_sizes;  // in-place ops: the sizes of the operand written
  uint64_t random_key = 0;                         // of the op's stream, when it has one
  DType dtype = DType::kF64;                       // of the first result, which the caller rounds to it
  std::function<int64_t(Dim)> integer = nullptr;   // an argument that is an index of this rank; null: numbers only
};

// The results of the op, one per result (one for an in-place op). Error: the interpreter lacks the op, or odd
// arguments.
Result<std::vector<Dense>> RunAten(const AtenCall& call);

}  // namespace interlace::testing
