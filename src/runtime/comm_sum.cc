// comm_sum.cc — the sum of n ranks' pieces in rank order. Works through blocks that stay in the first-level cache: a
// block is read from every part in turn and written once, so memory traffic is n reads and one write whatever n is.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "runtime/comm_impl.h"
#include "runtime/kernels_clones.h"

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

SumFunction FunctionOf(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return &SumF64;
    case c10::ScalarType::Float:
      return &SumF32;
    case c10::ScalarType::Half:
      return &SumF16;
    case c10::ScalarType::BFloat16:
      return &SumBF16;
    case c10::ScalarType::Long:
      return &SumI64;
    case c10::ScalarType::Int:
      return &SumI32;
    case c10::ScalarType::Short:
      return &SumI16;
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
      return &SumI8;
    default:
      return nullptr;
  }
}

}  // namespace

bool CanSum(c10::ScalarType dtype) {
  return FunctionOf(dtype) != nullptr;
}

void SumInOrder(c10::ScalarType dtype, const std::vector<const void*>& parts, void* out, int64_t numel) {
  const SumFunction sum = FunctionOf(dtype);
  TORCH_INTERNAL_ASSERT(sum != nullptr, "no sum of ", c10::toString(dtype));
  const auto count = static_cast<int64_t>(parts.size());
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) { sum(parts.data(), count, out, begin, end); });
}

}  // namespace interlace
