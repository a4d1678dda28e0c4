#include "plan/stage_sums.h"

#include <algorithm>

namespace interlace::plan {

StageSums SumsOf(const StageParts& parts, bool embedding, bool head) {
  StageSums out;
  out.embedding = embedding, out.head = head;
  out.layer = parts.layer;
  out.in_us_per_byte = parts.in_us_per_byte, out.out_us_per_byte = parts.out_us_per_byte;
  if (parts.interference != nullptr) {
    const auto& table = parts.interference->factor;
    OverlapFactors& f = out.factors;
    f.overlap = true;
    for (int i = 0; i < 4; ++i) {
      f.all[i] = table[15][i], f.all_inverse[i] = 1 / table[15][i];
      for (int j = 0; j < 4; ++j) {
        if (i == j) continue;
        f.without[i][j] = table[15 ^ (1 << i)][j], f.without_inverse[i][j] = 1 / f.without[i][j];
        f.pair[i][j] = table[(1 << i) | (1 << j)][i], f.pair_inverse[i][j] = 1 / f.pair[i][j];
      }
    }
  }
  for (int p = 0; p < kPhases; ++p) {
    const StagePhase phase = static_cast<StagePhase>(p);
    for (int role = 0; role < kRoles; ++role) {
      const bool backward_embedding = role == 0 && (phase == kBackward || phase == kBackwardLast);
      if (parts.gathers(phase) && !backward_embedding) out.gather[p][role] = parts.layer[role].gather;
      if (const LinkTime* reduce = parts.ReduceOf(parts.layer[role], phase)) out.reduce[p][role] = *reduce;
    }
  }
  auto pairs = [&](std::array<double, 2>& to, int64_t LayerPart::*member) {
    const int64_t e = parts.layer[0].*member, b = parts.layer[1].*member, h = parts.layer[2].*member;
    for (int many = 0; many < 2; ++many) {
      int64_t most = many != 0 ? 2 * b : b;
      if (embedding) most = std::max(most, e + b);
      if (head) most = std::max(most, b + h);
      to[many] = static_cast<double>(most);
    }
  };
  pairs(out.pair_weights, &LayerPart::weights);
  pairs(out.pair_gradients, &LayerPart::gradients);
  pairs(out.pair_states, &LayerPart::states);
  pairs(out.pair_gathered_weights, &LayerPart::gathered_weights);
  pairs(out.pair_gathered_gradients, &LayerPart::gathered_gradients);
  out.neighbours = static_cast<double>(((embedding ? 0 : 1) + (head ? 0 : 1)) * parts.layer[1].cost.boundary);
  return out;
}

}  // namespace interlace::plan
