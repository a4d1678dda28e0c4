#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace interlace {

size_t ThreadsFor(size_t count) {
  return std::max<size_t>(std::min<size_t>(count, std::thread::hardware_concurrency()), 1);
}

void InParallel(size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next = 0;
  const auto take = [&] {
    for (size_t i; (i = next++) < count;) work(i);
  };
  std::vector<std::jthread> others;
  for (size_t t = 1; t < ThreadsFor(count); ++t) others.emplace_back(take);
  take();
}

}  // namespace interlace
