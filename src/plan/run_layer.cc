#include "plan/run_layer.h"

#include <algorithm>
#include <array>
#include <string>
#include <unordered_set>
#include <utility>

#include "ir/memory_plan.h"
#include "ir/op_table.h"
#include "passes/passes.h"

namespace interlace::plan {
namespace {

// The head's gradient of a tied parameter waits for the embedding's: it leaves the head like an activation's, and
// enters the embedding as an input, to which the embedding's own is added.
Status LeaveTied(Program& program, Role role, const std::string& tied) {
  Phase& phase = *program.MicroBatchPhase();
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    Op& op = program.op(phase.ops[i]);
    if (op.kind != OpKind::kGrad) continue;
    const Param* param = program.ParamOf(op.args[0].value);
    if (param == nullptr || param->name != tied) continue;
    if (role == Role::kHead) {
      op.SetName("output");
      op.args = {op.args[1]};
      return Ok{};
    }
    const OpId grad = op.id;
    const ValueId own = op.args[1].value;
    const Type type = program.value(own).type;
    const Part part = op.part;
    Input input{program.AddValue(ValueKind::kInput, type).id, "tied.grad"};
    program.inputs.push_back(input);
    Op& add = program.AddOp("aten.add.Tensor");
    add.part = part;
    add.args = {Arg::Of(input.value), Arg::Of(own)};
    Type sum = type;
    sum.strides = program.ContiguousStrides(sum.sizes);
    program.op(grad).args[1] = Arg::Of(program.AddResult(add, sum));
    phase.ops.insert(phase.ops.begin() + static_cast<std::ptrdiff_t>(i), add.id);
    return Ok{};
  }
  return MakeError("a layer has no gradient of the tied parameter '", tied, "'");
}

// The trainer's passes for a ZeRO level (python/interlace/plan/execute.py has the same table).
Result<Program> CutAsTrained(const Program& layer, Role role, const RunSetting& setting, const std::string& tied) {
  Program program = layer.Clone();
  if (!tied.empty() && role != Role::kBlock) INTERLACE_TRY(LeaveTied(program, role, tied));
  const PassOptions ranks{{"ranks", std::to_string(setting.dp)}};
  INTERLACE_TRY(setting.zero == 0   ? Replicate(program, ranks)
                : setting.zero == 3 ? Shard(program, ranks)
                                    : Zero1(program, ranks));
  // All micro-batches after the first take the same memory.
  if (setting.accumulates)
    INTERLACE_TRY(Accumulate(program, {{"steps", "2"}, {"mode", setting.zero >= 2 ? "reduce_each" : "reduce_last"}}));
  return program;
}

int64_t BytesOf(const Program& program, ValueId root) {
  if (program.value(root).kind == ValueKind::kState) return 0;
  Result<int64_t> bytes = program.StorageBytes(program.value(root).type);
  return bytes.ok() ? *bytes : 0;  // flat buffers have sizes in numbers
}

// What the first step of a part gathers: the waits up to its first op that is no transfer.
int64_t FirstStep(const Program& program, const Phase& phase, int32_t from, int32_t to) {
  int64_t bytes = 0;
  bool waited = false;
  for (int32_t i = from; i < to; ++i) {
    const Op& op = program.op(phase.ops[i]);
    if (op.kind == OpKind::kGatherWait) {
      waited = true;
      ForEachOperand(op, [&](ValueId id) { bytes += BytesOf(program, program.RootOf(id)); });
    } else if (waited && op.kind != OpKind::kView) {
      break;
    }
  }
  return bytes;
}

Status AddPhase(Program& program, const Phase& phase, bool receives, RunLayer& out) {
  INTERLACE_ASSIGN(LiveBytes live, CountLive(program, phase, receives));
  const auto end = static_cast<int32_t>(phase.ops.size());
  // Of each part the last wait for a gather; of backward the first and the last reduction.
  int32_t last_step[2] = {end, end}, first_reduce = -1, last_reduce = -1;
  for (int32_t i = 0; i < end; ++i) {
    const Op& op = program.op(phase.ops[i]);
    if (op.kind == OpKind::kGatherWait && program.value(program.RootOf(op.args[0].value)).kind != ValueKind::kState)
      last_step[i >= live.middle] = i;
    if (op.kind != OpKind::kReduceStart) continue;
    if (first_reduce < 0) first_reduce = i;
    last_reduce = i;
  }
  std::array<std::unordered_set<int64_t>, 8> seen;
  for (int32_t i = 0; i < end; ++i) {
    const bool backward = i >= live.middle;
    const int beside = (i >= last_step[backward] ? RunLayer::kGathering : 0) |
                       (backward && i < first_reduce ? RunLayer::kReducing : 0);
    const Dim at = live.at[i];
    if (!seen[beside + 4 * backward].insert(at.is_const() ? at.value : -1 - int64_t{at.expr}).second) continue;
    (backward ? out.backward[beside] : out.forward[beside]).push_back(at);
  }
  out.first_forward = std::max(out.first_forward, FirstStep(program, phase, 0, live.middle));
  out.first_backward = std::max(out.first_backward, FirstStep(program, phase, live.middle, end));
  if (last_reduce < 0) return Ok{};
  const Op& last = program.op(phase.ops[last_reduce]);
  int64_t bytes = receives ? ReceiveBytes(program, last) : 0;
  ForEachOperand(last, [&](ValueId id) { bytes += BytesOf(program, program.RootOf(id)); });
  for (ValueId id : last.results) {
    if (program.RootOf(id) == id) bytes += BytesOf(program, id);
  }
  out.last_reduced = std::max(out.last_reduced, bytes);
  return Ok{};
}

Result<int64_t> LargestOf(const DimTable& dims, const Candidates& candidates, const Binding& binding, int64_t more) {
  if (candidates.empty()) return int64_t{0};
  INTERLACE_ASSIGN(int64_t bytes, Largest(dims, candidates, binding));
  return bytes + more;
}

}  // namespace

Result<int64_t> RunLayer::Forward(const Binding& binding, int64_t gathering) const {
  INTERLACE_ASSIGN(int64_t bytes, LargestOf(dims, forward[kNothing], binding, 0));
  INTERLACE_ASSIGN(int64_t more, LargestOf(dims, forward[kGathering], binding, gathering));
  return std::max(bytes, more);
}

Result<int64_t> RunLayer::Backward(const Binding& binding, int64_t gathering, int64_t reducing) const {
  int64_t most = 0;
  for (int beside = 0; beside < 4; ++beside) {
    const int64_t more = (beside & kGathering ? gathering : 0) + (beside & kReducing ? reducing : 0);
    INTERLACE_ASSIGN(int64_t bytes, LargestOf(dims, backward[beside], binding, more));
    most = std::max(most, bytes);
  }
  return most;
}

Result<RunLayer> RunLayerOf(const Program& layer, Role role, const RunSetting& setting, const std::string& tied) {
  INTERLACE_ASSIGN(Program program, CutAsTrained(layer, role, setting, tied));
  RunLayer out;
  for (const Phase& phase : program.phases) INTERLACE_TRY(AddPhase(program, phase, setting.receives, out));
  out.dims = std::move(program.dims);
  return out;
}

Result<RunHolds> RunHoldsOf(const Program& layer, Role role, const RunSetting& setting, const std::string& tied) {
  INTERLACE_ASSIGN(Program program, CutAsTrained(layer, role, setting, tied));
  RunHolds out;
  for (const Param& param : program.params) {
    if (role == Role::kHead && param.name == tied) continue;  // the embedding has it
    const Unit& unit = program.units[param.unit];
    const bool sharded = setting.zero == 3;
    ++out.units;
    out.weights += sharded ? unit.shard : unit.numel;
    out.states += !param.trainable ? 0 : setting.zero >= 1 ? unit.shard : unit.numel;
    for (const State& state : program.states) {
      if (state.unit != param.unit || (state.role != "grad" && state.role != "full_grad")) continue;
      out.gradients += program.value(state.value).type.sizes[0].value;
    }
  }
  return out;
}

}  // namespace interlace::plan
