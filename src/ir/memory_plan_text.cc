// The memory plan in words: `interlace inspect --memory`.
#include <algorithm>
#include <sstream>

#include "ir/memory_plan.h"
#include "ir/text.h"

namespace interlace {

std::string NameOfStorage(const Program& program, ValueId root) {
  const Value& value = program.value(root);
  for (const State& state : program.states) {
    if (value.kind == ValueKind::kState && state.value == root)
      return state.unit == kNone ? state.role : "u" + std::to_string(state.unit) + "." + state.role;
  }
  std::string name = "%" + std::to_string(root);
  if (value.def == kNone) return name;
  const Op& op = program.op(value.def);
  name += " " + op.name;
  if (op.units.empty()) return name;
  return name + " u" + std::to_string(op.units[std::min<size_t>(value.result_index, op.units.size() - 1)]);
}

std::string NameOfBlock(const Program& program, const PlannedBlock& block) {
  if (block.what == PlannedBlock::What::kReceive) return "receive buffer of " + program.op(block.op).name;
  if (block.what == PlannedBlock::What::kWorkspace) return "inside " + program.op(block.op).name;
  return NameOfStorage(program, block.root);
}

std::string DescribeMemoryPlan(const Program& program, const MemoryPlan& plan, int limit) {
  std::ostringstream out;
  const auto mib = [](int64_t bytes) {
    std::ostringstream text;
    text.setf(std::ios::fixed);
    text.precision(2);
    text << static_cast<double>(bytes) / (1 << 20) << " MiB";
    return text.str();
  };
  out.precision(3);
  out << (plan.placed() ? "arena          " : "heap           ") << mib(plan.taken_bytes) << " in "
      << plan.blocks.size() << " blocks, fragmentation " << 100 * plan.Fragmentation() << " % over "
      << mib(plan.packing.live) << " live at once\n";
  const int32_t at = plan.packing.live_at;
  for (const PlanVariant& v : plan.variants) {
    const int32_t place = at - v.axis - 1;
    if (place < -1 || place > static_cast<int32_t>(v.phase->ops.size())) continue;
    out << "peak           in " << v.phase->name;
    if (place >= 0 && place < static_cast<int32_t>(v.phase->ops.size()))
      out << " at " << PrintOp(program, program.op(v.phase->ops[place]));
    out << "\n";
  }
  const auto list = [&](const char* title, bool at_peak) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < static_cast<int32_t>(plan.blocks.size()); ++i) {
      const auto& spans = plan.lives[i].spans;
      const bool lives =
          std::any_of(spans.begin(), spans.end(), [&](const LifeSpan& s) { return s.first <= at && at <= s.last; });
      if (lives || !at_peak) ids.push_back(i);
    }
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int32_t a, int32_t b) { return plan.blocks[a].bytes > plan.blocks[b].bytes; });
    out << title << " (" << ids.size() << ")\n";
    int64_t rest = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      const PlannedBlock& block = plan.blocks[ids[i]];
      if (i >= static_cast<size_t>(limit)) {
        rest += block.bytes;
        continue;
      }
      const OpId op = block.op != kNone ? block.op : program.value(block.root).def;
      const int32_t m = op == kNone ? kNone : program.op(op).module;
      const std::string module =
          m >= 0 && m < static_cast<int32_t>(program.modules.size()) ? program.modules[m].path : "";
      out << "  " << mib(block.bytes);
      if (plan.placed()) out << " at " << plan.OffsetOf(ids[i]);
      out << "  " << NameOfBlock(program, block) << (module.empty() ? "" : "  ") << module << "\n";
    }
    if (rest > 0) out << "  " << mib(rest) << " in " << ids.size() - static_cast<size_t>(limit) << " more\n";
  };
  list("live at the peak", true);
  list("largest", false);
  return out.str();
}

}  // namespace interlace
