#include "base/sort.h"

#include <algorithm>
#include <numeric>

namespace interlace::internal {

std::vector<uint32_t> StableOrder(size_t count, const void* items, bool (*less)(const void*, uint32_t, uint32_t)) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return less(items, a, b) || (!less(items, b, a) && a < b); });
  return order;
}

}  // namespace interlace::internal
