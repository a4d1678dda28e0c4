// arena_pages.h — which pages of an arena are given back to the system, and when, so that a step never has more of them
// than what lives at once.
//
// Storages that leave memory and come back (residency.h) make packing lose: what goes out first and comes back first
// cannot have both the place that it left and that of what leaves later (10 to 20 % of a step that is full most of the
// time). So they have addresses of their own, which cost nothing, and only pages count:
//
//   block a   ──────live──────┐                  ┌──live──
//   its pages  in memory      │ kept │ given back│ new pages
//                                    ▲ another block needs pages, and this is the idle one that is used again last
//                                    (Belady)
//
// A page is taken when a block on it begins to live, kept when it idles, and given back when another one needs its
// room. The most pages there ever are is the most that live at once. The pages of a block that lives are never given
// back.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/arena_pack.h"

namespace interlace {

inline constexpr int64_t kArenaPage = 4096;  // bytes: what systems map, and what direct I/O is aligned to

// Pages to give back before an op.
struct PageReturn {
  int32_t variant = 0, place = 0;
  int64_t from = 0, bytes = 0;  // multiples of ArenaPages::page_bytes
};

struct ArenaPages {
  int64_t page_bytes = 0;                     // kArenaPage, or a multiple of it in very large arenas
  int64_t peak_bytes = 0;                     // most that are in memory at once
  int32_t peak_variant = -1, peak_place = 0;  // the first op that needs all of them
  std::vector<PageReturn> returns;            // by variant, then by place
};

// The slots of a variant on the time axis: its beginning at `axis`, op i at axis + 1 + i, its end.
struct PageSlots {
  int32_t axis = 0, ops = 0;
};

// `sequence`: variants in the order of a step, those that repeat as often as they can differ. Every span of a block
// lies in one variant; a block that lives at the end of one and at the beginning of the next goes on.
ArenaPages PlanPages(const std::vector<ArenaBlock>& blocks, const std::vector<int64_t>& offsets,
                     const std::vector<PageSlots>& variants, const std::vector<int32_t>& sequence);

}  // namespace interlace
