// min_cut.h — the cheapest nodes of a directed graph without which no path leads from a source to a sink, by the
// largest flow: Ford and Fulkerson (1956), along shortest paths as Edmonds and Karp (1972).
#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

inline constexpr int64_t kNeverCut = int64_t{1} << 56;  // costs more than any cut of nodes below 2^40

struct CutNode {
  int64_t cost = 0;           // not negative
  std::vector<int32_t> next;  // nodes that an edge leads to
  bool source = false, sink = false;
};
enum class CutSide : uint8_t { kSource, kCut, kSink };

// For each node whether it is cut, or on which side of the cut it lies; of several cheapest cuts the nearest to the
// sinks. A source or a sink may be cut itself. Time O(paths * edges).
std::vector<CutSide> MinCut(const std::vector<CutNode>& nodes);

}  // namespace interlace
