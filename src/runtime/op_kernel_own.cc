// Kernels of the ops that only move or mark data: view, copy, assign, output, grad, grad.begin, call.python.
#include <ATen/ops/copy.h>

#include <algorithm>

#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "runtime/allocator.h"
#include "runtime/arena_memory.h"
#include "runtime/op_kernel.h"

namespace interlace {

namespace {

struct ViewKernel final : KernelData {
  ValueId operand, result;
  const Geometry* geometry;
  bool from_file = false, checked = false;  // a program from a file: in every step, not in the first alone
  void Run(Frame& frame) {
    const c10::Storage& storage = frame.slots[operand].storage();
    frame.slots[result] = checked ? MakeView(storage, *geometry) : MakeCheckedView(storage, *geometry);
    checked = !from_file;
  }
};

struct CopyKernel final : KernelData {
  ValueId source, result;
  const Geometry* geometry;
  bool placed = false;
  Target target;
  void Run(Frame& frame) {
    at::Tensor out = placed ? target.Get(frame) : Allocate(*geometry, frame.device, false);
    out.copy_(frame.slots[source]);
    frame.slots[result] = std::move(out);
  }
};

struct AssignKernel final : KernelData {
  ValueId destination, source;
  void Run(Frame& frame) { frame.slots[destination].copy_(frame.slots[source]); }
};

struct OutputKernel final : KernelData {
  ValueId value;
  std::string name;
  bool persistent;
  void Run(Frame& frame) {
    const at::Tensor& tensor = frame.slots[value];
    // What leaves the step must neither pin a larger storage nor change with the next one.
    const bool owns = !persistent && tensor.storage_offset() == 0 &&
                      tensor.storage().nbytes() <= static_cast<size_t>(tensor.numel()) * tensor.itemsize() + 64;
    ArenaHook::Outside outside;
    frame.outputs[name].emplace(frame.micro_batch, owns ? tensor : tensor.clone());
  }
};

struct GradBeginKernel final : KernelData {
  ValueId result;
  const Geometry* geometry;
  bool placed = false, zero = false;
  Target target;
  std::vector<std::pair<int64_t, int64_t>> gaps;  // byte ranges of padding
  void Run(Frame& frame) {
    at::Tensor flat = placed ? target.Get(frame) : Allocate(*geometry, frame.device, zero && frame.device.is_cpu());
    if (zero && (placed || !frame.device.is_cpu())) {
      flat.zero_();
    } else if (!zero) {
      for (const auto& [begin, end] : gaps) flat.narrow(0, begin, end - begin).zero_();
    }
    frame.slots[result] = std::move(flat);
  }
};

struct OpaqueKernel final : KernelData {
  std::string module, part;
  std::vector<ValueId> operands, results;
  std::vector<const Geometry*> geometry;
  std::vector<at::Tensor> places;  // in the arena
  void Run(Frame& frame) {
    std::vector<at::Tensor> inputs;
    ArenaHook::Outside own_business;
    for (ValueId id : operands) {
      // The module may keep what it gets (for its backward part), longer than the program says.
      const at::Tensor& tensor = frame.slots[id];
      inputs.push_back(ArenaMemory::Holds(tensor.const_data_ptr()) ? tensor.clone() : tensor);
    }
    std::vector<at::Tensor> outputs;
    {
      at::ThreadLocalStateGuard outside(*frame.outer);
      outputs = frame.options->opaque(module, part, inputs);
    }
    TORCH_CHECK(outputs.size() == results.size(), "the module ", module, " gave ", outputs.size(),
                " tensors, its program expects ", results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i] == kNone) continue;
      at::Tensor out = outputs[i].detach();
      TORCH_CHECK(SameSizes(out, *geometry[i]), "result ", i, " of the module ", module, " is ", Describe(out),
                  ", captured as ", Describe(*geometry[i]));
      if (places[i].defined() || !SameStrides(out, *geometry[i]) || out.storage_offset() != 0) {
        at::Tensor own = places[i].defined() ? places[i] : Allocate(*geometry[i], frame.device, false);
        own.copy_(out);
        out = own;
      }
      frame.slots[results[i]] = std::move(out);
    }
  }
};

// The padding of a unit: what no parameter covers, as element ranges.
std::vector<std::pair<int64_t, int64_t>> GapsOf(const BuildContext& context, const Unit& unit) {
  std::vector<std::pair<int64_t, int64_t>> used, gaps;
  for (const Param& p : context.program.params) {
    if (p.unit == unit.id) used.emplace_back(p.unit_offset, p.unit_offset + context.geometry[p.value].elements);
  }
  std::sort(used.begin(), used.end());
  int64_t at = 0;
  for (const auto& [begin, end] : used) {
    if (begin > at) gaps.emplace_back(at, begin);
    at = std::max(at, end);
  }
  if (at < unit.numel) gaps.emplace_back(at, unit.numel);
  return gaps;
}

std::string TextOf(const Arg* arg) {
  return arg ? arg->text : std::string();
}

}  // namespace

Target TargetOf(const BuildContext& context, ValueId placed) {
  Target target;
  target.fixed = context.fixed[placed];
  target.root = context.program.value(placed).root;
  target.geometry = &context.geometry[placed];
  return target;
}

Kernel BuildViewKernel(const BuildContext& context, ValueId operand, ValueId result) {
  if (context.is_fixed(result)) return Kernel{};
  auto kernel = std::make_unique<ViewKernel>();
  kernel->operand = operand;
  kernel->result = result;
  kernel->geometry = &context.geometry[result];
  kernel->from_file = !context.options.captured_here;
  return MakeKernel(std::move(kernel));
}

Error OpError(const BuildContext& context, const Op& op, std::string message) {
  Error error;
  error.message = std::move(message);
  error.where = PrintOp(context.program, op);
  return error;
}

Result<std::vector<ValueId>> OperandsOf(const Op& op) {
  std::vector<ValueId> operands;
  for (const Arg& arg : op.args) {
    if (arg.kind != Arg::Kind::kValue) return MakeError("every operand of ", op.name, " must be a value");
    operands.push_back(arg.value);
  }
  return operands;
}

Result<Kernel> BuildOwnKernel(const BuildContext& context, const Op& op) {
  INTERLACE_ASSIGN(std::vector<ValueId> operands, OperandsOf(op));
  const auto wants = [&](size_t inputs, size_t results) {
    return operands.size() == inputs && op.results.size() == results &&
           std::find(op.results.begin(), op.results.end(), kNone) == op.results.end();
  };
  const Error arity = OpError(context, op, op.name + " has the wrong number of operands or results");
  if (op.kind == OpKind::kView) {
    if (!wants(1, 1)) return arity;
    return BuildViewKernel(context, operands[0], op.results[0]);
  }
  if (op.kind == OpKind::kCopy) {
    if (!wants(1, 1)) return arity;
    auto kernel = std::make_unique<CopyKernel>();
    kernel->source = operands[0];
    kernel->result = op.results[0];
    kernel->geometry = &context.geometry[op.results[0]];
    kernel->placed = context.has_place(op.results[0]);
    if (kernel->placed) kernel->target = TargetOf(context, op.results[0]);
    return MakeKernel(std::move(kernel));
  }
  if (op.kind == OpKind::kAssign) {
    if (!wants(2, 0)) return arity;
    auto kernel = std::make_unique<AssignKernel>();
    kernel->destination = operands[0];
    kernel->source = operands[1];
    return MakeKernel(std::move(kernel));
  }
  if (op.kind == OpKind::kOutput || op.kind == OpKind::kGrad) {
    if (!wants(op.kind == OpKind::kGrad ? 2 : 1, 0)) return arity;
    auto kernel = std::make_unique<OutputKernel>();
    kernel->value = operands.back();
    kernel->persistent = context.is_fixed(context.program.RootOf(operands.back()));
    kernel->name = TextOf(op.Attr("name"));
    if (op.kind == OpKind::kGrad) {
      const Param* param = context.program.ParamOf(operands[0]);
      if (!param) return OpError(context, op, "the first operand of grad must be a parameter");
      kernel->name = "grad." + param->name;
    }
    if (kernel->name.empty()) return OpError(context, op, "output needs a name=\"...\"");
    return MakeKernel(std::move(kernel));
  }
  if (op.kind == OpKind::kGradBegin) {
    if (!wants(0, 1) || op.units.size() != 1)
      return OpError(context, op, "grad.begin takes nothing, gives one flat buffer of one unit");
    auto kernel = std::make_unique<GradBeginKernel>();
    kernel->result = op.results[0];
    kernel->geometry = &context.geometry[op.results[0]];
    kernel->placed = context.has_place(op.results[0]);
    if (kernel->placed) kernel->target = TargetOf(context, op.results[0]);
    const Arg* zero = op.Attr("zero");
    kernel->zero = zero && zero->boolean;
    const Unit& unit = context.program.units[op.units[0]];
    if (kernel->geometry->elements != unit.numel)
      return OpError(context, op, "the buffer must have the unit's padded size");
    kernel->gaps = GapsOf(context, unit);
    return MakeKernel(std::move(kernel));
  }
  if (op.kind == OpKind::kCallPython) {
    if (!context.options.opaque) {
      return OpError(context, op,
                     "an opaque module needs the option `opaque`, a callable (module, part, tensors) → tensors");
    }
    auto kernel = std::make_unique<OpaqueKernel>();
    kernel->module = TextOf(op.Attr("module"));
    kernel->part = TextOf(op.Attr("part"));
    kernel->operands = operands;
    kernel->results = op.results;
    for (ValueId id : op.results) {
      kernel->geometry.push_back(id == kNone ? nullptr : &context.geometry[id]);
      kernel->places.push_back(id == kNone ? at::Tensor() : context.fixed[id]);
    }
    return MakeKernel(std::move(kernel));
  }
  return OpError(context, op, "this runtime does not have the op " + op.name + " yet");
}

Result<Kernel> BuildKernel(const BuildContext& context, const Op& op) {
  switch (TraitsOf(op).family) {
    case OpFamily::kLibrary:
      return BuildAtenKernel(context, op);
    case OpFamily::kRegion:
      return BuildRegionKernel(context, op);
    case OpFamily::kUnit:
    case OpFamily::kCollective:
    case OpFamily::kPeer:
      return BuildCommKernel(context, op);
    case OpFamily::kNorm:
    case OpFamily::kUpdate:
      return BuildUpdateKernel(context, op);
    case OpFamily::kTier:
      return BuildMoveKernel(context, op);
    default:
      if (op.kind == OpKind::kRelease) return Kernel{};  // slots are dropped by the plan's free lists
      return BuildOwnKernel(context, op);
  }
}

}  // namespace interlace
