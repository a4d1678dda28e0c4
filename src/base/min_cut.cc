#include "base/min_cut.h"

#include <algorithm>

namespace interlace {
namespace {

// Every node is two, joined by an edge that carries its cost: what flows in and what flows out.
class Network {
 public:
  explicit Network(size_t nodes) : edges_of_(2 * nodes + 2) {}
  static int32_t In(size_t node) { return static_cast<int32_t>(2 * node + 2); }
  static int32_t Out(size_t node) { return In(node) + 1; }

  void AddEdge(int32_t from, int32_t to, int64_t room) {
    edges_of_[from].push_back(static_cast<int32_t>(edges_.size()));
    edges_.push_back({from, to, room});
    edges_of_[to].push_back(static_cast<int32_t>(edges_.size()));
    edges_.push_back({to, from, 0});
  }

  // Nodes from which the sink is reached where there is room; by each of them the edge that leads there, -1: none.
  std::vector<int32_t> ReachSink() const {
    std::vector<int32_t> by(edges_of_.size(), -1), queue{kSink};
    for (size_t at = 0; at < queue.size(); ++at) {
      for (int32_t edge : edges_of_[queue[at]]) {
        const Edge& back = edges_[edge ^ 1];  // towards queue[at]
        if (back.room == 0 || back.from == kSink || by[back.from] >= 0) continue;
        by[back.from] = edge ^ 1;
        queue.push_back(back.from);
      }
    }
    return by;
  }

  // Fills it with the largest flow; what ReachSink then gives.
  std::vector<int32_t> Fill() {
    while (true) {
      std::vector<int32_t> by = ReachSink();
      if (by[kSource] < 0) return by;
      int64_t room = kNeverCut;
      for (int32_t at = kSource; at != kSink; at = edges_[by[at]].to) room = std::min(room, edges_[by[at]].room);
      for (int32_t at = kSource; at != kSink; at = edges_[by[at]].to) {
        edges_[by[at]].room -= room;
        edges_[by[at] ^ 1].room += room;
      }
    }
  }

  static constexpr int32_t kSource = 0, kSink = 1;

 private:
  struct Edge {
    int32_t from, to;
    int64_t room;
  };
  std::vector<Edge> edges_;  // each is followed by the one back
  std::vector<std::vector<int32_t>> edges_of_;
};

}  // namespace

std::vector<CutSide> MinCut(const std::vector<CutNode>& nodes) {
  Network network(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    network.AddEdge(Network::In(i), Network::Out(i), nodes[i].cost);
    for (int32_t next : nodes[i].next) network.AddEdge(Network::Out(i), Network::In(next), kNeverCut);
    if (nodes[i].source) network.AddEdge(Network::kSource, Network::In(i), kNeverCut);
    if (nodes[i].sink) network.AddEdge(Network::Out(i), Network::kSink, kNeverCut);
  }
  const std::vector<int32_t> by = network.Fill();
  std::vector<CutSide> out(nodes.size(), CutSide::kSource);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (by[Network::In(i)] >= 0) {
      out[i] = CutSide::kSink;
    } else if (by[Network::Out(i)] >= 0) {
      out[i] = CutSide::kCut;
    }
  }
  return out;
}

}  // namespace interlace
