#include "sim/what_if.h"

#include <algorithm>
#include <utility>

namespace interlace {
namespace {

constexpr double kLargestFactor = 1000;

Status Scale(int64_t& time_ps, double factor) {
  if (factor == 1) return Ok{};
  INTERLACE_ASSIGN(time_ps, Picoseconds(static_cast<double>(time_ps) * factor / 1e6));
  return Ok{};
}

}  // namespace

bool WhatIf::plain() const {
  return compute == 1 && links == 1 && latency == 1 && copies == 1 && launches == 1 && interference;
}

Status CheckWhatIf(const WhatIf& w) {
  for (auto [name, factor] : {std::pair{"compute", w.compute},
                              {"links", w.links},
                              {"latency", w.latency},
                              {"copies", w.copies},
                              {"launches", w.launches}}) {
    if (!(factor >= 0 && factor <= kLargestFactor)) {
      return MakeError("the times of ", name, " cannot be multiplied by ", factor, "; give 0 to ", kLargestFactor);
    }
  }
  return Ok{};
}

void ApplyToCluster(const WhatIf& w, ClusterSpec& cluster, ProfileTable* profile) {
  cluster.issue_us *= w.launches;
  if (!w.interference) {
    cluster.interference = "none";
    cluster.interference_factors.clear();
    if (profile != nullptr) profile->interference.clear(), profile->together.clear();
  }
}

Status ApplyToCosts(const WhatIf& w, Lowered& lowered) {
  if (w.plain()) return Ok{};
  for (std::vector<LoweredOp>& ops : lowered.ops) {
    for (LoweredOp& op : ops) {
      INTERLACE_TRY(Scale(op.work_ps, w.compute));
    }
  }
  for (OpCost& cost : lowered.costs) {
    INTERLACE_TRY(Scale(cost.issue_ps, w.compute));
    INTERLACE_TRY(Scale(cost.finish_ps, w.compute));
    bool link = cost.resource == Resource::kIntraLink || cost.resource == Resource::kInterLink;
    auto total = [&] { return static_cast<double>(cost.latency_ps) + static_cast<double>(cost.work_ps); };
    double before = total();
    INTERLACE_TRY(Scale(cost.latency_ps, link ? w.latency : w.copies));
    INTERLACE_TRY(Scale(cost.work_ps, link ? w.links : w.copies));
    // A faster link does not make the processor's part of a transfer smaller.
    double most = std::max(1.0, cost.core_share);
    cost.core_share = total() > 0 ? std::min(most, cost.core_share * before / total()) : 0;
  }
  return Ok{};
}

}  // namespace interlace
