// The spaces of Mist, what of a cluster a program may use, and what a boundary between stages costs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plan/tune.h"

namespace interlace::plan {

int64_t DeviceBytesFor(const ClusterSpec& cluster, int64_t given) {
  return given > 0 ? given : static_cast<int64_t>(static_cast<double>(cluster.MemoryLimitBytes()) * 0.9);
}

int64_t HostBytesFor(const ClusterSpec& cluster, int64_t given) {
  if (given > 0 || !(cluster.host_memory_gib > 0)) return given > 0 ? given : std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::min(cluster.host_memory_gib * 1073741824.0 * 0.9, 9e18));
}

Space FullSpace() {
  return {};
}

Space PaperSpace() {
  Space space;
  space.name = "paper";
  space.stage = StageOptions::Paper();
  return space;
}

Space ArtifactSpace() {
  Space space;
  space.name = "artifact";
  space.stage = StageOptions::Artifact();
  space.free_devices = false;
  space.one_layout = true;
  space.layer_slack = 2;
  space.powers_of_two = true;
  return space;
}

double BoundaryUs(const ClusterSpec& cluster, double bytes, const Layout& from, const Layout& to, bool inside_node) {
  // A device holds the samples of its data-parallel rank and the part of the sequence of its tensor-parallel rank.
  auto parts = [](int32_t mine, int32_t theirs) {
    return std::max(1.0, std::ceil(static_cast<double>(theirs) / mine));
  };
  double sent = parts(from.dp, to.dp) * parts(from.tp, to.tp), received = parts(to.dp, from.dp) * parts(to.tp, from.tp);
  const LinkSpec& link = inside_node ? cluster.intra : cluster.inter;
  // Within a node each device has its link, between nodes all devices of a stage share their nodes' links.
  auto ends = [&](const Layout& layout) {
    if (inside_node) return static_cast<double>(layout.devices());
    return std::max(1.0, static_cast<double>(layout.devices()) / static_cast<double>(cluster.per_node));
  };
  double share = bytes / std::min(ends(from), ends(to));
  return 2 * (link.alpha_us * std::max(sent, received) + share / (link.gb_per_s * 1e3));
}

}  // namespace interlace::plan
