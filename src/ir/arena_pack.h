// arena_pack.h — places for blocks in one arena, each alive in spans of a time axis, so that no two that live together
// overlap.
//
//   offset
//   ▲  ┌─────────c─────────┐         top = highest end of a block
//   │  └──────┬──b──┬──────┘         live = largest sum of the blocks alive at one time ≤ top
//   │  ┌──a──┐└─────┘┌──d──┐         fragmentation = top / live - 1
//   └──┴─────┴───────┴─────┴──► time
//
// Minimizing the top is NP-hard (dynamic storage allocation). Here each of a few orders places its blocks one by one at
// the lowest offset that is free for the whole of their lives; the best result is improved by moving the blocks that
// stick out to the front of their order, until the top is the live sum or the work allowed is spent. Same input, same
// offsets.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"

namespace interlace {

inline constexpr int64_t kArenaAlignment = 64;  // bytes: a cache line, and what torch's allocator on CPUs gives
inline int64_t ArenaBytes(int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

struct LifeSpan {
  int32_t first = 0, last = 0;  // inclusive, on the time axis
};

struct ArenaBlock {
  int64_t bytes = 0;            // a multiple of kArenaAlignment
  std::vector<LifeSpan> spans;  // not empty, in order of time, disjoint
};

struct ArenaPacking {
  std::vector<int64_t> offsets;  // by block
  int64_t top = 0;
  int64_t live = 0;      // largest sum of live blocks
  int32_t live_at = -1;  // the first time of it
};

// Sets live and live_at: the largest sum of live blocks.
void LiveOf(const std::vector<ArenaBlock>& blocks, ArenaPacking& packing);

ArenaPacking PackArena(const std::vector<ArenaBlock>& blocks);

// An independent referee: sweeps over time. Error: two blocks that live together overlap, one is not aligned or ends
// above `top`.
Status CheckPacking(const std::vector<ArenaBlock>& blocks, const std::vector<int64_t>& offsets, int64_t top);

}  // namespace interlace
