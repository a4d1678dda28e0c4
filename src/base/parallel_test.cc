#include "base/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace interlace {
namespace {

TEST(Parallel, EveryPieceIsDoneOnce) {
  for (size_t count : {0, 1, 2, 3, 100}) {
    std::vector<int> done(count, 0);
    InParallel(count, [&](size_t i) { ++done[i]; });
    EXPECT_EQ(done, std::vector<int>(count, 1));
    EXPECT_GE(ThreadsFor(count), 1u);
    EXPECT_LE(ThreadsFor(count), std::max<size_t>(count, 1));
  }
}

}  // namespace
}  // namespace interlace
