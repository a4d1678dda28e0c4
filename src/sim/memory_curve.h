// memory_curve.h — bytes alive on a rank as its ops are issued, by storage (ir/liveness.h), and what fills the peak.
//
// At an op: what is persistent (parameters without a unit, buffers, constants, states, those of one step too) +
// storages of results and takes that live just before it + its own new results + its transient; on CPUs + the receive
// buffers of reductions under way. Inputs belong to the caller and are given apart.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sim/lowered.h"
#include "trace/timeline.h"

namespace interlace {

struct MemoryPeak {
  int64_t bytes = 0;
  size_t run_index = 0;  // of the phase's run
  int64_t place = -1;    // of the op in its phase
  OpId op = kNone;
};

// What bytes are for:
//
//   parameters   shards and whole parameters, master copies    gathered      buffers that gathers fill
//   gradients    flat gradients, reduced shards                activations   results of the forward part
//   optimizer    every other state                             temporaries   results of the backward part and update
//   buffers      buffers and constants                         workspace     inside the op that runs
enum class MemoryKind : uint8_t {
  kParameters,
  kGradients,
  kOptimizer,
  kBuffers,
  kGathered,
  kActivations,
  kTemporaries,
  kWorkspace
};
inline constexpr int kMemoryKinds = 8;
inline constexpr std::array<std::string_view, kMemoryKinds> kMemoryKindNames = {
    "parameters", "gradients", "optimizer", "buffers", "gathered", "activations", "temporaries", "workspace"};

struct MemoryHolder {
  std::string name;  // "u0.exp_avg", "%12 aten.mm", a parameter's name
  std::string module;
  int64_t bytes = 0;
  ValueId root = kNone;                      // of a storage, whose kind is that of its root (memory_kinds.h)
  MemoryKind kind = MemoryKind::kWorkspace;  // of anything else
};

struct MemoryCurve {
  int64_t persistent_bytes = 0;
  int64_t input_bytes = 0;
  // By distinct phase and place: bytes while that op runs, persistent ones included.
  std::vector<std::vector<int64_t>> at_op;
  // By run: what runs before it saved for runs behind it, to be added; empty when nothing is carried.
  std::vector<int64_t> through;
  int64_t At(const Lowered& lowered, size_t run, size_t place) const {
    return at_op[lowered.run[run]][place] + (through.empty() ? 0 : through[run]);
  }
  MemoryPeak peak;
  int64_t taken_bytes = 0;            // TakenBytes of the peak
  std::vector<MemoryHolder> holders;  // what lives at the peak, largest first
  // The ops that need most, by distinct place, largest first; at most 10.
  std::vector<MemoryPeak> top;
};

// Error: a symbolic size, or a sum beyond 64 bits.
Result<MemoryCurve> ComputeMemory(const Lowered& program);

// Only MemoryCurve::peak.bytes, sooner.
Result<int64_t> PeakBytes(const Lowered& program);
// What a rank takes, of which `live_bytes` live at once. On CPUs all that comes and goes has a place (ir/memory_plan.h):
// what is persistent and MemoryPlan::taken_bytes, which packing, alignment and whole pages put above the sum of what
// lives. The first steps are planned without knowing what kernels take inside, so it is the larger of that plan and the
// one with it. Elsewhere, and of a program without a plan, which has no arena: `live_bytes`.
int64_t TakenBytes(const Lowered& program, int64_t live_bytes);

// What is allocated for the whole step: each begins at 0 and does not end. Storages are numbered from 0.
Result<std::vector<MemoryEvent>> PersistentEvents(const Lowered& program, int32_t rank);
// The place in the user's source that made the op, if it is known.
void SetSource(const Program& program, OpId op, MemoryEvent& event);

// Beginnings and ends of storages at the times of a simulated rank.
Result<std::vector<MemoryEvent>> MemoryEvents(const Lowered& program, const std::vector<int64_t>& start_ps,
                                              const std::vector<int64_t>& end_ps, int32_t rank);

}  // namespace interlace
