// collective_model.h — time of a collective over the ranks of one mesh axis, per level of the links.
//
// Ranks are laid out with the last mesh axis innermost; a group along an axis lies within a node or spans nodes:
//   mesh dp 4, tp 2 on nodes of 4:   tp groups {0,1} {2,3} ... lie within a node,
//                                    dp groups {0,2,4,6} {1,3,5,7} span two nodes
// A ring over n ranks: alpha * (n - 1) + bytes * (n - 1) / n / bandwidth; bandwidth between nodes is the share of the
// node's that the group's members in it have. An all-reduce is two rings, or goes up and down a tree of nodes, or is
// summed in the switches within a node (NVLS), whichever is fastest. Of the last two
//   2 * bytes * (n - 1) / n / bandwidth * (1 + (half * nodes^spread / bytes)^power), log2(n) hops at least
// is what nccl-tests show: small buffers fill the links badly, more so over many nodes. Source: NCCL's rings, trees;
// fitted by bench/fit_collectives.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cost/cluster.h"
#include "ir/program.h"

namespace interlace {

std::string_view ExchangeName(Exchange kind);  // as in profiles

// How a group along one axis lies on the machines.
struct GroupShape {
  int64_t ranks = 1;
  int64_t members_per_node = 1;
  int64_t nodes = 1;
  int64_t stride = 1;  // between neighbours of the group
  bool within_node() const { return nodes == 1; }
};
// How a profile names the ranks along axes, and those of a reduction onto replicas: "2", "2/4", "2+2/2"; columns and
// rows of several axes "2/2x2" (profile_table.h).
std::string RanksWord(const std::vector<Axis>& mesh, std::string_view axes, std::string_view replicas = "");
GroupShape GroupShapeOf(const AxisGroup& along, int64_t per_node);
GroupShape GroupShapeOf(const std::vector<Axis>& mesh, std::string_view axes, int64_t per_node);

enum class Algorithm : uint8_t { kRing, kTree, kSwitch };
std::string_view AlgorithmName(Algorithm algorithm);

struct CollectiveTime {
  Algorithm algorithm = Algorithm::kRing;
  double latency_us = 0;  // not slowed by what else uses the link
  double transfer_us = 0;
  double moved_bytes = 0;  // sent by one rank
};
// `bytes`: the whole buffer of a rank (a gather's result, a reduce's source); `messages`: latencies to pay.
CollectiveTime CollectiveTimeOf(const ClusterSpec& cluster, const GroupShape& group, Exchange kind, double bytes,
                                int64_t messages);
CollectiveTime RingTime(const ClusterSpec& cluster, const GroupShape& group, Exchange kind, double bytes,
                        int64_t messages);

// One collective over ranks that fill nodes. Error: no such collective ("all_gather", "reduce_scatter", "all_reduce",
// "broadcast", "all_to_all", "p2p"); more ranks than the cluster has, or nodes half full; no bytes.
struct OneCollective {
  GroupShape group;
  CollectiveTime time;
  double us = 0, error = 0;  // error: standard deviation of its logarithm, 0 where it is not known
};
Result<OneCollective> PredictCollective(const ClusterSpec& cluster, std::string_view kind, int64_t bytes,
                                        int64_t ranks);

}  // namespace interlace
