// The strategies of a stage that no other beats in both t and t + d.
//
// For a key, G fixes b * dp, and the devices fix dp * tp, so a handful of (b, dp, tp) remain, with four levels of ZeRO each.
// Under one of those the choices are how many blocks are recomputed and which shares are offloaded:
//   1. Recomputation: (full, selective) pairs in order of the compute they add. A pair that adds more compute and saves no more
//      memory than another is never better, whatever is offloaded; what is left is a list from "nothing" to "all".
//   2. The first of the list that fits without offload beats all after it.
//   3. Each before it must offload; its best ratios lie on the boundary of the region that fits (simplex.h).
// Whatever cannot beat the points found so far even with memory left aside is skipped.
#include <algorithm>
#include <cmath>

#include "plan/simplex.h"

namespace interlace::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Point {
  double stable_us, total_us;     // t, t + d
  int32_t part, full, selective;
  std::array<float, kKinds> ratios;
};

// Pareto set of (t, t + d), kept sorted by t.
class Pareto {
 public:
  explicit Pareto(double longest_us) : longest_us_(longest_us) {}
  // Whether some point is at least as good in both.
  bool Beats(double stable_us, double total_us) const {
    if (stable_us > longest_us_) return true;
    auto after = std::upper_bound(points_.begin(), points_.end(), stable_us, [](double t, const Point& p) { return t < p.stable_us; });
    return after != points_.begin() && std::prev(after)->total_us <= total_us;
  }
  void Add(const Point& point) {
    if (Beats(point.stable_us, point.total_us)) return;
    auto at = std::lower_bound(points_.begin(), points_.end(), point.stable_us, [](const Point& p, double t) { return p.stable_us < t; });
    auto end = at;
    while (end != points_.end() && end->total_us >= point.total_us) ++end;
    if (at != end) {
      *at = point;
      points_.erase(at + 1, end);
    } else {
      points_.insert(at, point);
    }
  }
  const std::vector<Point>& points() const { return points_; }

 private:
  double longest_us_;
  std::vector<Point> points_;
};

struct Recompute { int32_t full, selective; };

// Step 1 of the list above.
std::vector<Recompute> RecomputeChoices(const LayerCost& block, int32_t layers, const StageOptions& options) {
  struct Choice { double compute, tp, saved, work, most; Recompute counts; };
  std::vector<Choice> choices;
  const int32_t step = options.uniform_recompute ? layers : 1;
  for (int32_t full = options.only_full ? layers : 0; full <= (options.full ? layers : 0); full += step) {
    for (int32_t selective = 0; selective <= (options.selective ? layers - full : 0); selective += step) {
      const int32_t kept = layers - full - selective;
      Choice c{full * block.recompute_full_us + selective * block.recompute_selective_us,
               full * block.tp_recompute_full_us + selective * block.tp_recompute_selective_us,
               static_cast<double>(kept * block.saved_kept + selective * block.saved_selective + full * block.saved_full),
               0, 0, {full, selective}};
      auto kind = [&](int32_t count, int64_t saved, int64_t work) {
        if (count > 0) c.most = std::max(c.most, static_cast<double>(saved)), c.work = std::max(c.work, static_cast<double>(work));
      };
      kind(kept, block.saved_kept, block.work_backward);
      kind(selective, block.saved_selective, block.work_backward_selective);
      kind(full, block.saved_full, block.work_backward_full);
      choices.push_back(c);
    }
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return std::tie(a.compute, a.tp, a.saved, a.work, a.most, a.counts.full) < std::tie(b.compute, b.tp, b.saved, b.work, b.most, b.counts.full);
  });
  std::vector<Recompute> out;
  std::vector<Choice> kept;
  for (const Choice& c : choices) {
    bool beaten = std::any_of(kept.rbegin(), kept.rend(), [&](const Choice& k) {
      return k.tp <= c.tp && k.saved <= c.saved && k.work <= c.work && k.most <= c.most;
    });
    if (beaten) continue;
    kept.push_back(c);
    out.push_back(c.counts);
  }
  return out;
}

// Strategies of one (b, dp, tp, ZeRO), evaluated together as soon as a block is full.
class Trial {
 public:
  Trial(const StageSums& sums, const StageKey& key, int32_t part, Pareto& best) : sums_(sums), key_(key), part_(part), best_(best) {}
  void Try(Recompute counts, const Ratios& x) {
    const int i = lanes_.count++;
    lanes_.layers[i] = key_.layers, lanes_.full[i] = counts.full, lanes_.selective[i] = counts.selective;
    lanes_.in_flight[i] = key_.in_flight;
    auto round_up = [](double v) {
      float f = static_cast<float>(v);
      return std::min(f < v ? std::nextafter(f, 2.0f) : f, 1.0f);
    };
    lanes_.wo[i] = round_up(x[0]), lanes_.go[i] = round_up(x[1]), lanes_.oo[i] = round_up(x[2]), lanes_.ao[i] = round_up(x[3]);
    if (lanes_.count == Lanes::kWidth) Flush();
  }
  void Flush();
  int64_t limit = 0, host = 0;

 private:
  const StageSums& sums_;
  const StageKey& key_;
  int32_t part_;
  Pareto& best_;
  Lanes lanes_;
};

void Trial::Flush() {
  if (lanes_.count == 0) return;
  EvaluateLanes(sums_, lanes_);
  for (int i = 0; i < lanes_.count; ++i) {
    if (std::max(lanes_.peak_forward[i], lanes_.peak_backward[i]) > static_cast<double>(limit)) continue;
    if (lanes_.host[i] > static_cast<double>(host)) continue;
    best_.Add({lanes_.stable_us[i], lanes_.total_us[i], part_, static_cast<int32_t>(lanes_.full[i]),
               static_cast<int32_t>(lanes_.selective[i]),
               {static_cast<float>(lanes_.wo[i]), static_cast<float>(lanes_.go[i]), static_cast<float>(lanes_.oo[i]),
                static_cast<float>(lanes_.ao[i])}});
  }
  lanes_.count = 0;
}

// Ratios worth a try: the region's vertices (all but one ratio 0 or 1), and points between two of them along an edge.
template <typename Visit>
void TraceEdges(const OffloadRegion& region, const Visit& visit) {
  for (int fixed = 0; fixed < 1 << kKinds; ++fixed) {  // which are 1
    for (int kind = 0; kind < kKinds; ++kind) {
      if (!region.allowed[kind] || (fixed >> kind & 1) != 0) continue;
      Ratios x{};
      bool allowed = true;
      for (int k = 0; k < kKinds; ++k) {
        x[k] = fixed >> k & 1;
        allowed = allowed && (x[k] == 0 || region.allowed[k]);
      }
      if (!allowed) continue;
      const double least = region.Least(x, kind);
      if (least < 0) continue;
      x[kind] = least;
      visit(x);
      if (least == 0) continue;
      // From this vertex along each edge: another ratio rises while this one falls.
      for (int other = kind + 1; other < kKinds; ++other) {
        if (!region.allowed[other] || (fixed >> other & 1) != 0) continue;
        for (double share : {0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875}) {
          Ratios y = x;
          y[kind] = least * share;
          y[other] = region.Least(y, other);
          if (y[other] >= 0) visit(y);
        }
      }
    }
  }
}

}  // namespace

StageModel::Bound StageModel::BoundOf(const StageKey& key) const {
  Bound bound{kInfinity, kInfinity};
  auto found = state_->of_key.find({key.devices, key.micro_batches});
  if (found == state_->of_key.end() || key.layers < 1) return bound;
  for (int32_t first : found->second) {
    for (int32_t zero = 0; zero < (state_->parts[first].dp == 1 ? 1 : 4); ++zero) {
      const StageParts& parts = state_->parts[first + zero];
      if (parts.dp > 1 && !state_->options.zero[zero]) continue;
      Lanes lanes;
      lanes.count = 1;
      lanes.layers[0] = key.layers, lanes.in_flight[0] = 1;
      lanes.full[0] = lanes.selective[0] = lanes.wo[0] = lanes.go[0] = lanes.oo[0] = lanes.ao[0] = 0;
      EvaluateLanes(SumsOf(parts, key.embedding, key.head), lanes);
      bound.stable_us = std::min(bound.stable_us, lanes.stable_us[0]);
      bound.total_us = std::min(bound.total_us, lanes.total_us[0]);
    }
  }
  return bound;
}

Frontier StageModel::FrontierOf(const StageKey& key, double longest_us) const {
  const StageOptions& options = state_->options;
  auto found = state_->of_key.find({key.devices, key.micro_batches});
  if (found == state_->of_key.end() || key.layers < 1 || key.in_flight < 1) return {};

  struct Unit { int32_t part; StageSums sums; double stable_us, total_us; };
  std::vector<Unit> units;
  for (int32_t first : found->second) {
    for (int32_t zero = 0; zero < (state_->parts[first].dp == 1 ? 1 : 4); ++zero) {
      const StageParts& parts = state_->parts[first + zero];
      if (parts.dp > 1 && !options.zero[zero]) continue;
      Unit unit{first + zero, SumsOf(parts, key.embedding, key.head), 0, 0};
      Lanes lanes;
      lanes.count = 1;
      lanes.layers[0] = key.layers, lanes.in_flight[0] = key.in_flight;
      lanes.full[0] = lanes.selective[0] = lanes.wo[0] = lanes.go[0] = lanes.oo[0] = lanes.ao[0] = 0;
      EvaluateLanes(unit.sums, lanes);
      unit.stable_us = lanes.stable_us[0], unit.total_us = lanes.total_us[0];
      if (unit.stable_us <= longest_us) units.push_back(std::move(unit));
    }
  }
  const double steps = key.micro_batches;
  std::sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) {
    const double x = steps * a.stable_us + a.total_us, y = steps * b.stable_us + b.total_us;
    return x != y ? x < y : a.part < b.part;
  });

  Pareto best(longest_us);
  for (const Unit& unit : units) {
    if (best.Beats(unit.stable_us, unit.total_us)) continue;
    Trial trial(unit.sums, key, unit.part, best);
    trial.limit = options.device_bytes, trial.host = state_->host_share;
    for (const Recompute& counts : RecomputeChoices(unit.sums.layer[1].cost, key.layers, options)) {
      const OffloadRegion region =
          RegionOf(unit.sums, options, state_->host_share, key.layers, counts.full, counts.selective, key.in_flight);
      if (region.rows.empty()) {
        trial.Try(counts, {});
        break;
      }
      if (!options.ratios.empty()) {
        for (float wo : options.ratios) for (float go : options.ratios) for (float oo : options.ratios) for (float ao : options.ratios) {
          Ratios x{wo, go, oo, ao};
          bool allowed = true;
          for (int k = 0; k < kKinds; ++k) allowed = allowed && (x[k] == 0 || region.allowed[k]);
          if (allowed && region.Holds(x)) trial.Try(counts, x);
        }
        continue;
      }
      TraceEdges(region, [&](const Ratios& x) { trial.Try(counts, x); });
    }
    trial.Flush();
  }

  Frontier out;
  for (const Point& p : best.points()) {
    const StageParts& parts = state_->parts[p.part];
    Strategy s;
    s.layers = key.layers, s.embedding = key.embedding, s.head = key.head;
    s.micro_batch = parts.micro_batch, s.dp = parts.dp, s.tp = parts.tp, s.zero = parts.zero;
    s.micro_batches = key.micro_batches, s.in_flight = key.in_flight;
    s.full = p.full, s.selective = p.selective;
    s.weights_out = p.ratios[0], s.gradients_out = p.ratios[1], s.states_out = p.ratios[2], s.activations_out = p.ratios[3];
    out.push_back({s, EvaluateOne(s)});
  }
  return out;
}

}  // namespace interlace::plan
