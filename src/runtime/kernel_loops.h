// kernel_loops.h — what the loops over flat storages share.
#pragma once

#include <cstdint>

namespace interlace {

inline constexpr int64_t kGrain = int64_t{32} * 1024;  // elements a thread takes at least

template <typename From, typename To>
[[gnu::always_inline]] inline void Convert(const From* __restrict from, To* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

}  // namespace interlace
