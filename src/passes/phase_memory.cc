#include "passes/phase_memory.h"

#include <algorithm>

#include "sim/receive_buffers.h"

namespace interlace {

int64_t PhaseMemory::Peak() const {
  return at.empty() ? liveness.persistent_bytes : *std::max_element(at.begin(), at.end());
}

Result<PhaseMemory> MemoryOf(const Program& program, const Phase& phase, CostModel& model) {
  PhaseMemory out;
  INTERLACE_ASSIGN(out.liveness, ComputeLiveness(program, phase));
  const auto count = static_cast<int32_t>(phase.ops.size());
  out.at.resize(count);
  for (int32_t i = 0; i < count; ++i) {
    INTERLACE_ASSIGN(OpCost cost, model.Cost(program.op(phase.ops[i])));
    out.at[i] = out.Before(i) + cost.transient_bytes;
  }
  const std::vector<std::vector<int64_t>> receive = ReceiveBytesAtOps(program, {&phase}, model.cluster().cpu);
  for (int32_t i = 0; i < count && !receive.empty(); ++i) out.at[i] += receive[0][i];
  for (const StorageLife& life : out.liveness.storages) {
    if (life.first >= 0) out.at[life.first] += life.bytes;
  }
  return out;
}

}  // namespace interlace
