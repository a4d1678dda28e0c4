// The strategies of a stage that no other beats in both t and t + d.
//
// For a key, G fixes b * dp, and the devices fix dp * tp, so a handful of (b, dp, tp) remain, with four levels of ZeRO
// each. Under one of those the choices are how many blocks are recomputed and which shares are offloaded:
//   1. Recomputation: (full, selective) pairs in order of the compute they add. A pair that adds more compute and saves
//      no more memory than another is never better, whatever is offloaded; what is left is a list from "nothing" to
//      "all".
//   2. The first of the list that fits without offload beats all after it.
//   3. Each before it must offload: tried are the vertices of what fits (offload_region.h), or a given grid.
//   4. What no other beats is refined: one share moves, another becomes the least that then fits.
#include <algorithm>
#include <cmath>
#include <map>

#include "plan/offload_region.h"
#include "plan/pareto.h"

namespace interlace::plan {
namespace {

struct Recompute {
  int32_t full, selective;
};  // blocks

// Step 1 of the list above.
std::vector<Recompute> RecomputeChoices(const LayerCost& block, int32_t layers, const StageOptions& options) {
  struct Choice {
    double compute, tp, saved, work, most;
    Recompute counts;
  };
  std::vector<Choice> choices;
  const int32_t step = options.uniform_recompute ? layers : 1;
  for (int32_t full = options.only_full ? layers : 0; full <= (options.full ? layers : 0); full += step) {
    for (int32_t selective = 0; selective <= (options.selective ? layers - full : 0); selective += step) {
      const int32_t kept = layers - full - selective;
      Choice c{
          full * block.recompute_full_us + selective * block.recompute_selective_us,
          full * block.tp_recompute_full_us + selective * block.tp_recompute_selective_us,
          static_cast<double>(kept * block.saved_kept + selective * block.saved_selective + full * block.saved_full),
          0,
          0,
          {full, selective}};
      auto kind = [&](int32_t count, int64_t saved, int64_t work) {
        if (count > 0)
          c.most = std::max(c.most, static_cast<double>(saved)), c.work = std::max(c.work, static_cast<double>(work));
      };
      kind(kept, block.saved_kept, block.work_backward);
      kind(selective, block.saved_selective, block.work_backward_selective);
      kind(full, block.saved_full, block.work_backward_full);
      choices.push_back(c);
    }
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return std::tie(a.compute, a.tp, a.saved, a.work, a.most, a.counts.full) <
           std::tie(b.compute, b.tp, b.saved, b.work, b.most, b.counts.full);
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

// A strategy of a key without offload.
Strategy StrategyOf(const StageKey& key, const StageParts& parts, Recompute counts) {
  Strategy s;
  s.layers = key.layers, s.embedding = key.embedding, s.head = key.head;
  s.micro_batch = parts.micro_batch, s.dp = parts.dp, s.tp = parts.tp, s.zero = parts.zero;
  s.micro_batches = key.micro_batches, s.in_flight = key.in_flight;
  s.full = counts.full, s.selective = counts.selective;
  return s;
}

// Keeps a strategy with these ratios if nothing beats it and it fits.
void Try(const StageModel::State& state, int32_t part, Strategy s, const Ratios& x, Pareto& best) {
  auto round_up = [](double v) {
    float f = static_cast<float>(v);
    return std::min(f < v ? std::nextafter(f, 2.0f) : f, 1.0f);
  };
  s.weights_out = round_up(x[0]), s.gradients_out = round_up(x[1]), s.states_out = round_up(x[2]),
  s.activations_out = round_up(x[3]);
  const StageTimes us = TimesOf(state.parts[part], s);
  if (best.Beats(us.stable_us, us.total_us)) return;
  const StageBytes bytes = CountBytes(state.parts[part], s);
  // device: every peak is within the limit
  if (std::max(bytes.peak_forward, bytes.peak_backward) > state.options.device_bytes) return;
  // host: what is held there is within the device's share
  if (bytes.host > state.host_share) return;
  best.Add({us.stable_us, us.total_us, part, s});
}

// The (b, dp, tp, ZeRO) that a key allows, as parts of the model's state.
std::vector<int32_t> PartsOf(const StageModel::State& state, const StageKey& key) {
  std::vector<int32_t> parts;
  auto found = state.of_key.find({key.devices, key.micro_batches});
  if (found == state.of_key.end() || key.in_flight < 1) return parts;
  for (int32_t first : found->second) {
    for (int32_t zero = 0; zero < (state.parts[first].dp == 1 ? 1 : 4); ++zero) {
      const int32_t part = first + StageModel::State::Offset(zero, key.embedding, key.head);
      if (state.parts[part].dp == 1 || state.options.zero[zero]) parts.push_back(part);
    }
  }
  return parts;
}

// Whether something of so many blocks may fit, whatever is recomputed and offloaded. A block of some kind needs no less
// beside blocks of other kinds than among its like, so all blocks alike is the least. More blocks need no less of
// anything.
bool MayFit(const StageModel::State& state, const StageKey& key, int32_t part) {
  const StageOptions& options = state.options;
  auto fits = [&](int32_t full, int32_t selective) {
    const OffloadRegion region =
        RegionOf(state, state.parts[part], StrategyOf(key, state.parts[part], {full, selective}));
    return std::all_of(region.rows.begin(), region.rows.end(), [](const OffloadRegion::Row& row) {
      return row.save[0] + row.save[1] + row.save[2] + row.save[3] >= row.need;
    });
  };
  return (!options.only_full && fits(0, 0)) || (options.full && fits(key.layers, 0)) ||
         (options.selective && fits(0, key.layers));
}

// The times of one of PartsOf with nothing offloaded and as little recomputed as the space allows.
StageTimes LeastTimes(const StageModel::State& state, const StageKey& key, int32_t part) {
  const Recompute least{state.options.only_full ? key.layers : 0, 0};
  return TimesOf(state.parts[part], StrategyOf(key, state.parts[part], least));
}

struct FittingPart {
  int32_t part;
  StageTimes least;
};

// Steps 2 and 3 of the list above.
void TryPart(const StageModel::State& state, const StageKey& key, int32_t part, const std::vector<Recompute>& choices,
             Pareto& best) {
  for (const Recompute& counts : choices) {
    const Strategy s = StrategyOf(key, state.parts[part], counts);
    const OffloadRegion region = RegionOf(state, state.parts[part], s);
    auto visit = [&](const Ratios& x) { Try(state, part, s, x, best); };
    if (region.rows.empty()) return visit({});
    if (state.options.ratios.empty()) {
      Vertices(region, visit);
    } else {
      OnGrid(state.options.ratios, region, visit);
    }
  }
}

// Step 4.
void Refine(const StageModel::State& state, Pareto& best) {
  for (double step : {0.5, 0.25, 0.125, 0.0625}) {
    const std::vector<StagePoint> points = best.points();
    for (const StagePoint& point : points) {
      const OffloadRegion region = RegionOf(state, state.parts[point.part], point.strategy);
      if (region.rows.empty()) continue;
      Neighbours(RatiosOf(point.strategy), step, region,
                 [&](const Ratios& x) { Try(state, point.part, point.strategy, x, best); });
    }
  }
}

// What evenly spaced weights alpha choose: alpha * G * t + (1 - alpha) * d (Mist, equation 4).
std::vector<StagePoint> Sampled(const std::vector<StagePoint>& points, int32_t weights, double steps) {
  std::vector<StagePoint> chosen;
  for (int i = 0; i < weights; ++i) {
    const double alpha = weights == 1 ? 0.5 : static_cast<double>(i) / (weights - 1);
    auto cost = [&](const StagePoint& p) {
      return alpha * steps * p.stable_us + (1 - alpha) * (p.total_us - p.stable_us);
    };
    chosen.push_back(*std::min_element(points.begin(), points.end(),
                                       [&](const StagePoint& a, const StagePoint& b) { return cost(a) < cost(b); }));
  }
  std::sort(chosen.begin(), chosen.end(),
            [](const StagePoint& a, const StagePoint& b) { return a.stable_us < b.stable_us; });
  chosen.erase(std::unique(chosen.begin(), chosen.end(),
                           [](const StagePoint& a, const StagePoint& b) { return a.stable_us == b.stable_us; }),
               chosen.end());
  return chosen;
}

}  // namespace

void StageModel::BoundsOf(const StageKey& key, std::span<Bound> bounds) const {
  std::fill(bounds.begin(), bounds.end(), Bound{});
  for (int32_t part : PartsOf(*state_, key)) {
    StageKey of = key;
    for (Bound& bound : bounds) {
      of.layers = static_cast<int32_t>(&bound - bounds.data()) + 1;
      if (!MayFit(*state_, of, part)) break;  // more layers need no less of anything
      const StageTimes least = LeastTimes(*state_, of, part);
      bound.stable_us = std::min(bound.stable_us, least.stable_us);
      bound.total_us = std::min(bound.total_us, least.total_us);
    }
  }
}

Frontier StageModel::FrontierOf(const StageKey& key, double longest_us) const {
  if (key.layers < 1) return {};
  const double steps = key.micro_batches;
  std::vector<FittingPart> fitting;
  for (int32_t part : PartsOf(*state_, key)) {
    const StageTimes least = LeastTimes(*state_, key, part);
    if (least.stable_us <= longest_us && MayFit(*state_, key, part)) fitting.push_back({part, least});
  }
  std::sort(fitting.begin(), fitting.end(), [&](const FittingPart& a, const FittingPart& b) {
    const double x = steps * a.least.stable_us + a.least.total_us, y = steps * b.least.stable_us + b.least.total_us;
    return x != y ? x < y : a.part < b.part;
  });
  Pareto best(longest_us);
  std::map<std::pair<int32_t, int32_t>, std::vector<Recompute>> choices;  // by (b, tp)
  for (const FittingPart& fit : fitting) {
    if (best.Beats(fit.least.stable_us, fit.least.total_us)) continue;
    const StageParts& parts = state_->parts[fit.part];
    auto [at, added] = choices.try_emplace({parts.micro_batch, parts.tp});
    if (added) at->second = RecomputeChoices(parts.of(Role::kBlock).cost, key.layers, state_->options);
    TryPart(*state_, key, fit.part, at->second, best);
  }
  if (state_->options.ratios.empty()) Refine(*state_, best);
  std::vector<StagePoint> points = best.points();
  if (state_->options.weights > 0 && !points.empty()) points = Sampled(points, state_->options.weights, steps);
  Frontier out;
  for (const StagePoint& point : points) out.push_back({point.strategy, CostOf(point.strategy)});
  return out;
}

}  // namespace interlace::plan
