#include "sim/receive_buffers.h"

#include <algorithm>

#include "ir/memory_plan.h"

namespace interlace {

std::vector<std::vector<int64_t>> ReceiveBytesAtOps(const Program& program, const std::vector<const Phase*>& phases,
                                                    bool cpu) {
  if (std::all_of(program.mesh.begin(), program.mesh.end(), [](const Axis& axis) { return axis.size == 1; })) return {};
  if (!cpu && std::none_of(program.units.begin(), program.units.end(), [](const Unit& u) { return u.parted(); }))
    return {};
  MemoryPlanOptions options;
  options.receive_buffers = cpu;
  options.pack = false;
  const Result<MemoryPlan> plan = PlanMemory(program, options);
  if (!plan.ok()) return {};  // sizes that do not fit are reported by whoever adds them up
  std::vector<std::vector<int64_t>> out;
  for (const Phase* phase : phases) out.emplace_back(phase->ops.size(), 0);
  for (const PlanVariant& v : plan->variants) {
    const auto phase = static_cast<size_t>(std::find(phases.begin(), phases.end(), v.phase) - phases.begin());
    if (phase == phases.size()) continue;
    const auto count = static_cast<int32_t>(out[phase].size());
    std::vector<int64_t> change(static_cast<size_t>(count) + 1, 0);
    for (size_t b = 0; b < plan->blocks.size(); ++b) {
      if (plan->blocks[b].what != PlannedBlock::What::kReceive) continue;
      for (const LifeSpan& s : plan->lives[b].spans) {
        const int32_t first = std::max(s.first - v.axis - 1, 0), last = std::min(s.last - v.axis - 1, count - 1);
        if (first > last) continue;
        change[first] += plan->blocks[b].bytes;
        change[last + 1] -= plan->blocks[b].bytes;
      }
    }
    int64_t live = 0;
    for (int32_t i = 0; i < count; ++i) out[phase][i] = std::max(out[phase][i], live += change[i]);
  }
  return out;
}

}  // namespace interlace
