// stage_sums.h — the stage model as closed sums over equal layers, evaluated for many strategies that differ only in
// counts, micro-batches in flight and ratios. Inside the room only; equal to reference_cost.cc to the byte.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "plan/stage_parts.h"

namespace interlace::plan {

// Algorithm 1's factors laid out for branch-free code. Class order: compute, device-device, in, out.
struct OverlapFactors {
  bool overlap = false;  // false: times add up
  std::array<double, 4> all{}, all_inverse{};
  // [zero class][class]: factors of the set without that class; [class][partner]: of a pair.
  std::array<std::array<double, 4>, 4> without{}, without_inverse{}, pair{}, pair_inverse{};
};

// Everything that (b, dp, tp, ZeRO) and "has embedding", "has head" fix. Doubles hold bytes exactly (below 2^53).
struct StageSums {
  OverlapFactors factors;
  bool embedding = false, head = false;
  std::array<LayerPart, kRoles> layer;
  double in_us_per_byte = 0, out_us_per_byte = 0;
  std::array<std::array<LinkTime, kRoles>, kPhases> gather, reduce;  // zero where a phase has none
  // Two neighbours' bytes, by "more than one block".
  std::array<double, 2> pair_weights{}, pair_gradients{}, pair_states{}, pair_gathered_weights{},
      pair_gathered_gradients{};
  double neighbours = 0;  // buffers to the stages before and after
};
StageSums SumsOf(const StageParts& parts, bool embedding, bool head);

// A block of strategies of one StageSums, as structure of arrays.
struct StrategyVectors {
  static constexpr int kWidth = 64;
  using Row = std::array<double, kWidth>;
  int count = 0;
  alignas(64) Row layers, full, selective, in_flight;
  alignas(64) Row wo, go, oo, ao;
  // Out.
  alignas(64) Row stable_us, total_us, peak_forward, peak_backward, host;  // total = t + d
};
// Fills the outputs of the first `count` vectors (and may write beyond them). Times alone: the three sizes are left as
// they are.
enum class Wanted : uint8_t { kAll, kTimes };
void EvaluateVectors(const StageSums& sums, StrategyVectors& vectors, Wanted wanted = Wanted::kAll);
// The same code for each instruction set that this machine has, plainest first. All give the same bits; the last is
// used.
using VectorFunction = void (*)(const StageSums&, StrategyVectors&, Wanted);
std::span<const VectorFunction> VectorFunctions();

}  // namespace interlace::plan
