// sort.h — a stable sort for lists of large or rare things that costs little to compile: the algorithm is compiled once
// and sorts numbers; each use only compares and moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace interlace {
namespace internal {
// 0..count-1 in stable order of less(items, a, b).
std::vector<uint32_t> StableOrder(size_t count, const void* items,
                                  bool (*less)(const void* items, uint32_t a, uint32_t b));
}  // namespace internal

// std::stable_sort of a whole vector by `less`, which captures nothing. A loop that sorts small things often is better
// served by std::stable_sort itself.
template <typename T, typename Less>
void StableSort(std::vector<T>& items, Less) {
  const std::vector<uint32_t> order =
      internal::StableOrder(items.size(), items.data(), [](const void* data, uint32_t a, uint32_t b) {
        const T* list = static_cast<const T*>(data);
        return Less()(list[a], list[b]);
      });
  std::vector<T> sorted;
  sorted.reserve(items.size());
  for (uint32_t i : order) sorted.push_back(std::move(items[i]));
  items = std::move(sorted);
}

}  // namespace interlace
