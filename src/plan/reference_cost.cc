// The reference cost: times counted layer by layer. What a plan prints is counted here; TimesOf, which the search
// compares by, must equal it to rounding.
#include "plan/stage_parts.h"

namespace interlace::plan {
namespace {

struct CountedLayer {
  Role role = Role::kBlock;
  double saved = 0, recompute_us = 0, tp_recompute_us = 0;
};

// The layers of a stage in forward order. Recomputed blocks are spread evenly, so their order among blocks says
// nothing.
std::vector<CountedLayer> LayersOf(const StageParts& parts, const Strategy& s) {
  std::vector<CountedLayer> layers;
  auto end = [&](Role role) { layers.push_back({role, static_cast<double>(parts.of(role).cost.saved_kept)}); };
  if (s.embedding) end(Role::kEmbedding);
  const LayerCost& c = parts.of(Role::kBlock).cost;
  for (int32_t i = 0; i < s.layers; ++i) {
    layers.push_back(i < s.full ? CountedLayer{Role::kBlock, static_cast<double>(c.saved_full), c.recompute_full_us,
                                               c.tp_recompute_full_us}
                     : i < s.full + s.selective ? CountedLayer{Role::kBlock, static_cast<double>(c.saved_selective),
                                                               c.recompute_selective_us, c.tp_recompute_selective_us}
                                                : CountedLayer{Role::kBlock, static_cast<double>(c.saved_kept)});
  }
  if (s.head) end(Role::kHead);
  return layers;
}

}  // namespace

std::array<double, kPhases> CountTimes(const StageParts& parts, const Strategy& s, Explanation* explain) {
  const std::vector<CountedLayer> layers = LayersOf(parts, s);
  const double ao = s.activations_out;
  double block_saved = 0;  // mean: what the opening and the closing block have, as kinds are spread evenly
  for (const CountedLayer& layer : layers) block_saved += layer.role == Role::kBlock ? layer.saved : 0;
  block_saved /= s.layers;

  static constexpr const char* kNames[] = {"first forward", "forward", "backward", "last backward"};
  std::array<double, kPhases> total{};
  for (int p = 0; p < kPhases; ++p) {
    const StagePhase phase = static_cast<StagePhase>(p);
    const bool backward = phase == kBackward || phase == kBackwardLast;
    std::array<std::array<double, 4>, kRoles> alone{};  // per role: compute, device-device, in, out
    double tensor_parallel = 0, exposed = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
      const CountedLayer& counted = layers[i];
      const bool last = i + 1 == layers.size(), opens = backward ? last : i == 0, closes = backward ? i == 0 : last;
      const LayerPhase layer =
          PhaseOf(parts, s, phase, counted.role, ao * (counted.role == Role::kBlock ? block_saved : counted.saved));
      auto& [compute, link, in, out] = alone[static_cast<int>(counted.role)];
      compute += layer.compute_us;
      tensor_parallel += layer.tp_us;
      compute += layer.update_us;
      if (backward) compute += counted.recompute_us, tensor_parallel += counted.tp_recompute_us;
      if (opens) {
        exposed += layer.in_us + layer.gather.us;
      } else {
        in += layer.in_us, link += layer.gather.us, compute += layer.gather.core_us;
      }
      if (closes) {
        exposed += layer.out_us + layer.reduce.us;
      } else {
        out += layer.out_us, link += layer.reduce.us, compute += layer.reduce.core_us;
      }
    }
    double sum = exposed + tensor_parallel;
    Explanation::Phase row{kNames[p], {}, tensor_parallel, exposed, 0};
    for (const auto& amounts : alone) {
      sum += Together(parts, amounts);
      for (int c = 0; c < 4; ++c) row.alone_us[c] += amounts[c];
    }
    row.total_us = total[p] = sum;
    if (explain != nullptr) explain->phases[p] = row;
  }
  return total;
}

StageCost StageModel::CostOf(const Strategy& strategy) const {
  const StageParts& parts = *state_->Find(strategy);
  const StageBytes bytes = CountBytes(parts, strategy, nullptr);
  const std::array<double, kPhases> us = CountTimes(parts, strategy, nullptr);
  const double stable = us[kForward] + us[kBackward];
  return {stable, us[kForwardFirst] + us[kBackwardLast] - stable, bytes.peak_forward, bytes.peak_backward, bytes.host};
}

PassTimes StageModel::PassesOf(const Strategy& strategy) const {
  const std::array<double, kPhases> us = CountTimes(*state_->Find(strategy), strategy, nullptr);
  return {us[kForward], us[kBackward], us[kForwardFirst] - us[kForward], us[kBackwardLast] - us[kBackward]};
}

Explanation StageModel::Explain(const Strategy& strategy) const {
  Explanation out;
  CountBytes(*state_->Find(strategy), strategy, &out);
  CountTimes(*state_->Find(strategy), strategy, &out);
  return out;
}

}  // namespace interlace::plan
