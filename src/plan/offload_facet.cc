#include "plan/offload_facet.h"

#include <algorithm>
#include <cmath>

namespace interlace::plan {

OffloadFacet::OffloadFacet(const OffloadRegion& region, size_t row)
    : region_(region), tight_{-region.rows[row].need, region.rows[row].save} {
  for (int k = 0; k < kKinds; ++k) {
    if (region.allowed[k]) free_.push_back(k);
  }
  empty_ = !Normalize(tight_);
  if (empty_) return;
  for (int k : free_) {
    Affine low, high{-1, {}};
    low.a[k] = high.a[k] = 1;
    planes_.push_back(low), planes_.push_back(high);
  }
  for (size_t other = 0; other < region.rows.size(); ++other) {
    if (other != row) AddPlane({-region.rows[other].need, region.rows[other].save});
  }
  AddPlane({-region.host_room, region.host_use});
}

bool OffloadFacet::Normalize(Affine& p) {
  double largest = 0;
  int which = 0;
  for (int k = 0; k < kKinds; ++k) {
    if (std::abs(p.a[k]) > largest) largest = std::abs(p.a[k]), which = k;
  }
  if (!(largest > 0)) return false;
  p = 1 / p.a[which] * p;
  return std::isfinite(p.c);
}

void OffloadFacet::AddPlane(Affine p) {
  for (int k = 0; k < kKinds; ++k) p.a[k] = region_.allowed[k] ? p.a[k] : 0;
  if (!Normalize(p)) return;
  for (const Affine& q : planes_) {
    double apart = std::abs(p.c - q.c);
    for (int k = 0; k < kKinds; ++k) apart = std::max(apart, std::abs(p.a[k] - q.a[k]));
    if (apart < kSmall) return;
  }
  planes_.push_back(p);
}

bool OffloadFacet::Inside(Ratios& x) const {
  for (int k = 0; k < kKinds; ++k) {
    if (x[k] < -kSmall || x[k] > 1 + kSmall) return false;
    x[k] = std::clamp(x[k], 0.0, 1.0);
  }
  double use = 0;
  for (int k = 0; k < kKinds; ++k) use += region_.host_use[k] * x[k];
  if (use > region_.host_room * (1 + kSmall)) return false;
  return std::all_of(region_.rows.begin(), region_.rows.end(), [&](const OffloadRegion::Row& row) {
    double lacking = row.need;
    for (int k = 0; k < kKinds; ++k) lacking -= row.save[k] * x[k];
    return lacking <= kSmall * (1 + std::abs(row.need));
  });
}

// By elimination within `tight_`, a and b.
bool OffloadFacet::Solve(const Affine* a, const Affine* b, Line& line) const {
  const int dimensions = static_cast<int>(free_.size());
  const std::array<const Affine*, 3> equations{&tight_, a, b};
  double m[3][kKinds + 1];
  int rank = 0, pivot[3];
  std::array<bool, kKinds> used{};
  for (int e = 0; e < dimensions - 1; ++e) {
    for (int k = 0; k < dimensions; ++k) m[rank][k] = equations[e]->a[free_[k]];
    m[rank][dimensions] = -equations[e]->c;
    for (int r = 0; r < rank; ++r) {
      const double f = m[rank][pivot[r]];
      for (int k = 0; k <= dimensions; ++k) m[rank][k] -= f * m[r][k];
    }
    int best = -1;
    for (int k = 0; k < dimensions; ++k) {
      if (!used[k] && (best < 0 || std::abs(m[rank][k]) > std::abs(m[rank][best]))) best = k;
    }
    if (std::abs(m[rank][best]) < 1e-7) return false;
    const double scale = 1 / m[rank][best];
    for (int k = 0; k <= dimensions; ++k) m[rank][k] *= scale;
    for (int r = 0; r < rank; ++r) {
      const double f = m[r][best];
      for (int k = 0; k <= dimensions; ++k) m[r][k] -= f * m[rank][k];
    }
    used[best] = true, pivot[rank++] = best;
  }
  const int open = static_cast<int>(std::find(used.begin(), used.begin() + dimensions, false) - used.begin());
  line = {};
  line.along[free_[open]] = 1;
  for (int r = 0; r < rank; ++r) line.at[free_[pivot[r]]] = m[r][dimensions], line.along[free_[pivot[r]]] = -m[r][open];
  return true;
}

bool OffloadFacet::Clip(Line& line) const {
  const Ratios &at = line.at, &along = line.along;
  line.low = 0, line.high = 1;
  auto clip = [&](double value, double slope) {  // value + slope * s >= 0
    if (std::abs(slope) < 1e-12) {
      if (value < -kSmall) line.high = -1;
    } else if (slope > 0) {
      line.low = std::max(line.low, -value / slope);
    } else {
      line.high = std::min(line.high, -value / slope);
    }
  };
  for (int k : free_) clip(at[k], along[k]), clip(1 - at[k], -along[k]);
  for (const OffloadRegion::Row& row : region_.rows) {
    const double scale = 1 / (1 + std::abs(row.need));
    double value = -row.need, slope = 0;
    for (int k = 0; k < kKinds; ++k) value += row.save[k] * at[k], slope += row.save[k] * along[k];
    // Its own peak is tight all along the line.
    if (std::abs(value * scale) < kSmall && std::abs(slope * scale) < kSmall) continue;
    clip(value * scale, slope * scale);
  }
  double room = region_.host_room, slope = 0;
  for (int k = 0; k < kKinds; ++k) room -= region_.host_use[k] * at[k], slope -= region_.host_use[k] * along[k];
  const double scale = 1 / (1 + std::abs(region_.host_room));
  clip(room * scale, slope * scale);
  if (line.high < line.low - kSmall) return false;
  line.high = std::max(line.high, line.low);
  return true;
}

void OffloadFacet::Follow(const Affine* a, const Affine* b, std::vector<Ratios>& points, std::vector<size_t>& ends) {
  Line line;
  if (!Solve(a, b, line) || !Clip(line)) return;
  cuts_.assign({line.low, line.high});
  for (const Affine& p : planes_) {
    double value = p.c, change = 0;
    for (int k = 0; k < kKinds; ++k) value += p.a[k] * line.at[k], change += p.a[k] * line.along[k];
    if (std::abs(change) < 1e-12) continue;
    const double s = -value / change;
    if (s > line.low && s < line.high) cuts_.push_back(s);
  }
  std::sort(cuts_.begin(), cuts_.end());
  const size_t begin = points.size();
  double last = -1;
  for (double s : cuts_) {
    if (s - last < kSmall) continue;
    last = s;
    Ratios x;
    for (int k = 0; k < kKinds; ++k) x[k] = line.at[k] + s * line.along[k];
    if (Inside(x)) points.push_back(x);
  }
  if (points.size() > begin) ends.push_back(points.size());
}

void OffloadFacet::Lines(std::vector<Ratios>& points, std::vector<size_t>& ends) {
  points.clear(), ends.clear();
  const size_t count = planes_.size();
  switch (free_.size()) {
    case 1: {
      Ratios x{};
      x[free_[0]] = -tight_.c / tight_.a[free_[0]];
      if (Inside(x)) points.push_back(x), ends.push_back(1);
      break;
    }
    case 2:
      Follow(nullptr, nullptr, points, ends);
      break;
    case 3:
      for (size_t i = 0; i < count; ++i) Follow(&planes_[i], nullptr, points, ends);
      break;
    case 4:
      for (size_t i = 0; i < count; ++i) {
        for (size_t j = i + 1; j < count; ++j) Follow(&planes_[i], &planes_[j], points, ends);
      }
      break;
    default:
      break;
  }
}

}  // namespace interlace::plan
