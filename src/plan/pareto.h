// pareto.h — the strategies of a stage that none found so far beats. Inside the room only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/strategy.h"

namespace interlace::plan {

struct StagePoint {
  double stable_us, total_us;  // t, t + d
  int32_t part;                // (b, dp, tp, ZeRO), in StageModel::State
  Strategy strategy;
};

// Pareto set of (t, t + d), kept sorted by t; without those of t above `longest_us`.
class Pareto {
 public:
  explicit Pareto(double longest_us) : longest_us_(longest_us) {}
  // Whether some point is at least as good in both.
  bool Beats(double stable_us, double total_us) const {
    if (stable_us > longest_us_) return true;
    auto after = std::upper_bound(points_.begin(), points_.end(), stable_us,
                                  [](double t, const StagePoint& p) { return t < p.stable_us; });
    return after != points_.begin() && std::prev(after)->total_us <= total_us;
  }
  void Add(const StagePoint& point) {
    if (Beats(point.stable_us, point.total_us)) return;
    auto at = std::lower_bound(points_.begin(), points_.end(), point.stable_us,
                               [](const StagePoint& p, double t) { return p.stable_us < t; });
    auto end = at;
    while (end != points_.end() && end->total_us >= point.total_us) ++end;
    if (at != end) {
      *at = point;
      points_.erase(at + 1, end);
    } else {
      points_.insert(at, point);
    }
  }
  const std::vector<StagePoint>& points() const { return points_; }

 private:
  double longest_us_;
  std::vector<StagePoint> points_;
};

}  // namespace interlace::plan
