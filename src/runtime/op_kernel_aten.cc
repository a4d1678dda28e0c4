// Kernels of torch's operators: a stack filled by a short list of pushes, one boxed call of the backend kernel below
// autograd. Placed results go through the operator's `.out` form, through a kernel of our own, or are computed and
// copied (and counted).
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "ir/op_table.h"
#include "runtime/allocator.h"
#include "runtime/kernels.h"
#include "runtime/op_kernel.h"
#include "runtime/op_schema.h"
#include "runtime/own_operators.h"

namespace interlace {

namespace {

struct ResultSlot {
  ValueId value = kNone;
  const Geometry* geometry = nullptr;
  bool owned = true;        // it must be fresh memory in the declared layout: programs compute views from it
  bool placed = false;      // there is a place to write to
  bool into = false;        // that of another value; else its own, in the arena
  bool fix_layout = false;  // the kernel's layout is not the declared one: copy (found in the first run)
  Target target;
};

c10::IValue MakeList(const std::vector<ValueId>& ids, bool optional, const Frame& frame) {
  if (optional) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(ids.size());
    for (ValueId id : ids) list.push_back(id == kNone ? std::nullopt : std::optional<at::Tensor>(frame.slots[id]));
    return c10::IValue(std::move(list));
  }
  c10::List<at::Tensor> list;
  list.reserve(ids.size());
  for (ValueId id : ids) list.push_back(frame.slots[id]);
  return c10::IValue(std::move(list));
}

// Operators whose `.out` form does not keep to the output it is given; more are found in the first step of a program.
class PlainForms {
 public:
  static bool Has(const std::string& name) {
    const std::lock_guard lock(Mutex());
    return Names().contains(name);
  }
  static void Add(const std::string& name) {
    const std::lock_guard lock(Mutex());
    Names().insert(name);
  }

 private:
  static std::mutex& Mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::unordered_set<std::string>& Names() {
    static std::unordered_set<std::string> names = {"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"};
    return names;
  }
};

struct AtenKernel final : KernelData {
  BoundCall call;
  std::vector<ResultSlot> results;
  bool list_result = false;
  bool checked = false;
  bool from_file = false;                         // results are looked at in every step, not in the first alone
  bool into_target = false;                       // call is the `.out` form, its last push the target of results[0]
  std::optional<c10::OperatorHandle> functional;  // into_target: to be called once, as it shows the type of the result
  int64_t rng = 0, micro = 0;
  bool seeds_default = false;  // random, but without a generator argument
  int hosted = -1;             // which argument the operator reads on the host

  void Run(Frame& frame) {
    if (!call.value_checks.empty()) CheckValues(frame, call.value_checks);
    auto& stack = frame.stack;
    stack.clear();  // an op that failed may have left something
    at::Tensor target;
    for (const Push& push : call.pushes) {
      switch (push.kind) {
        case Push::Kind::kConst:
          stack.push_back(call.constants[push.index]);
          break;
        case Push::Kind::kSlot:
          stack.emplace_back(frame.slots[push.index]);
          break;
        case Push::Kind::kMoveSlot:
          stack.emplace_back(std::move(frame.slots[push.index]));
          break;
        case Push::Kind::kTensorList:
          stack.push_back(MakeList(call.lists[push.index], false, frame));
          break;
        case Push::Kind::kOptionalTensorList:
          stack.push_back(MakeList(call.lists[push.index], true, frame));
          break;
        case Push::Kind::kGenerator:
          stack.emplace_back(frame.random->For(rng, micro));
          break;
        case Push::Kind::kTarget:
          target = results[0].target.Get(frame);
          stack.emplace_back(target);
          break;
      }
    }
    if (hosted >= 0) stack[hosted] = stack[hosted].toTensor().cpu();
    if (functional) CheckType(frame, target);
    if (seeds_default) {
      KeyedRandom::DefaultScope scope(*frame.random, rng, micro);
      call.op->redispatchBoxed(frame.keys, &stack);
    } else {
      call.op->redispatchBoxed(frame.keys, &stack);
    }
    if (into_target) {
      if (!checked) CheckTarget(target);
      if (results[0].into) frame.counters.placed_bytes += static_cast<int64_t>(target.nbytes());
      frame.slots[results[0].value] = std::move(target);
      stack.clear();
      return;
    }
    if (list_result) {
      const c10::List<at::Tensor> list = stack[0].toTensorList();
      TORCH_CHECK(list.size() == results.size(), "it gave ", list.size(), " tensors, the program expects ",
                  results.size());
      for (size_t i = 0; i < results.size(); ++i) Store(frame, results[i], list.get(i));
    } else {
      for (size_t i = 0; i < results.size(); ++i) Store(frame, results[i], std::move(stack[i]).toTensor());
    }
    checked = !from_file;
    stack.clear();
  }

  void Store(Frame& frame, ResultSlot& result, at::Tensor tensor) {
    if (result.value == kNone) return;
    if (hosted >= 0) tensor = tensor.to(frame.device);
    if (!checked) Check(result, tensor);
    if (result.placed) {
      at::Tensor target = result.target.Get(frame);
      const bool same_layout = !result.into && tensor.strides() == target.strides() && tensor.storage_offset() == 0;
      // Served by the hook at the result's own place, it is there already.
      if (!same_layout || tensor.const_data_ptr() != target.const_data_ptr()) {
        if (same_layout) ArenaHook::IsResult(tensor.const_data_ptr(), target.const_data_ptr());
        target.copy_(tensor);
        if (result.into) frame.counters.copied_bytes += static_cast<int64_t>(target.nbytes());
      }
      tensor = std::move(target);
    } else if (result.fix_layout) {
      at::Tensor own = Allocate(*result.geometry, frame.device, false);
      own.copy_(tensor);
      tensor = std::move(own);
    }
    frame.slots[result.value] = std::move(tensor);
  }

  static void Check(ResultSlot& result, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.defined(), "%", result.value, " is undefined; the program says ", Describe(*result.geometry));
    TORCH_CHECK(SameSizes(tensor, *result.geometry), "%", result.value, " is ", Describe(tensor), "; the program says ",
                Describe(*result.geometry));
    if (result.owned && !result.placed) {
      result.fix_layout = !SameStrides(tensor, *result.geometry) || tensor.storage_offset() != 0;
    }
  }

  // The `.out` form would convert to whatever the program says; the plain one, run once, says what the operator gives.
  // (Meta kernels would say so without computing, but Python replaces them.) Some `.out` forms resize their output on
  // the way (mse_loss, to the size before the mean): the plain form stays.
  void CheckType(Frame& frame, const at::Tensor& target) {
    ArenaHook::Outside once;
    torch::jit::Stack stack(frame.stack.begin(), frame.stack.end() - 1);
    torch::jit::Stack trial = stack;
    functional->redispatchBoxed(frame.keys, &stack);
    Check(results[0], stack[0].toTensor());
    TORCH_CHECK(target.sizes() == stack[0].toTensor().sizes(), "the program's sizes are not those of the result");
    if (!KeepsItsOutput(frame, target, std::move(trial))) {
      PlainForms::Add(functional->operator_name().name);
      call.op = std::move(functional);
      call.pushes.pop_back();
      into_target = false;
      frame.stack.pop_back();
    }
    functional.reset();
  }

  bool KeepsItsOutput(Frame& frame, const at::Tensor& target, torch::jit::Stack stack) const {
    const at::Tensor trial = at::empty_strided(target.sizes(), target.strides(), target.options());
    const void* place = trial.const_data_ptr();
    stack.emplace_back(trial);
    try {
      call.op->redispatchBoxed(frame.keys, &stack);
    } catch (const c10::Error&) {
      return false;
    }
    return trial.const_data_ptr() == place && trial.sizes() == target.sizes() && trial.strides() == target.strides();
  }

  void CheckTarget(const at::Tensor& target) {
    TORCH_CHECK(SameSizes(target, *results[0].geometry) && SameStrides(target, *results[0].geometry),
                "the operator resized its output; the program says ", Describe(*results[0].geometry));
    checked = !from_file;
  }
};

// Placed copies and casts: the write into the place is the op itself.
struct PlacedCopyKernel final : KernelData {
  ValueId source;
  ResultSlot result;
  void Run(Frame& frame) {
    at::Tensor target = result.target.Get(frame);
    target.copy_(frame.slots[source]);
    if (result.into) frame.counters.placed_bytes += static_cast<int64_t>(target.nbytes());
    frame.slots[result.value] = std::move(target);
  }
};

// aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq), placed.
struct EmbeddingBackwardKernel final : KernelData {
  ValueId grad, indices;
  int64_t num_weights, padding_idx;
  bool scale_by_frequency;
  ResultSlot result;
  std::unique_ptr<AtenKernel> otherwise;
  void Run(Frame& frame) {
    at::Tensor target = result.target.Get(frame);
    if (!EmbeddingBackwardInto(frame.slots[grad], frame.slots[indices], num_weights, padding_idx, scale_by_frequency,
                               target)) {
      return otherwise->Run(frame);
    }
    if (result.into) frame.counters.placed_bytes += static_cast<int64_t>(target.nbytes());
    frame.slots[result.value] = std::move(target);
  }
};

// aten.native_layer_norm_backward(grad, input, normalized_shape, mean, rstd, weight, bias, mask) with placed weight or
// bias gradients.
struct LayerNormBackwardKernel final : KernelData {
  ValueId grad, input, mean, rstd, weight;
  int64_t normalized_numel;
  ResultSlot results[3];
  std::unique_ptr<AtenKernel> otherwise;
  at::Tensor OutputOf(Frame& frame, const ResultSlot& result) const {
    if (result.value == kNone) return {};
    return result.placed ? result.target.Get(frame) : Allocate(*result.geometry, frame.device, false);
  }
  void Run(Frame& frame) {
    at::Tensor outs[3];
    for (int i = 0; i < 3; ++i) outs[i] = OutputOf(frame, results[i]);
    const at::Tensor scale = weight == kNone ? at::Tensor() : frame.slots[weight];
    if (!LayerNormBackwardInto(frame.slots[grad], frame.slots[input], normalized_numel, frame.slots[mean],
                               frame.slots[rstd], scale, outs[0], outs[1], outs[2])) {
      return otherwise->Run(frame);
    }
    for (int i = 0; i < 3; ++i) {
      if (results[i].value == kNone) continue;
      if (results[i].into) frame.counters.placed_bytes += static_cast<int64_t>(outs[i].nbytes());
      frame.slots[results[i].value] = std::move(outs[i]);
    }
  }
};

ResultSlot ResultSlotOf(const BuildContext& context, ValueId id) {
  ResultSlot slot;
  slot.value = id;
  if (id == kNone) return slot;
  const Value& value = context.program.value(id);
  slot.geometry = &context.geometry[id];
  slot.placed = context.has_place(id);
  slot.into = value.placed;
  slot.owned = value.root == id;
  if (slot.placed) slot.target = TargetOf(context, id);
  return slot;
}

ValueId ValueArg(const Op& op, size_t i) {
  return i < op.args.size() && op.args[i].kind == Arg::Kind::kValue ? op.args[i].value : kNone;
}

bool IsInt(const Op& op, size_t i) {
  return i < op.args.size() && op.args[i].kind == Arg::Kind::kInt;
}

// One of our own backward kernels around `boxed`, or nullopt when the op is none of them.
std::optional<Kernel> OwnBackwardKernel(const Op& op, std::unique_ptr<AtenKernel>& boxed) {
  if (op.name == "aten.embedding_dense_backward" && boxed->results.size() == 1 && op.args.size() == 5 &&
      op.named.empty() && ValueArg(op, 0) != kNone && ValueArg(op, 1) != kNone && IsInt(op, 2) && IsInt(op, 3)) {
    auto kernel = std::make_unique<EmbeddingBackwardKernel>();
    kernel->grad = ValueArg(op, 0);
    kernel->indices = ValueArg(op, 1);
    kernel->num_weights = op.args[2].integer.value;
    kernel->padding_idx = op.args[3].integer.value;
    kernel->scale_by_frequency = op.args[4].boolean;
    kernel->result = boxed->results[0];
    kernel->otherwise = std::move(boxed);
    return MakeKernel(std::move(kernel));
  }
  if (op.name == "aten.native_layer_norm_backward" && boxed->results.size() == 3 && op.args.size() == 8 &&
      op.named.empty() && op.args[2].kind == Arg::Kind::kList && ValueArg(op, 0) != kNone && ValueArg(op, 1) != kNone &&
      ValueArg(op, 3) != kNone && ValueArg(op, 4) != kNone) {
    auto kernel = std::make_unique<LayerNormBackwardKernel>();
    kernel->grad = ValueArg(op, 0);
    kernel->input = ValueArg(op, 1);
    kernel->mean = ValueArg(op, 3);
    kernel->rstd = ValueArg(op, 4);
    kernel->weight = ValueArg(op, 5);
    kernel->normalized_numel = 1;
    for (const Arg& size : op.args[2].list) kernel->normalized_numel *= size.integer.value;
    for (int i = 0; i < 3; ++i) kernel->results[i] = boxed->results[i];
    kernel->otherwise = std::move(boxed);
    return MakeKernel(std::move(kernel));
  }
  return std::nullopt;
}

// Several views made at once (split, unbind) of what has its place: they are there already.
bool OnlyKnownViews(const BuildContext& context, const Op& op) {
  if (op.results.empty() || !op.writes.empty()) return false;
  for (ValueId id : op.results) {
    if (id == kNone) continue;
    const Value& value = context.program.value(id);
    if (value.placed || value.root == id || !context.is_fixed(id)) return false;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema(OperatorNameOf(op.name));
  return handle && !handle->schema().is_mutable();
}

// Operators that only make another view (transpose, reshape in place, slice): the program knows the geometry, so
// nothing is called. Returns the operand to view, or kNone when the op does more.
ValueId PureViewOperand(const BuildContext& context, const Op& op) {
  if (op.results.size() != 1 || op.results[0] == kNone || !op.writes.empty() || ValueArg(op, 0) == kNone) return kNone;
  const Value& result = context.program.value(op.results[0]);
  if (result.placed || result.root == result.id || context.program.RootOf(ValueArg(op, 0)) != result.root) return kNone;
  const auto handle = c10::Dispatcher::singleton().findSchema(OperatorNameOf(op.name));
  return handle && !handle->schema().is_mutable() ? ValueArg(op, 0) : kNone;
}

}  // namespace

int HostedOf(const Op& op) {
  if (op.name == "aten._pack_padded_sequence" || op.name == "aten._pad_packed_sequence") return 1;
  return op.name == "aten._pack_padded_sequence_backward" ? 2 : -1;
}

Result<Kernel> BuildAtenKernel(const BuildContext& context, const Op& op) {
  if (const ValueId operand = PureViewOperand(context, op); operand != kNone) {
    return BuildViewKernel(context, operand, op.results[0]);
  }
  if (OnlyKnownViews(context, op)) return Kernel{};
  auto kernel = std::make_unique<AtenKernel>();
  bool any_placed = false;
  for (ValueId id : op.results) {
    kernel->results.push_back(ResultSlotOf(context, id));
    any_placed = any_placed || kernel->results.back().placed;
  }
  if (any_placed && (op.name == "aten.clone" || op.name == "aten._to_copy") && op.args.size() == 1 &&
      ValueArg(op, 0) != kNone) {
    auto copy = std::make_unique<PlacedCopyKernel>();
    copy->source = ValueArg(op, 0);
    copy->result = kernel->results[0];
    return MakeKernel(std::move(copy));
  }

  BuildContext careful = context;
  const bool own_backward =
      any_placed && (op.name == "aten.embedding_dense_backward" || op.name == "aten.native_layer_norm_backward");
  if (own_backward)
    careful.dies_here = [](ValueId) { return false; };  // operands are read before the fallback may move them
  INTERLACE_ASSIGN(kernel->call, BindCall(careful, op));

  if (const char* own = OwnOperator(context, op)) {
    kernel->call.op = c10::Dispatcher::singleton().findSchemaOrThrow(own, "");
  }

  const c10::FunctionSchema& schema = kernel->call.op->schema();
  kernel->list_result = schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
  for (const c10::Argument& result : schema.returns()) {
    if (!kernel->list_result && result.type()->kind() != c10::TypeKind::TensorType) {
      return OpError(context, op, "an operator whose result is no tensor cannot be in a program");
    }
  }
  if (!kernel->list_result && kernel->results.size() > schema.returns().size()) {
    return OpError(context, op, "the operator gives only " + std::to_string(schema.returns().size()) + " results");
  }
  kernel->from_file = !context.options.captured_here;
  kernel->hosted = HostedOf(op);
  kernel->rng = op.rng.value_or(0);
  kernel->micro = MicroBatchOf(op);
  kernel->seeds_default = op.rng && context.options.keyed_random && !kernel->call.takes_generator;

  if (any_placed && kernel->results.size() == 1) {
    const bool plain = !kernel->results[0].into && PlainForms::Has(kernel->call.op->operator_name().name);
    if (const auto out = plain ? std::nullopt : FindOutForm(*kernel->call.op)) {
      if (!kernel->results[0].into && !context.types_checked && !op.rng && !kernel->call.takes_generator)
        kernel->functional = kernel->call.op;  // one that draws would draw twice
      kernel->call.op = out;
      kernel->call.pushes.push_back({Push::Kind::kTarget, 0});
      kernel->into_target = true;
      return MakeKernel(std::move(kernel));
    }
  }
  if (own_backward) {
    if (auto own = OwnBackwardKernel(op, kernel)) return std::move(*own);
  }
  return MakeKernel(std::move(kernel));
}

}  // namespace interlace
