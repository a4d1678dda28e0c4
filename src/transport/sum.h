// sum.h — sums of the ranks' pieces in rank order: ((part 0 + part 1) + part 2) + ... The bits depend on nothing but
// the data. 16-bit floats are added in float32 and rounded once, integers wrap around.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ir/dtype.h"

namespace interlace {

struct LocalSum {
  DType dtype = DType::kF32;
  std::vector<const void*> parts;  // by rank
  void* out = nullptr;             // may be one of the parts
  int64_t elements = 0;
};

// Calls work(begin, end) for ranges that cover [0, count), of at least `grain` each, perhaps on several threads.
using ParallelFor =
    std::function<void(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& work)>;

// Floating-point and integer types but the 8-bit floats.
bool CanSum(DType dtype);
// CanSum(sum.dtype) must hold. Without `parallel` in this thread.
void SumInOrder(const LocalSum& sum, const ParallelFor& parallel = {});

}  // namespace interlace
