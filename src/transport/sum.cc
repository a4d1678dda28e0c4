// Works through blocks that stay in the first-level cache: a block is read from every part in turn and written once, so
// memory traffic is n reads and one write whatever n is.
#include "transport/sum.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clones.h"

namespace interlace {

namespace {

constexpr int64_t kBlock = 1024;                // elements; 8 KiB of doubles
constexpr int64_t kGrain = int64_t{64} * 1024;  // elements a thread takes at least

template <typename T, typename Acc>
[[gnu::always_inline]] inline void SumBlocks(const void* const* parts, int64_t count, void* out, int64_t begin,
                                             int64_t end) {
  Acc acc[kBlock];
  T* target = static_cast<T*>(out);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    const T* first = static_cast<const T*>(parts[0]) + at;
    for (int64_t j = 0; j < n; ++j) acc[j] = static_cast<Acc>(first[j]);
    for (int64_t p = 1; p < count; ++p) {
      const T* part = static_cast<const T*>(parts[p]) + at;
      for (int64_t j = 0; j < n; ++j) acc[j] += static_cast<Acc>(part[j]);
    }
    for (int64_t j = 0; j < n; ++j) target[at + j] = static_cast<T>(acc[j]);
  }
}

#define INTERLACE_SUM(name, T, Acc)                                                                            \
  INTERLACE_CLONES void name(const void* const* parts, int64_t count, void* out, int64_t begin, int64_t end) { \
    SumBlocks<T, Acc>(parts, count, out, begin, end);                                                          \
  }
INTERLACE_SUM(SumF64, double, double)
INTERLACE_SUM(SumF32, float, float)
INTERLACE_SUM(SumF16, Float16, float)
INTERLACE_SUM(SumBF16, BFloat16, float)
// Integers wrap around: unsigned arithmetic.
INTERLACE_SUM(SumI64, uint64_t, uint64_t)
INTERLACE_SUM(SumI32, uint32_t, uint32_t)
INTERLACE_SUM(SumI16, uint16_t, uint16_t)
INTERLACE_SUM(SumI8, uint8_t, uint8_t)
#undef INTERLACE_SUM

using SumFunction = void (*)(const void* const*, int64_t, void*, int64_t, int64_t);

SumFunction FunctionOf(DType dtype) {
  static const std::pair<DType, SumFunction> kSums[] = {
      {DType::kF64, &SumF64},   {DType::kF32, &SumF32}, {DType::kF16, &SumF16},
      {DType::kBF16, &SumBF16}, {DType::kI64, &SumI64}, {DType::kI32, &SumI32},
      {DType::kI16, &SumI16},   {DType::kI8, &SumI8},   {DType::kU8, &SumI8}};
  for (const auto& [of, function] : kSums) {
    if (of == dtype) return function;
  }
  return nullptr;
}

}  // namespace

bool CanSum(DType dtype) {
  return FunctionOf(dtype) != nullptr;
}

void SumInOrder(const LocalSum& sum, const ParallelFor& parallel) {
  const SumFunction function = FunctionOf(sum.dtype);
  CHECK(function != nullptr) << "no sum of " << DTypeName(sum.dtype);
  const auto work = [&](int64_t begin, int64_t end) {
    function(sum.parts.data(), static_cast<int64_t>(sum.parts.size()), sum.out, begin, end);
  };
  parallel ? parallel(sum.elements, kGrain, work) : work(0, sum.elements);
}

}  // namespace interlace
