// parallel.h — independent pieces of work on all cores.
#pragma once

#include <cstddef>
#include <functional>

namespace interlace {

// Threads that share `count` pieces of work: `most`, or (0) as many as there are cores; at most one a piece, at least
// one.
size_t ThreadsFor(size_t count, size_t most = 0);

// Calls work(0) ... work(count - 1), each once, in any order and on several threads at a time; returns when all are
// done. What one call writes no other may touch.
void InParallel(size_t count, const std::function<void(size_t)>& work, size_t most = 0);

}  // namespace interlace
