// dense.h — plain row-major arrays of doubles for the reference interpreter, and the few things done with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ir/dtype.h"

namespace interlace::testing {

struct Dense {
  std::vector<int64_t> sizes;
  std::vector<double> data;  // row-major
};

inline int64_t Count(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}
// x broadcast to sizes by the rules of PyTorch; sizes must be compatible.
Dense Broadcast(const Dense& x, const std::vector<int64_t>& sizes);

// One element in memory as a double and back; integers are truncated, bf16 rounds to nearest even.
// False for dtypes the interpreter lacks.
bool CanStore(DType dtype);
double Load(DType dtype, const std::byte* at);
void Store(DType dtype, std::byte* at, double value);
// The value as the dtype keeps it.
double RoundTo(DType dtype, double value);
// What sums over ranks are made in before they are rounded to `dtype`.
DType SumDType(DType dtype);
// What memory holds before anything is computed into it: NaN, or a large odd integer.
double Poison(DType dtype);

// A counter-based random number: the same for the same keys.
uint64_t Mix(uint64_t a, uint64_t b);
uint64_t HashText(std::string_view text);
double Uniform(uint64_t key);  // in [0, 1)

}  // namespace interlace::testing
