#include "runtime/plan.h"

#include <set>
#include <unordered_map>
#include <utility>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "runtime/stream.h"

namespace interlace {

namespace {

// Calls f for every value whose slot the op needs: operands, what it writes, the roots of its places, and its own
// results.
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

// Puts the kernels of copy lanes on their streams, and makes later users of a storage that such a lane touched wait for
// it. At the beginning of a phase that may be any lane that touches it somewhere in the program; and what the phase
// before handed on under another name, where lanes touch such values, waits for all that lanes were given.
class LanePlacer {
 public:
  explicit LanePlacer(const BuildContext& context)
      : program_(context.program), device_(context.device), streams_(context.lanes) {
    ForEachOp(program_, [&](const Op& op) {
      if (!HasOwnStream(op, device_)) return;
      lanes_.insert(LaneOf(op));
      ForEachTouched(program_, op, [&](ValueId value) { busy_[program_.RootOf(value)].insert(LaneOf(op)); });
    });
    bool handed_on = false;
    for (const Phase& phase : program_.phases) {
      for (ValueId id : phase.Outgoing()) handed_on = handed_on || busy_.contains(program_.RootOf(id));
    }
    if (!handed_on) return;
    for (ValueId id : context.phase.Incoming()) incoming_.insert(program_.RootOf(id));
  }

  Kernel Place(Kernel kernel, const Op& op) {
    if (kernel.run == nullptr) return kernel;  // a view of something fixed: whoever uses it waits
    const Lane lane = LaneOf(op);
    const bool own = HasOwnStream(op, device_);
    LaneUses after;
    std::vector<ValueId> touched, roots;
    ForEachTouched(program_, op, [&](ValueId id) {
      const ValueId root = program_.RootOf(id);
      touched.push_back(id);
      roots.push_back(root);
      std::set<Lane>& busy = busy_[root];
      for (Lane other : busy) {
        if (!own || other != lane) after.emplace_back(other, root);
      }
      for (Lane other : lanes_) {
        if (incoming_.contains(root) && (!own || other != lane)) after.emplace_back(other, kNone);
      }
      if (!own) busy.clear(), incoming_.erase(root);
      if (own) busy.insert(lane);
    });
    if (own) return OnLane(std::move(kernel), lane, std::move(after), std::move(touched), std::move(roots), streams_);
    return AfterLanes(std::move(kernel), std::move(after), streams_);
  }

 private:
  const Program& program_;
  c10::Device device_;
  std::shared_ptr<LaneStreams> streams_;
  std::set<Lane> lanes_;                              // with streams of their own
  std::set<ValueId> incoming_;                        // roots of what was handed on, until compute has waited
  std::unordered_map<ValueId, std::set<Lane>> busy_;  // by root: lanes that touched it since compute last waited
};

struct GatedKernel : KernelData {
  Kernel inner;
  void Run(Frame& frame) {
    if (frame.before_update) frame.before_update();
    inner.run(inner.data.get(), frame);
  }
};

// Runs when the step before has left its optimizer step.
struct PendingKernel : KernelData {
  Kernel inner;
  void Run(Frame& frame) {
    if (frame.pending.on) inner.run(inner.data.get(), frame);
  }
};

template <typename Data>
Kernel Wrap(Kernel kernel) {
  auto data = std::make_unique<Data>();
  data->inner = std::move(kernel);
  return MakeKernel(std::move(data));
}

bool Updates(const Phase& phase, const Op& op) {
  return phase.kind == PhaseKind::kStep || op.part == Part::kUpdate;
}

}  // namespace

Result<Plan> BuildPlan(const BuildContext& outer, const Phase& phase, bool keep_operands,
                       const std::vector<at::Tensor>* receive_buffers) {
  const Program& program = outer.program;
  Plan plan;
  plan.phase = &phase;
  const int32_t count = static_cast<int32_t>(phase.ops.size());

  std::unordered_map<ValueId, int32_t> last_use;
  for (int32_t i = 0; i < count; ++i) {
    ForEachTouched(program, program.op(phase.ops[i]), [&](ValueId id) { last_use[id] = i; });
  }
  for (ValueId id : phase.Outgoing()) last_use[id] = count;
  std::vector<std::vector<ValueId>> dies_after(count);
  for (const auto& [id, at] : last_use) {
    if (at < count && !outer.is_fixed(id)) dies_after[at].push_back(id);
  }

  std::optional<LanePlacer> lanes;  // no streams on CPUs
  if (!outer.device.is_cpu()) lanes.emplace(outer);
  KernelData* before = nullptr;  // of the last instruction, as it was built
  bool gated[2] = {false, false};  // pending ops may all be left out: others have a gate of their own
  for (int32_t i = 0; i < count; ++i) {
    const Op& op = program.op(phase.ops[i]);
    BuildContext context = outer;
    if (receive_buffers != nullptr) context.receive_buffer = (*receive_buffers)[i];
    context.dies_here = [&](ValueId id) { return !keep_operands && !outer.is_fixed(id) && last_use.at(id) == i; };
    INTERLACE_ASSIGN(Kernel kernel, BuildKernel(context, op));
    KernelData* const built = kernel.data.get();
    const bool pending = IsPending(op);
    if (!gated[pending] && kernel.run != nullptr && Updates(phase, op)) {
      kernel = Wrap<GatedKernel>(std::move(kernel));
      gated[pending] = true;
    }
    if (pending && kernel.run != nullptr) kernel = Wrap<PendingKernel>(std::move(kernel));
    if (lanes) kernel = lanes->Place(std::move(kernel), op);  // outermost: who is left out has waited all the same
    if (kernel.run != nullptr) {
      if (!plan.instructions.empty()) plan.instructions.back().with_next = JoinUpdates(before, built);
      before = built;
      plan.instructions.push_back(
          {kernel.run, kernel.data.get(), op.id, i, static_cast<int32_t>(plan.frees.size()), 0, 0, 0, false});
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
  for (ValueId id : phase.Incoming()) unused(id);
  for (const Input& input : program.inputs) unused(input.value);
  return plan;
}

}  // namespace interlace
