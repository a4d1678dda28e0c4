// Time and memory of a stage: what one layer does in a phase, and what a stage of many alike holds and takes.
#include <algorithm>

#include "plan/stage_parts.h"

namespace interlace::plan {
namespace {

// Products of absurd sizes end at a size that nothing fits; sums of a few of them stay within 64 bits.
int64_t Product(int64_t count, int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 59;
  int64_t product = 0;
  return __builtin_mul_overflow(count, bytes, &product) ? kMost : std::min(product, kMost);
}

}  // namespace

LayerPhase PhaseOf(const StageParts& parts, const Strategy& s, StagePhase phase, Role role, double saved) {
  const LayerPart& part = parts.of(role);
  const double wo = s.weights_out, go = s.gradients_out, oo = s.states_out;
  const bool backward = phase == kBackward || phase == kBackwardLast;
  LayerPhase out;
  out.compute_us = backward ? part.cost.backward_us : part.cost.forward_us;
  out.tp_us = backward ? part.cost.tp_backward_us : part.cost.tp_forward_us;
  // Before the layer's compute: its weights, or what their update needs, and in backward gradients and activations.
  const bool needs_weights = !(backward && role == Role::kEmbedding);
  if (phase == kForwardFirst) {
    out.update_us = part.update_us;
    out.in_us = oo * part.states_in_us + go * part.gradients_in_us;
  } else if (needs_weights) {
    out.in_us = wo * part.weights_in_us;
  }
  if (backward) out.in_us += go * part.gradients_in_us + saved * parts.in_us_per_byte;
  if (needs_weights && parts.gathers(phase)) out.gather = part.gather;
  // After it: activations, updated states and weights, gradients.
  out.out_us = backward ? go * part.gradients_out_us : saved * parts.out_us_per_byte;
  if (phase == kForwardFirst) out.out_us += oo * part.states_out_us + wo * part.weights_out_us;
  if (const LinkTime* reduce = parts.ReduceOf(part, phase)) out.reduce = *reduce;
  return out;
}

double Together(const StageParts& parts, const std::array<double, 4>& alone) {
  if (parts.interference != nullptr) return parts.interference->Together(alone);
  return alone[0] + alone[1] + alone[2] + alone[3];
}

std::array<double, kPhases> PhaseTimes(const StageParts& parts, const Strategy& s, Explanation* explain) {
  const LayerCost& block = parts.of(Role::kBlock).cost;
  const double kept = s.layers - s.full - s.selective;
  const double block_saved =
      (kept * static_cast<double>(block.saved_kept) + s.selective * static_cast<double>(block.saved_selective) +
       s.full * static_cast<double>(block.saved_full)) /
      s.layers;
  std::array<double, kPhases> total{};
  for (int p = 0; p < kPhases; ++p) {
    const auto phase = static_cast<StagePhase>(p);
    const bool backward = phase == kBackward || phase == kBackwardLast;
    for (Role role : {Role::kEmbedding, Role::kBlock, Role::kHead}) {
      if ((role == Role::kEmbedding && !s.embedding) || (role == Role::kHead && !s.head)) continue;
      const bool first = role == (s.embedding ? Role::kEmbedding : Role::kBlock);
      const bool last = role == (s.head ? Role::kHead : Role::kBlock);
      const double opens = backward ? last : first, closes = backward ? first : last;
      const double saved = role == Role::kBlock ? block_saved : static_cast<double>(parts.of(role).cost.saved_kept);
      const LayerPhase layer = PhaseOf(parts, s, phase, role, s.activations_out * saved);
      // n layers alike: what comes before the first and goes after the last of the phase is exposed.
      const double n = role == Role::kBlock ? s.layers : 1, early = n - opens, late = n - closes;
      double compute =
          n * (layer.compute_us + layer.update_us) + early * layer.gather.core_us + late * layer.reduce.core_us;
      double recompute_tp = 0;
      if (backward && role == Role::kBlock) {
        compute += s.full * block.recompute_full_us + s.selective * block.recompute_selective_us;
        recompute_tp = s.full * block.tp_recompute_full_us + s.selective * block.tp_recompute_selective_us;
      }
      const std::array<double, 4> alone = {compute, early * layer.gather.us + late * layer.reduce.us,
                                           early * layer.in_us, late * layer.out_us};
      const double tensor_parallel = n * layer.tp_us + recompute_tp;
      const double exposed = opens * (layer.in_us + layer.gather.us) + closes * (layer.out_us + layer.reduce.us);
      total[p] += exposed + tensor_parallel + Together(parts, alone);
      if (explain == nullptr) continue;
      Explanation::Phase& row = explain->phases[p];
      for (size_t c = 0; c < alone.size(); ++c) row.alone_us[c] += alone[c];
      row.tensor_parallel_us += tensor_parallel, row.exposed_us += exposed;
    }
    if (explain == nullptr) continue;
    static constexpr const char* kNames[] = {"first forward", "forward", "backward", "last backward"};
    explain->phases[p].name = kNames[p], explain->phases[p].total_us = total[p];
  }
  return total;
}

StageTimes TimesOf(const StageParts& parts, const Strategy& s) {
  const std::array<double, kPhases> us = PhaseTimes(parts, s);
  return {us[kForward] + us[kBackward], us[kForwardFirst] + us[kBackwardLast]};
}

StageHolds HoldsOf(const StageParts& parts, const Strategy& s) {
  const LayerPart &e = parts.of(Role::kEmbedding), &b = parts.of(Role::kBlock), &h = parts.of(Role::kHead);
  const int32_t kept = s.layers - s.full - s.selective;
  auto all = [&](int64_t LayerPart::*member) {
    return Product(s.layers, b.*member) + (s.embedding ? e.*member : 0) + (s.head ? h.*member : 0);
  };
  // Buffers hold the layer at work and the next.
  auto neighbours = [&](int64_t of_e, int64_t of_b, int64_t of_h) {
    return std::max({s.layers > 1 ? 2 * of_b : of_b, s.embedding ? of_e + of_b : 0, s.head ? of_b + of_h : 0});
  };
  auto pair = [&](int64_t LayerPart::*member) { return neighbours(e.*member, b.*member, h.*member); };
  StageHolds out;
  out.weights = all(&LayerPart::weights);
  out.gradients = all(&LayerPart::gradients);
  out.states = all(&LayerPart::states);
  out.pair_weights = pair(&LayerPart::weights);
  out.pair_gradients = pair(&LayerPart::gradients);
  out.pair_states = pair(&LayerPart::states);
  out.gathered_weights = pair(&LayerPart::gathered_weights);
  out.gathered_gradients = pair(&LayerPart::gathered_gradients);
  out.embedding_saved = s.embedding ? e.cost.saved_kept : 0, out.head_saved = s.head ? h.cost.saved_kept : 0;
  out.saved = Product(kept, b.cost.saved_kept) + Product(s.selective, b.cost.saved_selective) +
              Product(s.full, b.cost.saved_full) + out.embedding_saved + out.head_saved;
  int64_t most_saved = 0;
  auto kind = [&](int32_t count, int64_t saved, int64_t work) {
    if (count == 0) return;
    most_saved = std::max(most_saved, saved);
    out.block_backward = std::max(out.block_backward, work);
  };
  kind(kept, b.cost.saved_kept, b.cost.work_backward);
  kind(s.selective, b.cost.saved_selective, b.cost.work_backward_selective);
  kind(s.full, b.cost.saved_full, b.cost.work_backward_full);
  out.pair_saved = neighbours(out.embedding_saved, most_saved, out.head_saved);
  out.neighbours = ((s.embedding ? 0 : 1) + (s.head ? 0 : 1)) * b.cost.boundary;
  return out;
}

StageBytes CountBytes(const StageParts& parts, const Strategy& s, Explanation* explain) {
  const LayerCost &embedding = parts.of(Role::kEmbedding).cost, &block = parts.of(Role::kBlock).cost,
                  &head = parts.of(Role::kHead).cost;
  const StageHolds all = HoldsOf(parts, s);
  const int64_t buffer_weights = OnHost(all.pair_weights, s.weights_out);
  const int64_t buffer_gradients = OnHost(all.pair_gradients, s.gradients_out);
  const int64_t buffer_states = OnHost(all.pair_states, s.states_out);
  const int64_t host_weights = OnHost(all.weights, s.weights_out);
  const int64_t host_gradients = OnHost(all.gradients, s.gradients_out);
  const int64_t host_states = OnHost(all.states, s.states_out);
  const int64_t host_saved = OnHost(Product(s.in_flight, all.saved), s.activations_out);
  const int64_t always = (all.weights - host_weights) + (all.gradients - host_gradients) + (all.states - host_states) +
                         all.gathered_weights + buffer_weights + all.neighbours;
  // A peak is reached at the embedding, at the last block or at the head: what is saved there, and the layer's own
  // work.
  struct Peak {
    int64_t saved = 0, on_host = 0, buffer = 0, work = 0, total = 0;
  };
  auto peak_of = [&](int64_t in_flight, bool backward) {
    Peak worst;
    auto consider = [&](int64_t live, int64_t work) {
      Peak peak{live, OnHost(live, s.activations_out), OnHost(std::min(live, all.pair_saved), s.activations_out), work,
                0};
      peak.total = peak.saved - peak.on_host + peak.buffer + work;
      if (peak.total > worst.total) worst = peak;
    };
    consider(Product(in_flight, all.saved) - all.head_saved, backward ? all.block_backward : block.work_forward);
    if (s.embedding) {
      consider(Product(in_flight - 1, all.saved) + all.embedding_saved,
               backward ? embedding.work_backward : embedding.work_forward);
    }
    if (s.head) consider(Product(in_flight, all.saved), backward ? head.work_backward : head.work_forward);
    return worst;
  };
  const Peak first = peak_of(1, false), forward = peak_of(s.in_flight, false), backward = peak_of(s.in_flight, true);
  const int64_t update = buffer_gradients + buffer_states;  // only in the first forward, with one micro-batch saved
  StageBytes out;
  out.peak_forward = always + std::max(first.total + update, forward.total);
  out.peak_backward = always + backward.total + all.gathered_gradients + buffer_gradients;
  out.host = host_weights + host_gradients + host_states + host_saved;
  if (explain == nullptr) return out;

  explain->peak_in_forward = out.peak_forward > out.peak_backward;
  const bool updating = explain->peak_in_forward && first.total + update >= forward.total;
  const Peak& at = !explain->peak_in_forward ? backward : updating ? first : forward;
  const bool gradients_move = updating || !explain->peak_in_forward;
  explain->bytes = {
      {"weights", all.weights - host_weights, host_weights},
      {"gradients", all.gradients - host_gradients, host_gradients},
      {"optimizer states", all.states - host_states, host_states},
      {"gathered weights", all.gathered_weights, 0},
      {"gathered gradients", explain->peak_in_forward ? 0 : all.gathered_gradients, 0},
      {"buffers of host copies",
       buffer_weights + (gradients_move ? buffer_gradients : 0) + (updating ? buffer_states : 0) + at.buffer, 0},
      {"saved activations", at.saved - at.on_host, host_saved},
      {"working peak of a layer", at.work, 0},
      {"buffers to neighbour stages", all.neighbours, 0},
  };
  return out;
}

StageCost StageModel::CostOf(const Strategy& strategy) const {
  const StageParts& parts = *state_->Find(strategy);
  const StageBytes bytes = CountBytes(parts, strategy);
  const std::array<double, kPhases> us = PhaseTimes(parts, strategy);
  const double stable = us[kForward] + us[kBackward];
  return {stable, us[kForwardFirst] + us[kBackwardLast] - stable, bytes.peak_forward, bytes.peak_backward, bytes.host};
}

PassTimes StageModel::PassesOf(const Strategy& strategy) const {
  const std::array<double, kPhases> us = PhaseTimes(*state_->Find(strategy), strategy);
  return {us[kForward], us[kBackward], us[kForwardFirst] - us[kForward], us[kBackwardLast] - us[kBackward]};
}

Explanation StageModel::Explain(const Strategy& strategy) const {
  Explanation out;
  CountBytes(*state_->Find(strategy), strategy, &out);
  PhaseTimes(*state_->Find(strategy), strategy, &out);
  return out;
}

}  // namespace interlace::plan
