// count_layers.h — the memory and times of a stage counted layer by layer: the referee of CountBytes and PhaseTimes,
// which know how many layers are alike.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "plan/stage_parts.h"

namespace interlace::plan::testing {

enum class Recomputed : uint8_t { kKept, kSelective, kFull };
struct CountedLayer {
  Role role;
  Recomputed kind;
};

// The layers of a stage in forward order. Recomputed blocks are spread evenly, so their order among blocks says
// nothing.
inline std::vector<CountedLayer> LayersOf(const Strategy& s) {
  std::vector<CountedLayer> layers;
  if (s.embedding) layers.push_back({Role::kEmbedding, Recomputed::kKept});
  for (int32_t i = 0; i < s.layers; ++i) {
    layers.push_back({Role::kBlock, i < s.full                 ? Recomputed::kFull
                                    : i < s.full + s.selective ? Recomputed::kSelective
                                                               : Recomputed::kKept});
  }
  if (s.head) layers.push_back({Role::kHead, Recomputed::kKept});
  return layers;
}

inline int64_t SavedOf(const LayerPart& part, Recomputed kind) {
  return kind == Recomputed::kFull        ? part.cost.saved_full
         : kind == Recomputed::kSelective ? part.cost.saved_selective
                                          : part.cost.saved_kept;
}

inline int64_t BackwardWork(const LayerPart& part, Recomputed kind) {
  return kind == Recomputed::kFull        ? part.cost.work_backward_full
         : kind == Recomputed::kSelective ? part.cost.work_backward_selective
                                          : part.cost.work_backward;
}

// Products of absurd sizes end at a size that nothing fits; sums of a few of them stay within 64 bits.
inline int64_t Product(int64_t count, int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 59;
  int64_t product = 0;
  return __builtin_mul_overflow(count, bytes, &product) ? kMost : std::min(product, kMost);
}

// Most bytes that two neighbouring layers have together: buffers hold the layer at work and the next.
template <typename Bytes>
int64_t OfNeighbours(const std::vector<CountedLayer>& layers, Bytes bytes) {
  int64_t most = bytes(layers[0]);
  for (size_t i = 1; i < layers.size(); ++i) most = std::max(most, bytes(layers[i - 1]) + bytes(layers[i]));
  return most;
}

inline StageBytes CountLayerByLayer(const StageParts& parts, const Strategy& s) {
  const std::vector<CountedLayer> layers = LayersOf(s);
  int64_t weights = 0, gradients = 0, states = 0, saved = 0;    // saved: by one micro-batch
  int64_t block_saved = 0, block_work = 0, block_backward = 0;  // the largest of the kinds that occur
  for (const CountedLayer& layer : layers) {
    const LayerPart& part = parts.of(layer.role);
    weights += part.weights;
    gradients += part.gradients;
    states += part.states;
    saved += SavedOf(part, layer.kind);
    if (layer.role != Role::kBlock) continue;
    block_saved = std::max(block_saved, SavedOf(part, layer.kind));
    block_work = part.cost.work_forward;
    block_backward = std::max(block_backward, BackwardWork(part, layer.kind));
  }
  auto pair_of = [&](int64_t LayerPart::*member) {
    return OfNeighbours(layers, [&](const CountedLayer& layer) { return parts.of(layer.role).*member; });
  };
  const int64_t pair_saved = OfNeighbours(layers, [&](const CountedLayer& layer) {
    return layer.role == Role::kBlock ? block_saved : SavedOf(parts.of(layer.role), layer.kind);
  });
  const int64_t gathered_weights = pair_of(&LayerPart::gathered_weights);
  const int64_t gathered_gradients = pair_of(&LayerPart::gathered_gradients);
  const int64_t buffer_weights = OnHost(pair_of(&LayerPart::weights), s.weights_out);
  const int64_t buffer_gradients = OnHost(pair_of(&LayerPart::gradients), s.gradients_out);
  const int64_t buffer_states = OnHost(pair_of(&LayerPart::states), s.states_out);
  const int64_t host_weights = OnHost(weights, s.weights_out), host_gradients = OnHost(gradients, s.gradients_out);
  const int64_t host_states = OnHost(states, s.states_out);
  const int64_t neighbours = ((s.embedding ? 0 : 1) + (s.head ? 0 : 1)) * parts.of(Role::kBlock).cost.boundary;
  const int64_t always = (weights - host_weights) + (gradients - host_gradients) + (states - host_states) +
                         gathered_weights + buffer_weights + neighbours;

  // A peak is reached at the embedding, at the last block or at the head: what is saved there, and the layer's own
  // work.
  struct Peak {
    int64_t saved = 0, on_host = 0, buffer = 0, work = 0, total = 0;
  };
  auto peak_of = [&](int64_t in_flight, bool backward) {
    Peak worst;
    auto consider = [&](int64_t live, int64_t work) {
      Peak peak{live, OnHost(live, s.activations_out), OnHost(std::min(live, pair_saved), s.activations_out), work, 0};
      peak.total = peak.saved - peak.on_host + peak.buffer + work;
      if (peak.total > worst.total) worst = peak;
    };
    const LayerPart &embedding = parts.of(Role::kEmbedding), &head = parts.of(Role::kHead);
    const int64_t head_saved = s.head ? head.cost.saved_kept : 0;
    consider(Product(in_flight, saved) - head_saved, backward ? block_backward : block_work);
    if (s.embedding) {
      consider(Product(in_flight - 1, saved) + embedding.cost.saved_kept,
               backward ? embedding.cost.work_backward : embedding.cost.work_forward);
    }
    if (s.head) consider(Product(in_flight, saved), backward ? head.cost.work_backward : head.cost.work_forward);
    return worst;
  };
  const Peak first = peak_of(1, false), forward = peak_of(s.in_flight, false), backward = peak_of(s.in_flight, true);
  const int64_t update = buffer_gradients + buffer_states;  // only in the first forward, with one micro-batch saved
  StageBytes out;
  out.peak_forward = always + std::max(first.total + update, forward.total);
  out.peak_backward = always + backward.total + gathered_gradients + buffer_gradients;
  out.host = host_weights + host_gradients + host_states + OnHost(Product(s.in_flight, saved), s.activations_out);
  return out;
}

inline std::array<double, kPhases> CountTimes(const StageParts& parts, const Strategy& s) {
  const std::vector<CountedLayer> layers = LayersOf(s);
  const LayerCost& block = parts.of(Role::kBlock).cost;
  double block_saved = 0;  // mean: what the opening and the closing block have, as kinds are spread evenly
  for (const CountedLayer& layer : layers) {
    if (layer.role == Role::kBlock)
      block_saved += static_cast<double>(SavedOf(parts.of(layer.role), layer.kind)) / s.layers;
  }
  std::array<double, kPhases> total{};
  for (int p = 0; p < kPhases; ++p) {
    const StagePhase phase = static_cast<StagePhase>(p);
    const bool backward = phase == kBackward || phase == kBackwardLast;
    std::array<std::array<double, 4>, kRoles> alone{};  // per role: compute, device-device, in, out
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto [role, kind] = layers[i];
      const bool last = i + 1 == layers.size(), opens = backward ? last : i == 0, closes = backward ? i == 0 : last;
      const double saved = role == Role::kBlock ? block_saved : static_cast<double>(parts.of(role).cost.saved_kept);
      const LayerPhase layer = PhaseOf(parts, s, phase, role, s.activations_out * saved);
      auto& [compute, link, in, out] = alone[static_cast<int>(role)];
      compute += layer.compute_us + layer.update_us;
      total[p] += layer.tp_us;
      if (backward && kind == Recomputed::kFull) {
        compute += block.recompute_full_us, total[p] += block.tp_recompute_full_us;
      } else if (backward && kind == Recomputed::kSelective) {
        compute += block.recompute_selective_us, total[p] += block.tp_recompute_selective_us;
      }
      if (opens) {
        total[p] += layer.in_us + layer.gather.us;
      } else {
        in += layer.in_us, link += layer.gather.us, compute += layer.gather.core_us;
      }
      if (closes) {
        total[p] += layer.out_us + layer.reduce.us;
      } else {
        out += layer.out_us, link += layer.reduce.us, compute += layer.reduce.core_us;
      }
    }
    for (const auto& amounts : alone) total[p] += Together(parts, amounts);
  }
  return total;
}

}  // namespace interlace::plan::testing
