#include "plan/offload_region.h"

#include <algorithm>

namespace interlace::plan {

bool OffloadRegion::Holds(const Ratios& x) const {
  double use = 0;
  for (int k = 0; k < kKinds; ++k) use += host_use[k] * x[k];
  if (use > host_room) return false;
  return std::all_of(rows.begin(), rows.end(), [&](const Row& row) {
    double saved = 0;
    for (int k = 0; k < kKinds; ++k) saved += row.save[k] * x[k];
    return saved >= row.need;
  });
}

double OffloadRegion::Least(const Ratios& x, int kind) const {
  double least = 0, use = 0;
  for (const Row& row : rows) {
    double lacking = row.need;
    for (int k = 0; k < kKinds; ++k) lacking -= k == kind ? 0 : row.save[k] * x[k];
    if (lacking <= 0) continue;
    if (lacking > row.save[kind]) return -1;
    least = std::max(least, lacking / row.save[kind]);
  }
  for (int k = 0; k < kKinds; ++k) use += host_use[k] * (k == kind ? least : x[k]);
  return use > host_room ? -1 : least;
}

OffloadRegion RegionOf(const StageSums& s, const StageOptions& options, int64_t host_share, int32_t layers,
                       int32_t full, int32_t selective, int32_t in_flight) {
  const LayerPart &e = s.layer[0], &b = s.layer[1], &h = s.layer[2];
  const int32_t kept = layers - full - selective, many = layers > 1;
  auto total_of = [&](int64_t LayerPart::*member) {
    return static_cast<double>(layers * (b.*member) + (s.embedding ? e.*member : 0) + (s.head ? h.*member : 0));
  };
  const double weights = total_of(&LayerPart::weights), gradients = total_of(&LayerPart::gradients);
  const double states = total_of(&LayerPart::states);
  const LayerCost& c = b.cost;
  const double e_saved = s.embedding ? static_cast<double>(e.cost.saved_kept) : 0;
  const double h_saved = s.head ? static_cast<double>(h.cost.saved_kept) : 0;
  const double saved = static_cast<double>(kept * c.saved_kept + selective * c.saved_selective + full * c.saved_full) +
                       e_saved + h_saved;
  double most = 0, work_backward = 0;
  auto kind = [&](int32_t count, int64_t bytes, int64_t work) {
    if (count == 0) return;
    most = std::max(most, static_cast<double>(bytes)),
    work_backward = std::max(work_backward, static_cast<double>(work));
  };
  kind(kept, c.saved_kept, c.work_backward);
  kind(selective, c.saved_selective, c.work_backward_selective);
  kind(full, c.saved_full, c.work_backward_full);
  double pair_saved = many != 0 ? 2 * most : most;
  if (s.embedding) pair_saved = std::max(pair_saved, e_saved + most);
  if (s.head) pair_saved = std::max(pair_saved, most + h_saved);

  OffloadRegion out;
  out.allowed = {options.weights_out, options.gradients_out, options.states_out, options.activations_out};
  const double always = weights + gradients + states + s.pair_gathered_weights[many] + s.neighbours;
  // 16: what rounding each term to whole bytes can take.
  const double limit = static_cast<double>(options.device_bytes) - 16;
  auto add = [&](double live, double work, StagePhase phase) {
    OffloadRegion::Row row;
    const bool first = phase == kForwardFirst, backward = phase == kBackward;
    row.need = always + live + work + (backward ? s.pair_gathered_gradients[many] : 0) - limit;
    if (row.need <= 0) return;
    row.save = {weights - s.pair_weights[many], gradients - (first || backward ? s.pair_gradients[many] : 0),
                states - (first ? s.pair_states[many] : 0), live - std::min(live, pair_saved)};
    for (int k = 0; k < kKinds; ++k) row.save[k] = out.allowed[k] ? std::max(row.save[k], 0.0) : 0;
    // A row that another implies is left out.
    auto implies = [](const OffloadRegion::Row& a, const OffloadRegion::Row& b) {
      bool all = a.need >= b.need;
      for (int k = 0; k < kKinds; ++k) all = all && a.save[k] <= b.save[k];
      return all;
    };
    for (const auto& other : out.rows) {
      if (implies(other, row)) return;
    }
    std::erase_if(out.rows, [&](const auto& other) { return implies(row, other); });
    out.rows.push_back(row);
  };
  const double p = in_flight;
  for (StagePhase phase : {kBackward, kForward, kForwardFirst}) {
    const bool backward = phase == kBackward;
    const double count = phase == kForwardFirst ? 1 : p;
    auto work = [&](const LayerPart& part) {
      return static_cast<double>(backward ? part.cost.work_backward : part.cost.work_forward);
    };
    add(count * saved - h_saved, backward ? work_backward : work(b), phase);
    if (s.embedding) add((count - 1) * saved + e_saved, work(e), phase);
    if (s.head) add(count * saved, work(h), phase);
  }
  out.host_use = {weights, gradients, states, p * saved};
  // A ratio is a float, rounded up.
  out.host_room = static_cast<double>(host_share) - (weights + gradients + states + p * saved) * 0x1p-22;
  return out;
}

}  // namespace interlace::plan
