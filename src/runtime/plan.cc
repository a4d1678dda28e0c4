#include "runtime/plan.h"

#include <unordered_map>
#include <unordered_set>

namespace interlace {

namespace {

// Calls f for every value whose slot the op needs: operands, what it writes, the roots of its places, and its own results.
template <typename F>
void ForEachTouched(const Program& program, const Op& op, F&& f) {
  ForEachOperand(op, f);
  for (ValueId id : op.writes) f(id);
  for (ValueId id : op.results) {
    if (id == kNone) continue;
    f(id);
    const Value& value = program.value(id);
    if (value.root != id) f(value.root);
  }
}

}  // namespace

Result<Plan> BuildPlan(const BuildContext& outer, const Phase& phase, bool keep_operands) {
  const Program& program = outer.program;
  Plan plan;
  plan.phase = &phase;
  const int32_t count = static_cast<int32_t>(phase.ops.size());

  std::unordered_map<ValueId, int32_t> last_use;
  for (int32_t i = 0; i < count; ++i) {
    ForEachTouched(program, program.op(phase.ops[i]), [&](ValueId id) { last_use[id] = i; });
  }
  for (ValueId id : phase.gives) last_use[id] = count;
  std::vector<std::vector<ValueId>> dies_after(count);
  for (const auto& [id, at] : last_use) {
    if (at < count && !outer.is_fixed(id)) dies_after[at].push_back(id);
  }

  for (int32_t i = 0; i < count; ++i) {
    const Op& op = program.op(phase.ops[i]);
    BuildContext context = outer;
    context.dies_here = [&](ValueId id) {
      return !keep_operands && !outer.is_fixed(id) && last_use.at(id) == i;
    };
    INTERLACE_ASSIGN(Kernel kernel, BuildKernel(context, op));
    if (kernel.run != nullptr) {
      plan.instructions.push_back({kernel.run, kernel.data.get(), op.id, i, static_cast<int32_t>(plan.frees.size()), 0});
      plan.data.push_back(std::move(kernel.data));
    }
    // Ops without a kernel (release, views of states) leave what dies there to the instruction before.
    for (ValueId id : dies_after[i]) {
      (plan.instructions.empty() ? plan.unused : plan.frees).push_back(id);
    }
    if (!plan.instructions.empty()) plan.instructions.back().free_end = static_cast<int32_t>(plan.frees.size());
  }
  const auto unused = [&](ValueId id) {
    if (!last_use.contains(id) && !outer.is_fixed(id)) plan.unused.push_back(id);
  };
  for (ValueId id : phase.takes) unused(id);
  for (const Input& input : program.inputs) unused(input.value);
  return plan;
}

}  // namespace interlace
