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

// Strategies of one (b, dp, tp, ZeRO), evaluated together as soon as a block is full.
class Trial {
 public:
  Trial(const StageModel::State& state, const StageSums& sums, const StageKey& key, int32_t part, Pareto& best)
      : state_(state), sums_(sums), key_(key), part_(part), best_(best) {}
  ~Trial() { Flush(); }
  void Try(Recompute counts, const Ratios& x) {
    const int i = vectors_.count++;
    vectors_.layers[i] = key_.layers, vectors_.full[i] = counts.full, vectors_.selective[i] = counts.selective;
    vectors_.in_flight[i] = key_.in_flight;
    auto round_up = [](double v) {
      float f = static_cast<float>(v);
      return std::min(f < v ? std::nextafter(f, 2.0f) : f, 1.0f);
    };
    vectors_.wo[i] = round_up(x[0]), vectors_.go[i] = round_up(x[1]), vectors_.oo[i] = round_up(x[2]),
    vectors_.ao[i] = round_up(x[3]);
    if (vectors_.count == StrategyVectors::kWidth) Flush();
  }

 private:
  void Flush();

  const StageModel::State& state_;
  const StageSums& sums_;
  const StageKey& key_;
  int32_t part_;
  Pareto& best_;
  StrategyVectors vectors_;
};

void Trial::Flush() {
  if (vectors_.count == 0) return;
  const auto limit = static_cast<double>(state_.options.device_bytes), host = static_cast<double>(state_.host_share);
  EvaluateVectors(sums_, vectors_);
  for (int i = 0; i < vectors_.count; ++i) {
    if (std::max(vectors_.peak_forward[i], vectors_.peak_backward[i]) > limit || vectors_.host[i] > host) continue;
    best_.Add({vectors_.stable_us[i],
               vectors_.total_us[i],
               part_,
               static_cast<int32_t>(vectors_.full[i]),
               static_cast<int32_t>(vectors_.selective[i]),
               {static_cast<float>(vectors_.wo[i]), static_cast<float>(vectors_.go[i]), static_cast<float>(vectors_.oo[i]),
                static_cast<float>(vectors_.ao[i])}});
  }
  vectors_.count = 0;
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
bool MayFit(const StageSums& sums, const StageModel::State& state, int32_t layers, int32_t in_flight) {
  const StageOptions& options = state.options;
  auto fits = [&](int32_t full, int32_t selective) {
    const OffloadRegion region = RegionOf(sums, options, state.host_share, layers, full, selective, in_flight);
    return std::all_of(region.rows.begin(), region.rows.end(), [](const OffloadRegion::Row& row) {
      return row.save[0] + row.save[1] + row.save[2] + row.save[3] >= row.need;
    });
  };
  return (!options.only_full && fits(0, 0)) || (options.full && fits(layers, 0)) ||
         (options.selective && fits(0, layers));
}

// One of PartsOf that may fit, and its times with nothing offloaded and as little recomputed as the space allows.
struct FittingPart {
  int32_t part;
  StageSums sums;
  double stable_us, total_us;
};

std::vector<FittingPart> FittingParts(const StageModel::State& state, const StageKey& key, double longest_us) {
  std::vector<FittingPart> fitting;
  if (key.layers < 1) return fitting;
  StrategyVectors vectors;
  vectors.count = 1;
  vectors.layers[0] = key.layers, vectors.in_flight[0] = key.in_flight;
  vectors.full[0] = state.options.only_full ? key.layers : 0;
  vectors.selective[0] = vectors.wo[0] = vectors.go[0] = vectors.oo[0] = vectors.ao[0] = 0;
  for (int32_t part : PartsOf(state, key)) {
    FittingPart fit{part, SumsOf(state.parts[part], key.embedding, key.head), 0, 0};
    EvaluateVectors(fit.sums, vectors, Wanted::kTimes);
    fit.stable_us = vectors.stable_us[0], fit.total_us = vectors.total_us[0];
    if (fit.stable_us > longest_us || !MayFit(fit.sums, state, key.layers, key.in_flight)) continue;
    fitting.push_back(std::move(fit));
  }
  return fitting;
}

// Steps 2 and 3 of the list above.
void TryPart(const StageModel::State& state, const StageKey& key, const FittingPart& fit,
             const std::vector<Recompute>& choices, Pareto& best) {
  Trial trial(state, fit.sums, key, fit.part, best);
  for (const Recompute& counts : choices) {
    const OffloadRegion region = RegionOf(fit.sums, state.options, state.host_share, key.layers, counts.full,
                                          counts.selective, key.in_flight);
    if (region.rows.empty()) {
      trial.Try(counts, {});
      break;
    }
    auto visit = [&](const Ratios& x) { trial.Try(counts, x); };
    if (state.options.ratios.empty()) {
      Vertices(region, visit);
    } else {
      OnGrid(state.options.ratios, region, visit);
    }
  }
}

// Moves from every point that none beats: one share by a step up or down, another to the least that then fits; the steps
// get smaller.
void Refine(const StageModel::State& state, const StageKey& key, const std::vector<FittingPart>& fitting,
            Pareto& best) {
  for (double step : {0.5, 0.25, 0.125, 0.0625}) {
    const std::vector<StagePoint> points = best.points();
    for (const FittingPart& fit : fitting) {
      Trial trial(state, fit.sums, key, fit.part, best);
      for (const StagePoint& point : points) {
        if (point.part != fit.part) continue;
        const OffloadRegion region = RegionOf(fit.sums, state.options, state.host_share, key.layers, point.full,
                                              point.selective, key.in_flight);
        if (region.rows.empty()) continue;
        Neighbours(point.ratios, step, region, [&](const Ratios& x) { trial.Try({point.full, point.selective}, x); });
      }
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
    const StageSums sums = SumsOf(state_->parts[part], key.embedding, key.head);
    auto layers = [&](const Bound& bound) { return static_cast<int32_t>(&bound - bounds.data()) + 1; };
    auto end = std::partition_point(bounds.begin(), bounds.end(), [&](const Bound& bound) {
      return MayFit(sums, *state_, layers(bound), key.in_flight);
    });
    StrategyVectors vectors;
    vectors.selective.fill(0), vectors.in_flight.fill(1);
    vectors.full.fill(0), vectors.wo.fill(0), vectors.go.fill(0), vectors.oo.fill(0), vectors.ao.fill(0);
    for (auto at = bounds.begin(); at < end; at += vectors.count) {
      vectors.count = static_cast<int>(std::min<std::ptrdiff_t>(StrategyVectors::kWidth, end - at));
      for (int i = 0; i < vectors.count; ++i) {
        vectors.layers[i] = layers(at[i]);
        if (state_->options.only_full) vectors.full[i] = vectors.layers[i];
      }
      EvaluateVectors(sums, vectors, Wanted::kTimes);
      for (int i = 0; i < vectors.count; ++i) {
        at[i].stable_us = std::min(at[i].stable_us, vectors.stable_us[i]);
        at[i].total_us = std::min(at[i].total_us, vectors.total_us[i]);
      }
    }
  }
}

Frontier StageModel::FrontierOf(const StageKey& key, double longest_us) const {
  const double steps = key.micro_batches;
  std::vector<FittingPart> fitting = FittingParts(*state_, key, longest_us);
  std::sort(fitting.begin(), fitting.end(), [&](const FittingPart& a, const FittingPart& b) {
    const double x = steps * a.stable_us + a.total_us, y = steps * b.stable_us + b.total_us;
    return x != y ? x < y : a.part < b.part;
  });
  Pareto best(longest_us);
  std::map<std::pair<int32_t, int32_t>, std::vector<Recompute>> choices;  // by (b, tp)
  for (const FittingPart& fit : fitting) {
    if (best.Beats(fit.stable_us, fit.total_us)) continue;
    const StageParts& parts = state_->parts[fit.part];
    auto [at, added] = choices.try_emplace({parts.micro_batch, parts.tp});
    if (added) at->second = RecomputeChoices(fit.sums.layer[1].cost, key.layers, state_->options);
    TryPart(*state_, key, fit, at->second, best);
  }
  if (state_->options.ratios.empty()) Refine(*state_, key, fitting, best);
  std::vector<StagePoint> points = best.points();
  if (state_->options.weights > 0 && !points.empty()) points = Sampled(points, state_->options.weights, steps);
  Frontier out;
  for (const StagePoint& p : points) {
    const StageParts& parts = state_->parts[p.part];
    Strategy s;
    s.layers = key.layers, s.embedding = key.embedding, s.head = key.head;
    s.micro_batch = parts.micro_batch, s.dp = parts.dp, s.tp = parts.tp, s.zero = parts.zero;
    s.micro_batches = key.micro_batches, s.in_flight = key.in_flight;
    s.full = p.full, s.selective = p.selective;
    s.weights_out = p.ratios[0], s.gradients_out = p.ratios[1], s.states_out = p.ratios[2],
    s.activations_out = p.ratios[3];
    out.push_back({s, CostOf(s)});
  }
  return out;
}

}  // namespace interlace::plan
