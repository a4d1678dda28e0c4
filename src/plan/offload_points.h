// offload_points.h — which offload ratios are tried: vertices, points along traced edges, or a given grid; and when
// none needs to be. Inside the room only (frontier.cc).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "plan/pareto.h"

namespace interlace::plan {

struct Recompute {
  int32_t full, selective;
};  // blocks

// Whether the points found so far beat all that the region has: its boxes of a third of each ratio's range, cut to what
// fits.
bool Beaten(const Pareto& best, const StageSums& sums, const OffloadRegion& region, int32_t layers, Recompute counts);

// Vertices of the region: all but one ratio 0 or 1.
template <typename Visit>
void Corners(const OffloadRegion& region, const Visit& visit) {
  for (int fixed = 0; fixed < 1 << kKinds; ++fixed) {  // which are 1
    Ratios x{};
    bool allowed = true;
    for (int k = 0; k < kKinds; ++k) {
      x[k] = fixed >> k & 1;
      allowed = allowed && (x[k] == 0 || region.allowed[k]);
    }
    for (int kind = 0; kind < kKinds && allowed; ++kind) {
      if (!region.allowed[kind] || (fixed >> kind & 1) != 0) continue;
      Ratios y = x;
      y[kind] = region.Least(x, kind);
      if (y[kind] >= 0) visit(y);
    }
  }
}

// Points along an edge, close enough that no part of it is more than kStep below the next point.
template <typename Visit>
void Along(const TradeOff& edge, const Visit& visit) {
  constexpr double kStep = 0.0005;
  const double t = std::abs(edge.stable_us[1] - edge.stable_us[0]) / edge.stable_us[0];
  const double u = std::abs(edge.total_us[1] - edge.total_us[0]) / edge.total_us[0];
  const int steps = std::clamp(static_cast<int>(std::ceil(std::min(t, u) / kStep)), 1, 128);
  for (int i = 0; i <= (edge.from == edge.to ? 0 : steps); ++i) {
    Ratios x;
    for (int k = 0; k < kKinds; ++k) x[k] = edge.from[k] + (edge.to[k] - edge.from[k]) * i / steps;
    visit(x);
  }
}

// Allowed ratio tuples that fit and are not above others that do. As in Mist's artifact, weights leave only with
// gradients.
template <typename Visit>
void OnGrid(const std::vector<float>& ratios, const OffloadRegion& region, const Visit& visit) {
  auto of = [&](int kind) { return region.allowed[kind] ? ratios : std::vector<float>{0}; };
  const std::vector<float> weights = of(0), gradients = of(1), states = of(2), activations = of(3);
  for (float wo : weights) {
    for (float go : gradients) {
      if (wo > 0 && go == 0 && region.allowed[1]) continue;
      double last = 2;
      for (float oo : states) {
        Ratios x{wo, go, oo, 0};
        const double least = region.Least(x, 3);
        if (least < 0) continue;
        auto at = std::find_if(activations.begin(), activations.end(), [&](float ao) { return ao >= least; });
        if (at == activations.end() || *at >= last) continue;
        last = x[3] = *at;
        if (region.Holds(x)) visit(x);
      }
    }
  }
}

}  // namespace interlace::plan
