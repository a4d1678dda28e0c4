// group.h — a group of ranks that talk to one another: one axis of the mesh as one rank sees it. A rank is in as many
// groups as its mesh has axes; each has connections of its own.
//
//   mesh replica=2, dp=2; rank 2:     {"replica", {0, 2}, 1}     {"dp", {2, 3}, 0}
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace interlace {

struct RankGroup {
  std::string axis;            // in messages
  std::vector<int64_t> ranks;  // of the whole run, in the order of the group
  int index = 0;               // of this rank in `ranks`

  int size() const { return static_cast<int>(ranks.size()); }
};

}  // namespace interlace
