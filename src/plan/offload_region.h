// offload_region.h — the offload ratios that make a stage fit: x = (weights, gradients, states, activations) in [0,
// 1]^4 with need_r <= save_r . x for each peak and use . x <= room for the host. Inside the room only.
//
// Peaks are linear in x (buffers shrink and grow with the ratios), so this is a polytope. t and t + d are piecewise
// linear on it and fall with no ratio, so the best lie where some peak just fits. Tried are its vertices there, and
// what is near the best of them; how little that misses is measured (docs/planner.md).
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "plan/stage_parts.h"

namespace interlace::plan {

constexpr int kKinds = 4;  // WO, GO, OO, AO
using Ratios = std::array<double, kKinds>;
inline Ratios RatiosOf(const Strategy& s) {
  return {s.weights_out, s.gradients_out, s.states_out, s.activations_out};
}

struct OffloadRegion {
  struct Row {
    double need = 0;
    Ratios save{};
  };
  std::vector<Row> rows;  // one for each place where a peak may be; none: fits as it is
  Ratios host_use{};
  double host_room = 0;
  std::array<bool, kKinds> allowed{};

  bool Holds(const Ratios& x) const;
  // Least x[kind] in [0, 1] with the others as given; negative: none.
  double Least(const Ratios& x, int kind) const;
};

// The region of a stage, whatever its strategy's ratios. Bytes are rounded against it, so that what holds here fits
// when counted.
OffloadRegion RegionOf(const StageModel::State& state, const StageParts& parts, const Strategy& strategy);

// The vertices of the region where some peak just fits: all ratios but one 0 or 1, that one the least that fits.
template <typename Visit>
void Vertices(const OffloadRegion& region, const Visit& visit) {
  for (int whole = 0; whole < 1 << kKinds; ++whole) {  // which are 1
    Ratios x{};
    bool allowed = true;
    for (int k = 0; k < kKinds; ++k) {
      x[k] = whole >> k & 1;
      allowed = allowed && (x[k] == 0 || region.allowed[k]);
    }
    for (int kind = 0; kind < kKinds && allowed; ++kind) {
      if (!region.allowed[kind] || x[kind] == 1) continue;
      Ratios y = x;
      y[kind] = region.Least(x, kind);
      if (y[kind] >= 0) visit(y);
    }
  }
}

// What is near a point: one ratio a step up or down, another the least that then fits.
template <typename Visit>
void Neighbours(const Ratios& at, double step, const OffloadRegion& region, const Visit& visit) {
  for (int moved = 0; moved < kKinds; ++moved) {
    for (int kind = 0; kind < kKinds; ++kind) {
      if (kind == moved || !region.allowed[moved] || !region.allowed[kind]) continue;
      for (double to : {std::min(at[moved] + step, 1.0), std::max(at[moved] - step, 0.0)}) {
        Ratios x = at;
        x[moved] = to;
        x[kind] = region.Least(x, kind);
        if (to != at[moved] && x[kind] >= 0) visit(x);
      }
    }
  }
}

// Those whose shares are all given: that fit and are not above others that do. As in Mist's artifact, weights leave
// only with gradients.
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
