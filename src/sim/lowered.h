// lowered.h — a program as the simulator executes it: phases in run order, every op with its kind and cost.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cost/cost_model.h"
#include "ir/program.h"

namespace interlace {

struct LoweredOp {
  enum class Kind : uint8_t { kFree, kCompute, kStart, kWait };
  Kind kind = Kind::kFree;
  Lane lane = Lane::kCompute;  // of a transfer
  AxisGroup group;             // of a collective: who joins; of a message: the axis; one rank: alone, or with `peer`
  // Of a message the other rank, the same for all who run this, or a row of Lowered::peers. The k-th one of a
  // channel sent to a rank is the k-th that it receives from here.
  bool across = false;  // onto replicas: on connections of its own, beside those of the shard axes
  int32_t peer = -1, peers = -1;
  bool receives = false;  // of a message
  int32_t channel = 0;
  bool IsMessage() const { return peer >= 0 || peers >= 0; }
  bool backward = false;  // of the backward part, where a launch may take another time
  OpId op = kNone;
  int32_t cost = -1;    // of a start: index in Lowered::costs
  int64_t work_ps = 0;  // of compute, alone on its cores
  int64_t transient_bytes = 0;
};

struct Lowered {
  const Program* program = nullptr;
  std::vector<const Phase*> phases;         // distinct
  std::vector<std::vector<LoweredOp>> ops;  // by distinct phase
  std::vector<int32_t> run;                 // distinct phase of each run of a phase, in order
  std::vector<int64_t> micro_batch;         // of each run, the first of them; kNone: it runs once a step
  std::vector<int64_t> first;               // instance number of its first op; one more entry at the end
  std::vector<OpCost> costs;
  std::vector<std::vector<int32_t>> peers;  // by index along a message's axis: the index of the other rank
  bool cpu = false;                         // of the cluster
  // By distinct phase and place: what reductions under way receive into while the op runs, or empty:
  // receive_buffers.h
  std::vector<std::vector<int64_t>> receive_bytes;
  int64_t ReceiveAt(size_t phase, size_t place) const {
    return receive_bytes.empty() ? 0 : receive_bytes[phase][place];
  }
  int64_t instances() const { return first.back(); }
  // Phase, place in it, and op of an instance.
  const LoweredOp& At(int64_t instance, size_t& run_index) const;
};

inline constexpr int64_t kMaxInstances = int64_t{1} << 27;

// Error: of the cost model; a step of more than kMaxInstances ops.
Result<Lowered> Lower(const Program& program, CostModel& model);
// What Lower makes of the ops of a program, by op id, transfers left out (their `op` is kNone). It holds for every
// variant of the program in which only transfers were moved, merged or dropped, and saves their costs being looked up.
using KnownOps = std::vector<LoweredOp>;
KnownOps KnownOf(const Lowered& lowered);
Result<Lowered> Lower(const Program& program, CostModel& model, const KnownOps& known);

// Time when `rem_ps` of work is slowed by `slow` (fixed point, kOne = not slowed), rounded up; and work done in a time,
// rounded down. Rounding so keeps every simulated time at or above its bound.
inline constexpr int64_t kOne = int64_t{1} << 20;
inline constexpr int64_t kLatest = int64_t{1} << 62;  // a time that no step may reach
inline int64_t Stretch(int64_t rem_ps, int64_t slow) {
  if (slow == kOne) return rem_ps;
  __int128 time = (static_cast<__int128>(rem_ps) * slow + (kOne - 1)) >> 20;
  return time < kLatest ? static_cast<int64_t>(time) : kLatest;
}
inline int64_t Done(int64_t time_ps, int64_t slow) {
  if (slow == kOne) return time_ps;
  return static_cast<int64_t>((static_cast<__int128>(time_ps) << 20) / slow);
}
// What one launch takes of the host: [0] in forward and the update, [1] in backward.
std::array<int64_t, 2> IssuePs(const ClusterSpec& cluster);
// A factor as fixed point, rounded up.
int64_t FixedPoint(double factor);

}  // namespace interlace
