#include "plan/offload_kinks.h"

namespace interlace::plan {

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
        saved = (static_cast<double>(layers - full - selective) * saved +
                 selective * static_cast<double>(cost.saved_selective) + full * static_cast<double>(cost.saved_full)) /
                n;
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
      double compute =
          count * (backward ? cost.backward_us : cost.forward_us + (phase == kForwardFirst ? part.update_us : 0));
      if (backward && role == 1) compute += full * cost.recompute_full_us + selective * cost.recompute_selective_us;
      const LinkTime &gather = s.gather[p][role], &reduce = s.reduce[p][role];
      compute += early * gather.core_us + late * reduce.core_us;
      out.push_back(
          {Affine{compute, {}}, Affine{early * gather.us + late * reduce.us, {}}, early * coming, late * going});
    }
  }
  return out;
}

void AddKinks(const OverlapFactors& f, const Overlapped& amounts, const Ratios& x, std::vector<Affine>& planes) {
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
      planes.push_back(scaled[i] - scaled[first]);
      left[i] = (1 / factor(i)) * (scaled[i] - scaled[first]);
    }
    active[first] = false;
  }
}

}  // namespace interlace::plan
