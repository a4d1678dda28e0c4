#include "cost/collective_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/suggest.h"

namespace interlace {

std::string_view ExchangeName(Exchange kind) {
  static constexpr std::string_view kNames[] = {"", "gather", "reduce", "all_reduce", "broadcast", "all_to_all", "p2p"};
  return kNames[static_cast<int>(kind)];
}

std::string RanksWord(const std::vector<Axis>& mesh, std::string_view axes, std::string_view replicas) {
  const auto ranks = [](int64_t size, int64_t stride) {
    return std::to_string(size) + (stride > 1 && size > 1 ? "/" + std::to_string(stride) : "");
  };
  const auto word = [&](std::string_view along) {
    const AxisGroup group = GroupOf(mesh, along);
    const int64_t row = RowOf(mesh, along);
    if (row == 0) return ranks(group.size, group.stride);
    return ranks(group.size / row, group.stride * row) + "x" + ranks(row, group.stride);
  };
  return word(axes) + (GroupOf(mesh, replicas).size > 1 ? "+" + word(replicas) : "");
}

GroupShape GroupShapeOf(const std::vector<Axis>& mesh, std::string_view axes, int64_t per_node) {
  return GroupShapeOf(GroupOf(mesh, axes), per_node);
}

GroupShape GroupShapeOf(const AxisGroup& along, int64_t per_node) {
  GroupShape group;
  group.ranks = along.size;
  group.stride = along.stride;
  group.members_per_node = std::clamp<int64_t>(per_node / group.stride, 1, group.ranks);
  group.nodes = (group.ranks + group.members_per_node - 1) / group.members_per_node;
  return group;
}

CollectiveTime RingTime(const ClusterSpec& cluster, const GroupShape& group, Exchange kind, double bytes,
                        int64_t messages) {
  CollectiveTime out;
  if (group.ranks <= 1) return out;
  double n = static_cast<double>(group.ranks);
  bool all_reduce = kind == Exchange::kAllReduce;
  const LinkSpec& link = group.within_node() ? cluster.intra : cluster.inter;
  auto rate = [&](const LinkSpec& l) {
    return (all_reduce && l.all_reduce_gb_per_s > 0 ? l.all_reduce_gb_per_s : l.gb_per_s) * 1e3;
  };
  double alpha = all_reduce && link.all_reduce_alpha_us > 0 ? link.all_reduce_alpha_us : link.alpha_us;
  double bytes_per_us = rate(link);
  if (!group.within_node()) {
    bytes_per_us *= static_cast<double>(group.members_per_node) / static_cast<double>(cluster.per_node);
    // Several members of a node also pass the data on within it.
    if (group.members_per_node > 1) bytes_per_us = std::min(bytes_per_us, rate(cluster.intra));
  }
  double rounds = all_reduce ? 2 : 1;
  double share = (n - 1) / n;
  double hops = n - 1;
  if (kind == Exchange::kBroadcast) share = 1;
  if (kind == Exchange::kPointToPoint) share = 1, hops = 1;
  out.latency_us = rounds * alpha * hops * static_cast<double>(std::max<int64_t>(messages, 1));
  out.moved_bytes = rounds * bytes * share;
  out.transfer_us = out.moved_bytes / bytes_per_us;
  return out;
}

namespace {

// An all-reduce along a tree of nodes, or in the switches of one; no time where the link has none.
CollectiveTime TreeTime(const ClusterSpec& cluster, const GroupShape& group, double bytes, int64_t messages) {
  CollectiveTime out;
  const LinkSpec& link = group.within_node() ? cluster.intra : cluster.inter;
  const auto nodes = static_cast<double>(group.nodes), n = static_cast<double>(group.ranks);
  double rate = group.nodes == 2 && link.tree_pair_gb_per_s > 0 ? link.tree_pair_gb_per_s : link.tree_gb_per_s;
  if (!(rate > 0) || !(bytes > 0)) return out;
  if (!group.within_node()) {
    rate *= static_cast<double>(group.members_per_node) / static_cast<double>(cluster.per_node);
    if (group.members_per_node > 1)
      rate = std::min(rate, std::max(cluster.intra.gb_per_s, cluster.intra.tree_gb_per_s));
  }
  out.algorithm = group.within_node() ? Algorithm::kSwitch : Algorithm::kTree;
  out.moved_bytes = 2 * bytes * (n - 1) / n;
  out.transfer_us = out.moved_bytes / (rate * 1e3);
  const double each = bytes / static_cast<double>(messages);
  const double slow =
      std::pow(link.tree_half_mib * 1048576 * std::pow(nodes, link.tree_spread) / each, link.tree_power);
  const double hops = 2 * link.alpha_us * std::ceil(std::log2(n)) * static_cast<double>(messages);
  out.latency_us = std::max(out.transfer_us * slow, hops);
  return out;
}

constexpr std::pair<std::string_view, Exchange> kByName[] = {
    {"all_gather", Exchange::kGather},   {"reduce_scatter", Exchange::kReduce}, {"all_reduce", Exchange::kAllReduce},
    {"broadcast", Exchange::kBroadcast}, {"all_to_all", Exchange::kAllToAll},   {"p2p", Exchange::kPointToPoint}};

}  // namespace

std::string_view AlgorithmName(Algorithm algorithm) {
  static constexpr std::string_view kNames[] = {"ring", "tree", "switch (NVLS)"};
  return kNames[static_cast<int>(algorithm)];
}

CollectiveTime CollectiveTimeOf(const ClusterSpec& cluster, const GroupShape& group, Exchange kind, double bytes,
                                int64_t messages) {
  const CollectiveTime ring = RingTime(cluster, group, kind, bytes, messages);
  if (kind != Exchange::kAllReduce || group.ranks < 2) return ring;
  const CollectiveTime tree = TreeTime(cluster, group, bytes, std::max<int64_t>(messages, 1));
  const bool faster = tree.moved_bytes > 0 && tree.latency_us + tree.transfer_us < ring.latency_us + ring.transfer_us;
  return faster ? tree : ring;
}

Result<OneCollective> PredictCollective(const ClusterSpec& cluster, std::string_view kind, int64_t bytes,
                                        int64_t ranks) {
  const auto* found = std::find_if(std::begin(kByName), std::end(kByName), [&](auto& k) { return k.first == kind; });
  if (found == std::end(kByName)) {
    std::vector<std::string_view> names;
    for (auto& k : kByName) names.push_back(k.first);
    return MakeError("no collective is called '", kind, "'", DidYouMean(kind, names));
  }
  if (bytes < 1) return MakeError("a collective of ", bytes, " bytes; give at least one");
  if (ranks < 2 || ranks > cluster.devices)
    return MakeError("a collective of ", ranks, " ranks; ", cluster.name, " has room for 2 to ", cluster.devices);
  if (ranks > cluster.per_node && ranks % cluster.per_node != 0)
    return MakeError(ranks, " ranks do not fill nodes of ", cluster.per_node, " devices");
  OneCollective out;
  out.group = GroupShapeOf({{"dp", ranks}}, "dp", cluster.per_node);
  out.time = CollectiveTimeOf(cluster, out.group, found->second, static_cast<double>(bytes), 1);
  out.us = out.time.latency_us + out.time.transfer_us;
  out.error = (out.group.within_node() ? cluster.intra : cluster.inter).error;
  return out;
}

}  // namespace interlace
