// simplex.h — the offload ratios that make a stage fit: x = (weights, gradients, states, activations) in [0, 1]^4 with
// need_r <= save_r . x for each peak and use . x <= room for the host.
//
// Peaks are linear in x (buffers shrink and grow with the ratios), so the ratios that fit are a polytope; t and t + d
// are piecewise linear on it and fall with no ratio, so the best ratios lie where some peak just fits. There, the lower
// left boundary of the image of each piece is the image of edges of that piece: lines where, besides the peak, two more
// bounds or kinks meet. All of them are followed.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "plan/stage_sums.h"

namespace interlace::plan {

constexpr int kKinds = 4;  // WO, GO, OO, AO
using Ratios = std::array<double, kKinds>;

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

// The region of a stage with these counts. Bytes are rounded against the strategy, so that what holds here fits when
// counted.
OffloadRegion RegionOf(const StageSums& sums, const StageOptions& options, int64_t host_share, int32_t layers,
                       int32_t full, int32_t selective, int32_t in_flight);

// An edge on which t and t + d are linear; a single point when both ends are equal.
struct TradeOff {
  Ratios from{}, to{};
  std::array<double, 2> stable_us{}, total_us{};  // at both ends; total = t + d
};

// Edges that hold every best point of (t, t + d) over the region; empty where nothing fits. Others that none beats as a
// whole may be among them. `beaten`: whether (t, t + d) is of no use, and all above it; such edges are left out.
using IsBeaten = std::function<bool(double stable_us, double total_us)>;
std::vector<TradeOff> TraceOffload(const StageSums& sums, const OffloadRegion& region, int32_t layers, int32_t full,
                                   int32_t selective, const IsBeaten& beaten = {});

}  // namespace interlace::plan
