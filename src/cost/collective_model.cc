#include "cost/collective_model.h"

#include <algorithm>

namespace interlace {

std::string_view ExchangeName(Exchange kind) {
  static constexpr std::string_view kNames[] = {"", "gather", "reduce", "all_reduce", "broadcast", "all_to_all", "p2p"};
  return kNames[static_cast<int>(kind)];
}

std::string RanksWord(const std::vector<Axis>& mesh, std::string_view axes, std::string_view replicas) {
  const auto word = [&](std::string_view along) {
    const AxisGroup group = GroupOf(mesh, along);
    return std::to_string(group.size) + (group.stride > 1 && group.size > 1 ? "/" + std::to_string(group.stride) : "");
  };
  return word(axes) + (GroupOf(mesh, replicas).size > 1 ? "+" + word(replicas) : "");
}

GroupShape GroupShapeOf(const std::vector<Axis>& mesh, std::string_view axes, int64_t per_node) {
  const AxisGroup along = GroupOf(mesh, axes);
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

}  // namespace interlace
