// phase_memory.h — P(o) of every op of a phase: bytes that live just before it, what is persistent, its results, and
// what it takes inside (measured where the profile has the op); on CPUs also what reductions under way receive into.
// The memory that schedule passes compare with a limit.
#pragma once

#include <vector>

#include "cost/cost_model.h"
#include "ir/liveness.h"

namespace interlace {

struct PhaseMemory {
  PhaseLiveness liveness;
  std::vector<int64_t> at;  // P(o) by place in the phase's op list
  int64_t Before(int32_t place) const { return liveness.persistent_bytes + liveness.live_before[place]; }
  int64_t Peak() const;  // persistent bytes in an empty phase
};

// Error: a symbolic size, an op that the cost model cannot take.
Result<PhaseMemory> MemoryOf(const Program& program, const Phase& phase, CostModel& model);

// Latency, transfer and what follows the arrival of the data: the time T of a collective by itself.
inline int64_t TimeAlone(const OpCost& cost) {
  return cost.latency_ps + cost.work_ps + cost.finish_ps;
}

}  // namespace interlace
