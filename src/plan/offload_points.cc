#include "plan/offload_points.h"

namespace interlace::plan {

bool Beaten(const Pareto& best, const StageSums& sums, const OffloadRegion& region, int32_t layers, Recompute counts) {
  constexpr int kParts = 3;
  Lanes lanes;
  lanes.layers.fill(layers), lanes.full.fill(counts.full), lanes.selective.fill(counts.selective),
      lanes.in_flight.fill(1);
  lanes.count = 0;
  auto all_beaten = [&] {
    if (lanes.count == 0) return true;
    EvaluateLanes(sums, lanes, Wanted::kTimes);
    for (int i = 0; i < lanes.count; ++i) {
      if (!best.Beats(lanes.stable_us[i], lanes.total_us[i])) return false;
    }
    lanes.count = 0;
    return true;
  };
  std::array<int, kKinds> at{}, parts;
  for (int k = 0; k < kKinds; ++k) parts[k] = region.allowed[k] ? kParts : 1;
  while (true) {
    Ratios low{}, high{};
    for (int k = 0; k < kKinds; ++k) {
      if (region.allowed[k])
        low[k] = static_cast<double>(at[k]) / kParts, high[k] = static_cast<double>(at[k] + 1) / kParts;
    }
    // Each ratio is at least what is lacking with the others at the box's top.
    bool empty = false;
    for (int k = 0; k < kKinds && !empty; ++k) {
      for (const OffloadRegion::Row& row : region.rows) {
        double lacking = row.need;
        for (int other = 0; other < kKinds; ++other) lacking -= other == k ? 0 : row.save[other] * high[other];
        if (lacking > row.save[k] * high[k] * (1 + 1e-12)) empty = true;
        if (lacking > row.save[k] * low[k] && row.save[k] > 0) low[k] = lacking / row.save[k];
      }
    }
    if (!empty) {
      const int i = lanes.count++;
      lanes.wo[i] = low[0], lanes.go[i] = low[1], lanes.oo[i] = low[2], lanes.ao[i] = low[3];
      if (lanes.count == Lanes::kWidth && !all_beaten()) return false;
    }
    int k = 0;
    while (k < kKinds && ++at[k] == parts[k]) at[k++] = 0;
    if (k == kKinds) return all_beaten();
  }
}

}  // namespace interlace::plan
