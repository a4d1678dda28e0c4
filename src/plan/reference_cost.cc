// The reference cost: one strategy counted layer by layer, the plain form of the model, which vector_formula.h must
// equal. What a plan prints is counted here.
#include <algorithm>

#include "plan/stage_parts.h"

namespace interlace::plan {
namespace {

enum class Recomputed : uint8_t { kKept, kSelective, kFull };
struct CountedLayer {
  Role role;
  Recomputed kind;
};

// The layers of a stage in forward order. Recomputed blocks are spread evenly, so their order among blocks says
// nothing.
std::vector<CountedLayer> LayersOf(const Strategy& s) {
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

int64_t SavedOf(const LayerPart& part, Recomputed kind) {
  return kind == Recomputed::kFull        ? part.cost.saved_full
         : kind == Recomputed::kSelective ? part.cost.saved_selective
                                          : part.cost.saved_kept;
}

int64_t BackwardWork(const LayerPart& part, Recomputed kind) {
  return kind == Recomputed::kFull        ? part.cost.work_backward_full
         : kind == Recomputed::kSelective ? part.cost.work_backward_selective
                                          : part.cost.work_backward;
}

// Products of absurd sizes end at a size that nothing fits; sums of a few of them stay within 64 bits.
int64_t Product(int64_t count, int64_t bytes) {
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

}  // namespace

StageBytes CountBytes(const StageParts& parts, const Strategy& s, Explanation* explain) {
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
  if (explain == nullptr) return out;

  explain->peak_in_forward = out.peak_forward > out.peak_backward;
  const bool updating = explain->peak_in_forward && first.total + update >= forward.total;
  const Peak& at = !explain->peak_in_forward ? backward : updating ? first : forward;
  const bool gradients_move = updating || !explain->peak_in_forward;
  explain->bytes = {
      {"weights", weights - host_weights, host_weights},
      {"gradients", gradients - host_gradients, host_gradients},
      {"optimizer states", states - host_states, host_states},
      {"gathered weights", gathered_weights, 0},
      {"gathered gradients", explain->peak_in_forward ? 0 : gathered_gradients, 0},
      {"buffers of host copies",
       buffer_weights + (gradients_move ? buffer_gradients : 0) + (updating ? buffer_states : 0) + at.buffer, 0},
      {"saved activations", at.saved - at.on_host, OnHost(Product(s.in_flight, saved), s.activations_out)},
      {"working peak of a layer", at.work, 0},
      {"buffers to neighbour stages", neighbours, 0},
  };
  return out;
}

std::array<double, kPhases> CountTimes(const StageParts& parts, const Strategy& s, Explanation* explain) {
  const std::vector<CountedLayer> layers = LayersOf(s);
  const double wo = s.weights_out, go = s.gradients_out, oo = s.states_out, ao = s.activations_out;
  double block_saved =
      0;  // mean over the blocks: what the opening and the closing block have, as kinds are spread evenly
  for (const CountedLayer& layer : layers) {
    if (layer.role == Role::kBlock) block_saved += static_cast<double>(SavedOf(parts.of(Role::kBlock), layer.kind));
  }
  block_saved /= s.layers;

  static constexpr const char* kNames[] = {"first forward", "forward", "backward", "last backward"};
  std::array<double, kPhases> total{};
  for (int p = 0; p < kPhases; ++p) {
    const StagePhase phase = static_cast<StagePhase>(p);
    const bool backward = phase == kBackward || phase == kBackwardLast;
    std::array<std::array<double, 4>, kRoles> alone{};  // per role: compute, device-device, in, out
    double tensor_parallel = 0, exposed = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto [role, kind] = layers[i];
      const LayerPart& part = parts.of(role);
      const bool opens = backward ? i + 1 == layers.size() : i == 0,
                 closes = backward ? i == 0 : i + 1 == layers.size();
      const double saved = ao * (role == Role::kBlock ? block_saved : static_cast<double>(part.cost.saved_kept));
      auto& [compute, link, in, out] = alone[static_cast<int>(role)];
      compute += backward ? part.cost.backward_us : part.cost.forward_us;
      tensor_parallel += backward ? part.cost.tp_backward_us : part.cost.tp_forward_us;
      if (phase == kForwardFirst) compute += part.update_us;
      if (backward && kind == Recomputed::kFull) {
        compute += part.cost.recompute_full_us;
        tensor_parallel += part.cost.tp_recompute_full_us;
      } else if (backward && kind == Recomputed::kSelective) {
        compute += part.cost.recompute_selective_us;
        tensor_parallel += part.cost.tp_recompute_selective_us;
      }
      // Before the layer's compute: its weights, or what their update needs, and in backward gradients and activations.
      const bool needs_weights = !(backward && role == Role::kEmbedding);
      double coming = 0;
      if (phase == kForwardFirst) {
        coming = oo * part.states_in_us + go * part.gradients_in_us;
      } else if (needs_weights) {
        coming = wo * part.weights_in_us;
      }
      if (backward) coming += go * part.gradients_in_us + saved * parts.in_us_per_byte;
      const bool gathers = needs_weights && parts.gathers(phase);
      if (opens) {
        exposed += coming + (gathers ? part.gather.us : 0);
      } else {
        in += coming;
        if (gathers) link += part.gather.us, compute += part.gather.core_us;
      }
      // After it: activations, updated states and weights, gradients.
      double going = backward ? go * part.gradients_out_us : saved * parts.out_us_per_byte;
      if (phase == kForwardFirst) going += oo * part.states_out_us + wo * part.weights_out_us;
      const LinkTime* reduce = parts.ReduceOf(part, phase);
      if (closes) {
        exposed += going + (reduce != nullptr ? reduce->us : 0);
      } else {
        out += going;
        if (reduce != nullptr) link += reduce->us, compute += reduce->core_us;
      }
    }
    double sum = exposed + tensor_parallel;
    Explanation::Phase row{kNames[p], {}, tensor_parallel, exposed, 0};
    for (const auto& amounts : alone) {
      sum += parts.interference != nullptr ? parts.interference->Together(amounts)
                                           : amounts[0] + amounts[1] + amounts[2] + amounts[3];
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
