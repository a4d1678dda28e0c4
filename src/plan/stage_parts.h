// stage_parts.h — what the time and memory of a stage are made of: one layer's times and bytes under (b, dp, tp, ZeRO),
// before ratios and counts. Inside the room only.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "plan/stage_model.h"

namespace interlace::plan {

enum StagePhase { kForwardFirst, kForward, kBackward, kBackwardLast, kPhases };

// One collective of a layer over the data-parallel group.
struct LinkTime {
  double us = 0;
  double core_us = 0;  // of that, processor time of the rank that computes (cpu clusters)
};

struct LayerPart {
  LayerCost cost;
  LinkTime gather, scatter, all_reduce;  // of the whole layer; scatter is a reduce-scatter
  double update_us = 0;
  double weights_in_us = 0, weights_out_us = 0;  // the device's whole share over the host link
  double gradients_in_us = 0, gradients_out_us = 0;
  double states_in_us = 0, states_out_us = 0;
  int64_t weights = 0, gradients = 0, states = 0;        // the device's share, in bytes
  int64_t gathered_weights = 0, gathered_gradients = 0;  // of the largest unit while whole; 0 where nothing is gathered
};

struct StageParts {
  int32_t micro_batch = 1, dp = 1, tp = 1, zero = 0;
  std::array<LayerPart, kRoles> layer;
  const Interference* interference = nullptr;      // nullptr: times add up
  double in_us_per_byte = 0, out_us_per_byte = 0;  // the device's share of the host link

  const LayerPart& of(Role role) const { return layer[static_cast<int>(role)]; }
  // What is gathered before a phase's compute, and reduced after it.
  bool gathers(StagePhase phase) const { return zero == 3 || (zero >= 1 && phase == kForwardFirst); }
  const LinkTime* ReduceOf(const LayerPart& part, StagePhase phase) const {
    if (phase == kBackward) return zero >= 2 ? &part.scatter : nullptr;
    if (phase == kBackwardLast) return zero >= 1 ? &part.scatter : &part.all_reduce;
    return nullptr;
  }
};

struct StageModel::State {
  StageOptions options;
  ClusterSpec cluster;
  int32_t blocks = 0;
  int64_t host_share = 0;                 // host bytes of one device
  std::deque<Interference> interference;  // by number of devices
  std::vector<StageParts> parts;  // by (b, dp, tp), then ZeRO 0 to 3, then 0 to 3 of a stage with embedding and head
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> index;      // of the ZeRO-0 entry
  std::map<std::pair<int32_t, int64_t>, std::vector<int32_t>> of_key;  // the same by (devices, G)

  // Beyond the ZeRO-0 entry.
  static int32_t Offset(int32_t zero, bool embedding, bool head) { return zero + (embedding && head ? 4 : 0); }
  const StageParts* Find(const Strategy& s) const {
    auto found = index.find({s.micro_batch, s.dp, s.tp});
    return found == index.end() ? nullptr : &parts[found->second + Offset(s.zero, s.embedding, s.head)];
  }
};

// Bytes of `bytes` that a ratio leaves on the host: whole bytes, the rest stays.
inline int64_t OnHost(int64_t bytes, float ratio) {
  return static_cast<int64_t>(static_cast<double>(bytes) * static_cast<double>(ratio));
}

// What one layer does in a phase (stage_model.h has the table), alone.
struct LayerPhase {
  double compute_us = 0, update_us = 0, tp_us = 0;
  double in_us = 0, out_us = 0;  // copies before its compute, and after it
  LinkTime gather, reduce;       // likewise
};
// `saved`: activation bytes of the layer that are on the host.
LayerPhase PhaseOf(const StageParts& parts, const Strategy& strategy, StagePhase phase, Role role, double saved);
// Mist's Algorithm 1: the time of compute, device-device, in and out that start together.
double Together(const StageParts& parts, const std::array<double, 4>& alone);

// By phase, as closed sums over equal layers.
std::array<double, kPhases> PhaseTimes(const StageParts& parts, const Strategy& strategy,
                                       Explanation* explain = nullptr);
// What the search compares.
struct StageTimes {
  double stable_us = 0, total_us = 0;  // t, t + d
};
StageTimes TimesOf(const StageParts& parts, const Strategy& strategy);

// What a stage holds in bytes, before offload ratios.
struct StageHolds {
  int64_t weights = 0, gradients = 0, states = 0;  // of all layers
  int64_t saved = 0;                               // by one micro-batch
  int64_t embedding_saved = 0, head_saved = 0;
  int64_t pair_weights = 0, pair_gradients = 0, pair_states = 0, pair_saved = 0;  // most of two neighbours
  int64_t gathered_weights = 0, gathered_gradients = 0;                           // likewise
  int64_t block_backward = 0;  // the largest work of the kinds of block that occur
  int64_t neighbours = 0;      // buffers to the stages before and after
};
StageHolds HoldsOf(const StageParts& parts, const Strategy& strategy);
struct StageBytes {
  int64_t peak_forward = 0, peak_backward = 0, host = 0;
};
StageBytes CountBytes(const StageParts& parts, const Strategy& strategy, Explanation* explain = nullptr);

}  // namespace interlace::plan
