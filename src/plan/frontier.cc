// The strategies of a stage that no other beats in both t and t + d.
//
// For a key, G fixes b * dp, and the devices fix dp * tp, so a handful of (b, dp, tp) remain, with four levels of ZeRO
// each. Under one of those the choices are how many blocks are recomputed and which shares are offloaded:
//   1. Recomputation: (full, selective) pairs in order of the compute they add. A pair that adds more compute and saves
//      no more memory than another is never better, whatever is offloaded; what is left is a list from "nothing" to
//      "all".
//   2. The first of the list that fits without offload beats all after it.
//   3. Each before it must offload; its trade-off between t and t + d is traced exactly (simplex.h).
// First all get a few ratios each, which gives good points early; then what cannot beat the points found so far is
// skipped: time grows with every ratio, so the lower corners of a few boxes that cover the region bound all of it.
#include <algorithm>
#include <cmath>
#include <map>

#include "plan/offload_points.h"
#include "plan/pareto.h"

namespace interlace::plan {
namespace {

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
  Trial(const StageSums& sums, const StageKey& key, int32_t part, Pareto& best)
      : sums_(sums), key_(key), part_(part), best_(best) {}
  void Try(Recompute counts, const Ratios& x) {
    const int i = lanes_.count++;
    lanes_.layers[i] = key_.layers, lanes_.full[i] = counts.full, lanes_.selective[i] = counts.selective;
    lanes_.in_flight[i] = key_.in_flight;
    auto round_up = [](double v) {
      float f = static_cast<float>(v);
      return std::min(f < v ? std::nextafter(f, 2.0f) : f, 1.0f);
    };
    lanes_.wo[i] = round_up(x[0]), lanes_.go[i] = round_up(x[1]), lanes_.oo[i] = round_up(x[2]),
    lanes_.ao[i] = round_up(x[3]);
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
    best_.Add({lanes_.stable_us[i],
               lanes_.total_us[i],
               part_,
               static_cast<int32_t>(lanes_.full[i]),
               static_cast<int32_t>(lanes_.selective[i]),
               {static_cast<float>(lanes_.wo[i]), static_cast<float>(lanes_.go[i]), static_cast<float>(lanes_.oo[i]),
                static_cast<float>(lanes_.ao[i])}});
  }
  lanes_.count = 0;
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
  Lanes lanes;
  lanes.count = 1;
  lanes.layers[0] = key.layers, lanes.in_flight[0] = key.in_flight;
  lanes.full[0] = state.options.only_full ? key.layers : 0;
  lanes.selective[0] = lanes.wo[0] = lanes.go[0] = lanes.oo[0] = lanes.ao[0] = 0;
  for (int32_t part : PartsOf(state, key)) {
    FittingPart fit{part, SumsOf(state.parts[part], key.embedding, key.head), 0, 0};
    EvaluateLanes(fit.sums, lanes, Wanted::kTimes);
    fit.stable_us = lanes.stable_us[0], fit.total_us = lanes.total_us[0];
    if (fit.stable_us > longest_us || !MayFit(fit.sums, state, key.layers, key.in_flight)) continue;
    fitting.push_back(std::move(fit));
  }
  return fitting;
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
    Lanes lanes;
    lanes.selective.fill(0), lanes.in_flight.fill(1);
    lanes.full.fill(0), lanes.wo.fill(0), lanes.go.fill(0), lanes.oo.fill(0), lanes.ao.fill(0);
    for (auto at = bounds.begin(); at < end; at += lanes.count) {
      lanes.count = static_cast<int>(std::min<std::ptrdiff_t>(Lanes::kWidth, end - at));
      for (int i = 0; i < lanes.count; ++i) {
        lanes.layers[i] = layers(at[i]);
        if (state_->options.only_full) lanes.full[i] = lanes.layers[i];
      }
      EvaluateLanes(sums, lanes, Wanted::kTimes);
      for (int i = 0; i < lanes.count; ++i) {
        at[i].stable_us = std::min(at[i].stable_us, lanes.stable_us[i]);
        at[i].total_us = std::min(at[i].total_us, lanes.total_us[i]);
      }
    }
  }
}

Frontier StageModel::FrontierOf(const StageKey& key, double longest_us) const {
  const StageOptions& options = state_->options;
  std::vector<FittingPart> fitting = FittingParts(*state_, key, longest_us);
  const double steps = key.micro_batches;
  std::sort(fitting.begin(), fitting.end(), [&](const FittingPart& a, const FittingPart& b) {
    const double x = steps * a.stable_us + a.total_us, y = steps * b.stable_us + b.total_us;
    return x != y ? x < y : a.part < b.part;
  });

  Pareto best(longest_us);
  struct Later {
    const FittingPart* fit;
    Recompute counts;
    OffloadRegion region;
  };
  std::vector<Later> later;
  std::map<std::pair<int32_t, int32_t>, std::vector<Recompute>> choices;  // by (b, tp)
  for (const FittingPart& fit : fitting) {
    if (best.Beats(fit.stable_us, fit.total_us)) continue;
    const StageParts& parts = state_->parts[fit.part];
    auto [at, added] = choices.try_emplace({parts.micro_batch, parts.tp});
    if (added) at->second = RecomputeChoices(fit.sums.layer[1].cost, key.layers, options);
    Trial trial(fit.sums, key, fit.part, best);
    trial.limit = options.device_bytes, trial.host = state_->host_share;
    for (const Recompute& counts : at->second) {
      OffloadRegion region =
          RegionOf(fit.sums, options, state_->host_share, key.layers, counts.full, counts.selective, key.in_flight);
      if (region.rows.empty()) {
        trial.Try(counts, {});
        break;
      }
      if (!options.ratios.empty()) {
        trial.Flush();
        if (!Beaten(best, fit.sums, region, key.layers, counts)) {
          OnGrid(options.ratios, region, [&](const Ratios& x) { trial.Try(counts, x); });
        }
        continue;
      }
      bool any = false;
      Corners(region, [&](const Ratios& x) {
        trial.Try(counts, x);
        any = true;
      });
      if (any) later.push_back({&fit, counts, std::move(region)});
    }
    trial.Flush();
  }
  const IsBeaten beaten = [&best](double stable_us, double total_us) { return best.Beats(stable_us, total_us); };
  for (const Later& l : later) {
    if (Beaten(best, l.fit->sums, l.region, key.layers, l.counts)) continue;
    Trial trial(l.fit->sums, key, l.fit->part, best);
    trial.limit = options.device_bytes, trial.host = state_->host_share;
    for (const TradeOff& edge :
         TraceOffload(l.fit->sums, l.region, key.layers, l.counts.full, l.counts.selective, beaten)) {
      Along(edge, [&](const Ratios& x) { trial.Try(l.counts, x); });
    }
    trial.Flush();
  }

  // Sampled weights (Mist, equation 4): alpha * G * t + (1 - alpha) * d for evenly spaced alpha.
  std::vector<StagePoint> points = best.points();
  if (options.weights > 0 && !points.empty()) {
    std::vector<StagePoint> chosen;
    for (int i = 0; i < options.weights; ++i) {
      const double alpha = options.weights == 1 ? 0.5 : static_cast<double>(i) / (options.weights - 1);
      auto cost = [&](const StagePoint& p) {
        return alpha * steps * p.stable_us + (1 - alpha) * (p.total_us - p.stable_us);
      };
      chosen.push_back(*std::min_element(points.begin(), points.end(),
                                         [&](const StagePoint& a, const StagePoint& b) { return cost(a) < cost(b); }));
    }
    auto by_time = [](const StagePoint& a, const StagePoint& b) { return a.stable_us < b.stable_us; };
    std::sort(chosen.begin(), chosen.end(), by_time);
    chosen.erase(std::unique(chosen.begin(), chosen.end(),
                             [](const StagePoint& a, const StagePoint& b) { return a.stable_us == b.stable_us; }),
                 chosen.end());
    points = std::move(chosen);
  }
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
    out.push_back({s, EvaluateOne(s)});
  }
  return out;
}

}  // namespace interlace::plan
