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

OffloadRegion RegionOf(const StageModel::State& state, const StageParts& parts, const Strategy& s) {
  const LayerCost &embedding = parts.of(Role::kEmbedding).cost, &block = parts.of(Role::kBlock).cost,
                  &head = parts.of(Role::kHead).cost;
  const StageHolds all = HoldsOf(parts, s);
  const StageOptions& options = state.options;
  auto real = [](int64_t bytes) { return static_cast<double>(bytes); };  // exact below 2^53
  const double weights = real(all.weights), gradients = real(all.gradients), states = real(all.states);
  const double saved = real(all.saved), pair_saved = real(all.pair_saved), p = s.in_flight;
  OffloadRegion out;
  if (options.offloads(s.embedding && s.head, s.tp))
    out.allowed = {options.weights_out, options.gradients_out, options.states_out, options.activations_out};
  const double always = weights + gradients + states + real(all.gathered_weights) + real(all.neighbours);
  // 16: what rounding each term to whole bytes can take.
  const double limit = real(options.device_bytes) - 16;
  // device: always + live + work <= limit, less what the ratios save
  auto add = [&](double live, double work, StagePhase phase) {
    OffloadRegion::Row row;
    const bool first = phase == kForwardFirst, backward = phase == kBackward;
    row.need = always + live + work + (backward ? real(all.gathered_gradients) : 0) - limit;
    if (row.need <= 0) return;
    row.save = {weights - real(all.pair_weights), gradients - (first || backward ? real(all.pair_gradients) : 0),
                states - (first ? real(all.pair_states) : 0), live - std::min(live, pair_saved)};
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
  for (StagePhase phase : {kBackward, kForward, kForwardFirst}) {
    const bool backward = phase == kBackward;
    const double count = phase == kForwardFirst ? 1 : p;
    auto work = [&](const LayerCost& cost) { return real(backward ? cost.work_backward : cost.work_forward); };
    add(count * saved - real(all.head_saved), backward ? real(all.block_backward) : work(block), phase);
    if (s.embedding) add((count - 1) * saved + real(all.embedding_saved), work(embedding), phase);
    if (s.head) add(count * saved, work(head), phase);
  }
  // host: weights, gradients, states and saved activations by their ratios are within the device's share
  out.host_use = {weights, gradients, states, p * saved};
  // A ratio is a float, rounded up.
  out.host_room = real(state.host_share) - (weights + gradients + states + p * saved) * 0x1p-22;
  return out;
}

}  // namespace interlace::plan
