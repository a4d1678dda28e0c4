// The exact trade-off between t and t + d over the offload ratios (simplex.h).
#include <algorithm>
#include <cmath>

#include "plan/simplex.h"

namespace interlace::plan {
namespace {

constexpr int kRounds = 6;
constexpr double kSmall = 1e-9;  // of ratios and of planes whose largest coefficient is 1

// c + a . x
struct Affine {
  double c = 0;
  Ratios a{};
  double At(const Ratios& x) const { return c + a[0] * x[0] + a[1] * x[1] + a[2] * x[2] + a[3] * x[3]; }
  Affine& operator+=(const Affine& o) {
    c += o.c;
    for (int k = 0; k < kKinds; ++k) a[k] += o.a[k];
    return *this;
  }
  friend Affine operator+(Affine l, const Affine& r) { return l += r; }
  friend Affine operator*(double f, Affine v) {
    v.c *= f;
    for (double& a : v.a) a *= f;
    return v;
  }
  friend Affine operator-(const Affine& l, const Affine& r) { return l + -1 * r; }
};
using Overlapped = std::array<Affine, 4>;  // compute, device-device, in, out

// What overlaps in a phase, of blocks, embedding and head. What is exposed is linear and makes no kink.
std::vector<Overlapped> OverlapsOf(const StageSums& s, int32_t layers, int32_t full, int32_t selective) {
  const double n = layers;
  std::vector<Overlapped> out;
  for (int p = 0; p < kPhases; ++p) {
    const StagePhase phase = static_cast<StagePhase>(p);
    const bool backward = phase == kBackward || phase == kBackwardLast;
    for (int role = 0; role < kRoles; ++role) {
      if ((role == 0 && !s.embedding) || (role == 2 && !s.head)) continue;
      const LayerPart& part = s.layer[role];
      const LayerCost& cost = part.cost;
      const double count = role == 1 ? n : 1;
      const bool opens = backward ? (s.head ? role == 2 : role == 1) : (s.embedding ? role == 0 : role == 1);
      const bool closes = backward ? (s.embedding ? role == 0 : role == 1) : (s.head ? role == 2 : role == 1);
      const double early = count - (opens ? 1 : 0), late = count - (closes ? 1 : 0);
      double saved = static_cast<double>(cost.saved_kept);
      if (role == 1) {
        saved = (static_cast<double>(layers - full - selective) * saved + selective * static_cast<double>(cost.saved_selective) +
                 full * static_cast<double>(cost.saved_full)) / n;
      }
      Affine coming, going;
      if (backward) {
        coming.a = {role == 0 ? 0 : part.weights_in_us, part.gradients_in_us, 0, saved * s.in_us_per_byte};
        going.a = {0, part.gradients_out_us, 0, 0};
      } else if (phase == kForwardFirst) {
        coming.a = {0, part.gradients_in_us, part.states_in_us, 0};
        going.a = {part.weights_out_us, 0, part.states_out_us, saved * s.out_us_per_byte};
      } else {
        coming.a = {part.weights_in_us, 0, 0, 0};
        going.a = {0, 0, 0, saved * s.out_us_per_byte};
      }
      double compute = count * (backward ? cost.backward_us : cost.forward_us + (phase == kForwardFirst ? part.update_us : 0));
      if (backward && role == 1) compute += full * cost.recompute_full_us + selective * cost.recompute_selective_us;
      const LinkTime &gather = s.gather[p][role], &reduce = s.reduce[p][role];
      compute += early * gather.core_us + late * reduce.core_us;
      out.push_back({Affine{compute, {}}, Affine{early * gather.us + late * reduce.us, {}}, early * coming, late * going});
    }
  }
  return out;
}

// Planes on which the piece of Algorithm 1 that holds at x ends: two classes would be done at once.
template <typename Visit>
void Kinks(const OverlapFactors& f, const Overlapped& amounts, const Ratios& x, const Visit& visit) {
  Overlapped left = amounts;
  std::array<bool, 4> active;
  int count = 0;
  for (int i = 0; i < 4; ++i) count += active[i] = left[i].At(x) > 0;
  for (; count >= 2; --count) {
    // Factors of the set of active classes, as evaluate_lanes.inc picks them.
    auto factor = [&](int i) {
      if (count == 4) return f.all[i];
      for (int j = 0; j < 4; ++j) {
        if (j == i) continue;
        if (count == 3 && !active[j]) return f.without[j][i];
        if (count == 2 && active[j]) return f.pair[i][j];
      }
      return 1.0;
    };
    std::array<Affine, 4> scaled;
    int first = -1;
    for (int i = 0; i < 4; ++i) {
      if (!active[i]) continue;
      scaled[i] = factor(i) * left[i];
      if (first < 0 || scaled[i].At(x) < scaled[first].At(x)) first = i;
    }
    for (int i = 0; i < 4; ++i) {
      if (!active[i] || i == first) continue;
      visit(scaled[i] - scaled[first]);
      left[i] = (1 / factor(i)) * (scaled[i] - scaled[first]);
    }
    active[first] = false;
  }
}

class Tracer {
 public:
  Tracer(const StageSums& sums, const OffloadRegion& region, int32_t layers, int32_t full, int32_t selective,
         const IsBeaten& beaten)
      : sums_(sums), region_(region), beaten_(beaten), overlaps_(OverlapsOf(sums, layers, full, selective)), layers_(layers), full_(full),
        selective_(selective) {
    for (int k = 0; k < kKinds; ++k) {
      if (region.allowed[k]) free_.push_back(k);
    }
  }

  std::vector<TradeOff> Run() {
    for (size_t row = 0; row < region_.rows.size(); ++row) TraceFacet(row);
    Prune(0);
    return std::move(out_);
  }

 private:
  using Plane = Affine;  // = 0

  // The facet where a peak just fits: bounded by ratios, the other peaks and the host.
  void TraceFacet(size_t row) {
    Affine tight{-region_.rows[row].need, region_.rows[row].save};
    if (!Normalize(tight)) return;
    planes_.clear();
    for (int k : free_) {
      Plane low, high{-1, {}};
      low.a[k] = high.a[k] = 1;
      planes_.push_back(low), planes_.push_back(high);
    }
    for (size_t other = 0; other < region_.rows.size(); ++other) {
      if (other != row) AddPlane({-region_.rows[other].need, region_.rows[other].save});
    }
    AddPlane({-region_.host_room, region_.host_use});
    tight_ = tight;
    std::vector<Ratios> corners;
    ForEachLine([&](const std::vector<Ratios>& on_line) { corners.insert(corners.end(), on_line.begin(), on_line.end()); });
    if (corners.empty()) return;
    // Kinks that cut the facet, found by asking at points spread over it: mixes of its corners by a fixed sequence.
    auto dedupe = [](std::vector<Ratios>& points) {
      std::sort(points.begin(), points.end());
      points.erase(std::unique(points.begin(), points.end(), [](const Ratios& a, const Ratios& b) {
        return std::equal(a.begin(), a.end(), b.begin(), [](double l, double r) { return std::abs(l - r) < kSmall; });
      }), points.end());
    };
    dedupe(corners);
    auto ask = [&](const Ratios& x) {
      for (const Overlapped& amounts : overlaps_) {
        Kinks(sums_.factors, amounts, x, [&](const Affine& plane) {
          // Only where corners lie on both sides.
          Plane p = plane;
          for (int k = 0; k < kKinds; ++k) p.a[k] = region_.allowed[k] ? p.a[k] : 0;
          if (!Normalize(p)) return;
          bool above = false, below = false;
          for (const Ratios& corner : corners) above |= p.At(corner) > kSmall, below |= p.At(corner) < -kSmall;
          if (above && below) AddPlane(p);
        });
      }
    };
    Ratios centre{};
    for (const Ratios& corner : corners) {
      for (int k = 0; k < kKinds; ++k) centre[k] += corner[k] / static_cast<double>(corners.size());
    }
    ask(centre);
    for (const Ratios& corner : corners) ask(Between(corner, centre, 0.5)), ask(Between(corner, centre, 0.05));
    // Where an edge turns out to bend, the kinks there are not known yet.
    const size_t begin = out_.size();
    for (int round = 0; round < kRounds; ++round) {
      out_.resize(begin);
      points_.clear(), lines_.clear();
      ForEachLine([&](const std::vector<Ratios>& on_line) {
        points_.insert(points_.end(), on_line.begin(), on_line.end());
        lines_.push_back(points_.size());
      });
      AddEdges();
      Prune(begin);
      const size_t known = planes_.size();
      for (const auto& [from, to] : Bent(begin)) {
        for (double share : {0.1, 0.3, 0.5, 0.7, 0.9}) ask(Between(Between(from, to, share), centre, 1e-3)), ask(Between(from, to, share));
      }
      if (planes_.size() == known) break;
    }
    // Where one end beats the other it stands for the edge.
    for (size_t i = begin; i < out_.size(); ++i) {
      TradeOff& e = out_[i];
      if (e.stable_us[0] <= e.stable_us[1] && e.total_us[0] <= e.total_us[1]) {
        e.to = e.from, e.stable_us[1] = e.stable_us[0], e.total_us[1] = e.total_us[0];
      } else if (e.stable_us[1] <= e.stable_us[0] && e.total_us[1] <= e.total_us[0]) {
        e.from = e.to, e.stable_us[0] = e.stable_us[1], e.total_us[0] = e.total_us[1];
      }
    }
  }

  static Ratios Between(const Ratios& a, const Ratios& b, double share) {
    Ratios x;
    for (int k = 0; k < kKinds; ++k) x[k] = a[k] + share * (b[k] - a[k]);
    return x;
  }

  // Edges that are not linear at their middle or at a third.
  std::vector<std::pair<Ratios, Ratios>> Bent(size_t begin) {
    std::vector<std::pair<Ratios, Ratios>> bent;
    Lanes lanes;
    Fill(lanes);
    constexpr double kShares[] = {0.5, 0.31};
    for (size_t i = begin; i < out_.size(); i += Lanes::kWidth / 2) {
      const size_t edges = std::min<size_t>(Lanes::kWidth / 2, out_.size() - i);
      for (size_t e = 0; e < 2 * edges; ++e) Put(lanes, e, Between(out_[i + e / 2].from, out_[i + e / 2].to, kShares[e % 2]));
      lanes.count = static_cast<int>(2 * edges);
      EvaluateLanes(sums_, lanes, Wanted::kTimes);
      for (size_t e = 0; e < 2 * edges; ++e) {
        const TradeOff& edge = out_[i + e / 2];
        auto off = [&](const std::array<double, 2>& ends, double value) {
          return std::abs(ends[0] + kShares[e % 2] * (ends[1] - ends[0]) - value) > 1e-8 * value;
        };
        if (off(edge.stable_us, lanes.stable_us[e]) || off(edge.total_us, lanes.total_us[e])) bent.emplace_back(edge.from, edge.to);
      }
    }
    return bent;
  }

  void Fill(Lanes& lanes) const {
    lanes.layers.fill(layers_), lanes.full.fill(full_), lanes.selective.fill(selective_), lanes.in_flight.fill(1);
  }
  static void Put(Lanes& lanes, size_t at, const Ratios& x) {
    lanes.wo[at] = x[0], lanes.go[at] = x[1], lanes.oo[at] = x[2], lanes.ao[at] = x[3];
  }

  // Scaled so that the largest coefficient is 1; false where it does not depend on the ratios.
  static bool Normalize(Plane& p) {
    double largest = 0;
    int which = 0;
    for (int k = 0; k < kKinds; ++k) {
      if (std::abs(p.a[k]) > largest) largest = std::abs(p.a[k]), which = k;
    }
    if (!(largest > 0)) return false;
    p = 1 / p.a[which] * p;
    return std::isfinite(p.c);
  }
  void AddPlane(Plane p) {
    for (int k = 0; k < kKinds; ++k) p.a[k] = region_.allowed[k] ? p.a[k] : 0;
    if (!Normalize(p)) return;
    for (const Plane& q : planes_) {
      double apart = std::abs(p.c - q.c);
      for (int k = 0; k < kKinds; ++k) apart = std::max(apart, std::abs(p.a[k] - q.a[k]));
      if (apart < kSmall) return;
    }
    planes_.push_back(p);
  }

  bool Inside(Ratios& x) const {
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

  // Visits the points, in order, where planes cross each line of the facet, a line being where (dimensions - 2) planes meet.
  template <typename Visit>
  void ForEachLine(const Visit& visit) {
    const int dimensions = static_cast<int>(free_.size());
    std::vector<Ratios> points;
    auto follow = [&](const Plane* a, const Plane* b) {
      // The line x = at + s * along within tight, a and b; `along` by elimination.
      std::array<const Plane*, 3> equations{&tight_, a, b};
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
        if (std::abs(m[rank][best]) < 1e-7) return;  // parallel
        const double scale = 1 / m[rank][best];
        for (int k = 0; k <= dimensions; ++k) m[rank][k] *= scale;
        for (int r = 0; r < rank; ++r) {
          const double f = m[r][best];
          for (int k = 0; k <= dimensions; ++k) m[r][k] -= f * m[rank][k];
        }
        used[best] = true, pivot[rank++] = best;
      }
      const int open = static_cast<int>(std::find(used.begin(), used.begin() + dimensions, false) - used.begin());
      Ratios at{}, along{};
      along[free_[open]] = 1;
      for (int r = 0; r < rank; ++r) at[free_[pivot[r]]] = m[r][dimensions], along[free_[pivot[r]]] = -m[r][open];
      // The part inside, then what crosses it.
      double low = 0, high = 1;
      auto clip = [&](double value, double slope) {  // value + slope * s >= 0
        if (std::abs(slope) < 1e-12) {
          if (value < -kSmall) high = -1;
        } else if (slope > 0) {
          low = std::max(low, -value / slope);
        } else {
          high = std::min(high, -value / slope);
        }
      };
      for (int k : free_) clip(at[k], along[k]), clip(1 - at[k], -along[k]);
      for (const auto& row : region_.rows) {
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
      if (high < low - kSmall) return;
      high = std::max(high, low);
      cuts_.assign({low, high});
      for (const Plane& p : planes_) {
        double value = p.c, change = 0;
        for (int k = 0; k < kKinds; ++k) value += p.a[k] * at[k], change += p.a[k] * along[k];
        if (std::abs(change) < 1e-12) continue;
        const double s = -value / change;
        if (s > low && s < high) cuts_.push_back(s);
      }
      std::sort(cuts_.begin(), cuts_.end());
      points.clear();
      double last = -1;
      for (double s : cuts_) {
        if (s - last < kSmall) continue;
        last = s;
        Ratios x;
        for (int k = 0; k < kKinds; ++k) x[k] = at[k] + s * along[k];
        if (Inside(x)) points.push_back(x);
      }
      if (!points.empty()) visit(points);
    };
    const size_t count = planes_.size();
    if (dimensions == 1) {
      Ratios x{};
      x[free_[0]] = -tight_.c / tight_.a[free_[0]];
      points.assign({x});
      if (Inside(points[0])) visit(points);
    } else if (dimensions == 2) {
      follow(nullptr, nullptr);
    } else if (dimensions == 3) {
      for (size_t i = 0; i < count; ++i) follow(&planes_[i], nullptr);
    } else if (dimensions == 4) {
      for (size_t i = 0; i < count; ++i) {
        for (size_t j = i + 1; j < count; ++j) follow(&planes_[i], &planes_[j]);
      }
    }
  }

  // Evaluates the points of all lines and keeps the edges between neighbours that may be of use.
  void AddEdges() {
    values_.resize(points_.size());
    Lanes lanes;
    Fill(lanes);
    for (size_t i = 0; i < points_.size(); i += Lanes::kWidth) {
      lanes.count = static_cast<int>(std::min<size_t>(Lanes::kWidth, points_.size() - i));
      for (int e = 0; e < lanes.count; ++e) Put(lanes, e, points_[i + e]);
      EvaluateLanes(sums_, lanes, Wanted::kTimes);
      for (int e = 0; e < lanes.count; ++e) values_[i + e] = {lanes.stable_us[e], lanes.total_us[e]};
    }
    size_t from = 0;
    for (size_t to : lines_) {
      for (size_t i = from; i + 1 < to || i == from; ++i) {
        const size_t j = i + 1 < to ? i + 1 : i;
        const TradeOff edge{points_[i], points_[j], {values_[i].first, values_[j].first}, {values_[i].second, values_[j].second}};
        if (!beaten_ || !beaten_(std::min(edge.stable_us[0], edge.stable_us[1]), std::min(edge.total_us[0], edge.total_us[1]))) {
          out_.push_back(edge);
        }
      }
      from = to;
    }
  }

  // Drops edges whose ideal corner some end beats.
  void Prune(size_t begin) {
    std::vector<std::pair<double, double>> ends, best;
    for (size_t i = begin; i < out_.size(); ++i) {
      const TradeOff& edge = out_[i];
      for (int e = 0; e < 2; ++e) ends.emplace_back(edge.stable_us[e], edge.total_us[e]);
    }
    std::sort(ends.begin(), ends.end());
    for (const auto& end : ends) {
      if (best.empty() || end.second < best.back().second) best.push_back(end);
    }
    std::vector<std::pair<double, double>> seen;
    auto end = std::remove_if(out_.begin() + static_cast<int64_t>(begin), out_.end(), [&](const TradeOff& edge) {
      const std::pair<double, double> corner{std::min(edge.stable_us[0], edge.stable_us[1]), std::min(edge.total_us[0], edge.total_us[1])};
      auto after = std::upper_bound(best.begin(), best.end(), corner, [](const auto& a, const auto& b) { return a.first < b.first; });
      if (after == best.begin()) return false;
      const auto& other = *std::prev(after);
      const bool single = edge.stable_us[0] == edge.stable_us[1] && edge.total_us[0] == edge.total_us[1];
      if (single && other == corner) {  // one of equal points is enough
        if (std::find(seen.begin(), seen.end(), corner) != seen.end()) return true;
        seen.push_back(corner);
        return false;
      }
      return other.second <= corner.second && other != corner;
    });
    out_.erase(end, out_.end());
  }

  const StageSums& sums_;
  const OffloadRegion& region_;
  const IsBeaten& beaten_;
  const std::vector<Overlapped> overlaps_;
  const int32_t layers_, full_, selective_;
  std::vector<int> free_;
  Plane tight_;
  std::vector<Plane> planes_;
  std::vector<double> cuts_;
  std::vector<Ratios> points_;           // of all lines, one after another
  std::vector<std::pair<double, double>> values_;  // t and t + d there
  std::vector<size_t> lines_;            // where each line's points end
  std::vector<TradeOff> out_;
};

}  // namespace

std::vector<TradeOff> TraceOffload(const StageSums& sums, const OffloadRegion& region, int32_t layers, int32_t full, int32_t selective,
                                   const IsBeaten& beaten) {
  return Tracer(sums, region, layers, full, selective, beaten).Run();
}

}  // namespace interlace::plan
