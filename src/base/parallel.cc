#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace interlace {

size_t ThreadsFor(size_t count, size_t most) {
  return std::max<size_t>(std::min<size_t>(count, most > 0 ? most : std::thread::hardware_concurrency()), 1);
}

void InParallel(size_t count, const std::function<void(size_t)>& work, size_t most) {
  std::atomic<size_t> next = 0;
  const auto take = [&] {
    for (size_t i; (i = next++) < count;) work(i);
  };
  std::vector<std::jthread> others;
  for (size_t t = 1; t < ThreadsFor(count, most); ++t) others.emplace_back(take);
  take();
}

}  // namespace interlace
