// The boxed fallback. What a result will be must be known when the op is issued:
//
//   writes its arguments (.out, in place)  the arguments. Structured operators come only so: their functional forms are
//                                          torch's own (CompositeExplicitAutogradNonFunctional): meta, empty, .out
//   a view                                 the kernel runs at once on aliases: it touches no memory
//   another functional operator            a trial (tensors.h)
//   depends on data, or gives a number     the stream is waited for
#include <ATen/Context.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "generator.h"
#include "tensors.h"

namespace soft {

namespace {

using torch::jit::Stack;

struct OpInfo {
  const char* name;
  bool view = false, sync = false;
  bool mixed = false;         // takes indices from the host
  std::vector<char> writes;   // by argument
  std::vector<int> returned;  // by result: the argument that it is, or -1
  int generator = -1;         // the argument
};

OpInfo Describe(const c10::OperatorHandle& op) {
  OpInfo info;
  const auto& schema = op.schema();
  info.name = strdup(c10::toString(op.operator_name()).c_str());  // lives as long as the process
  const std::string& name = op.operator_name().name;
  info.mixed = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& a = schema.arguments()[i];
    info.writes.push_back(a.alias_info() && a.alias_info()->isWrite());
    auto type = a.type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) info.generator = static_cast<int>(i);
  }
  for (const auto& r : schema.returns()) {
    int arg = -1;
    if (r.alias_info()) {
      if (!r.alias_info()->isWrite()) info.view = true;
      for (size_t i = 0; i < schema.arguments().size() && arg < 0; ++i) {
        const auto* a = schema.arguments()[i].alias_info();
        if (a && a->isWrite() && a->beforeSets() == r.alias_info()->beforeSets()) arg = static_cast<int>(i);
      }
    }
    info.returned.push_back(arg);
    const bool tensor =
        r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensor) info.sync = true;
  }
  info.sync = info.sync || op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  return info;
}

const OpInfo& InfoOf(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, OpInfo> infos;
  std::lock_guard lock(mutex);
  const auto it = infos.find(op.operator_name());
  return it != infos.end() ? it->second : infos.emplace(op.operator_name(), Describe(op)).first->second;
}

void Replace(Stack* stack, size_t n, Stack results) {
  stack->erase(stack->end() - static_cast<long>(n), stack->end());
  for (auto& r : results) stack->push_back(std::move(r));
}

void RunView(const c10::OperatorHandle& op, Stack* stack, size_t n) {
  at::AutoDispatchBelowADInplaceOrView below;
  Stack cpu, results;
  at::Tensor base;
  for (size_t i = 0; i < n; ++i) {
    const c10::IValue& v = (*stack)[stack->size() - n + i];
    if (v.isTensor() && v.toTensor().defined()) {
      if (!base.defined()) base = v.toTensor();
      cpu.emplace_back(Alias(RefOf(v.toTensor())));
    } else {
      cpu.push_back(v);
    }
  }
  op.callBoxed(&cpu);
  const auto wrap = [&](const at::Tensor& t) {
    at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                              base.key_set(), t.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return out;
  };
  for (auto& v : cpu) {
    if (v.isTensor()) {
      results.emplace_back(wrap(v.toTensor()));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const auto& t : v.toTensorVector()) list.push_back(wrap(t));
    results.emplace_back(std::move(list));
  }
  Replace(stack, n, std::move(results));
}

Stack AliasStack(const std::vector<Arg>& args) {
  Stack stack;
  for (const Arg& arg : args) {
    std::vector<at::Tensor> tensors;
    for (const Ref& r : arg.refs) tensors.push_back(Alias(r));
    PushArg(stack, arg, tensors);
  }
  return stack;
}

struct Call {
  std::vector<Arg> args;
  std::vector<Access> touched;
};

Call CallOf(const OpInfo& info, const Stack& stack, size_t n) {
  Call call;
  call.args.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const c10::IValue& v = stack[stack.size() - n + i];
    Arg& arg = call.args[i];
    const auto add = [&](const at::Tensor& t) {
      if (t.defined() && !IsOurs(t)) {
        TORCH_CHECK(!info.writes[i], info.name, " on the soft device cannot write a tensor on ", t.device());
        TORCH_CHECK(t.dim() == 0 || info.mixed, info.name, ": an operand is on ", t.device(), ", others on the soft device");
      }
      arg.refs.push_back(RefOf(t));
      Touch(call.touched, t, info.writes[i]);
    };
    if (v.isTensor()) {
      arg.kind = Arg::kTensor;
      add(v.toTensor());
    } else if (v.isTensorList()) {
      arg.kind = Arg::kList;
      for (const auto& t : v.toTensorVector()) add(t);
    } else if (v.isOptionalTensorList()) {
      arg.kind = Arg::kOptionalList;
      for (const auto& t : v.toOptionalTensorVector()) add(t ? *t : at::Tensor());
    } else {
      arg.value = v.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : v;
    }
  }
  if (info.generator >= 0) {
    Engine::Get().RefuseInCapture(CurrentStream(), std::string(info.name) + " takes its seed from the host");
    c10::IValue& v = call.args[static_cast<size_t>(info.generator)].value;
    const at::Generator& g = v.isGenerator() ? v.toGenerator() : at::globalContext().defaultGenerator(c10::kPrivateUse1);
    v = SeededBy(at::check_generator<Generator>(g)->Take());
  }
  return call;
}

Stack RunAndWait(const c10::OperatorHandle& op, const OpInfo& info, Call call) {
  TORCH_CHECK(!Engine::Get().pace(), "soft device, paced: ", info.name, " depends on data, and nothing is computed");
  const int stream = CurrentStream();
  auto given = std::make_shared<Stack>();
  auto args = std::make_shared<std::vector<Arg>>(std::move(call.args));
  Engine::Get().Enqueue(stream, info.name, std::move(call.touched), [op, args, given] {
    Stack cpu = AliasStack(*args);
    op.callBoxed(&cpu);
    *given = std::move(cpu);
    return true;
  });
  Engine::Get().Synchronize(stream);
  Stack results;
  for (auto& v : *given) {
    if (!v.isTensor()) {
      results.push_back(v);
      continue;
    }
    const at::Tensor& t = v.toTensor();
    at::Tensor out = Empty(t.sizes(), t.strides(), t.scalar_type());
    std::vector<Access> writes;
    Touch(writes, out, true);
    Engine::Get().Enqueue(stream, info.name, writes, [t, r = RefOf(out)] {
      Alias(r).copy_(t);
      return true;
    });
    results.emplace_back(out);
  }
  return results;
}

// On a worker.
void CarryOut(const c10::OperatorHandle& op, const OpInfo& info, const std::vector<Arg>& args,
              const std::vector<Ref>& out) {
  Stack cpu = AliasStack(args);
  std::vector<std::pair<at::Tensor, const Ref*>> written;
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.writes[i] && args[i].kind == Arg::kTensor && args[i].refs[0].defined)
      written.emplace_back(cpu[i].toTensor(), &args[i].refs[0]);
  }
  op.callBoxed(&cpu);
  for (const auto& [t, r] : written) {  // some .out kernels resize on their way (mse_loss)
    TORCH_CHECK(t.sizes().equals(r->sizes), "it resized its output to ", t.sizes());
    if (t.storage().data() != r->storage && t.numel() > 0) Alias(*r).copy_(t);
  }
  size_t next = 0;
  const auto put = [&](const at::Tensor& t) {
    const Ref& r = out[next++];
    TORCH_CHECK(r.defined == t.defined() && (!r.defined || t.sizes().equals(r.sizes)),
                "the result is not what the trial said");
    if (r.defined && t.numel() > 0) Alias(r).copy_(t);
  };
  for (size_t i = 0; i < cpu.size(); ++i) {
    if (info.returned[i] >= 0) continue;
    if (cpu[i].isTensor()) {
      put(cpu[i].toTensor());
    } else {
      for (const auto& t : cpu[i].toTensorVector()) put(t);
    }
  }
}

c10::IValue MakeResult(const ResultMeta& meta, std::vector<at::Tensor>& made) {
  c10::List<at::Tensor> list;
  for (const auto& one : meta.tensors) {
    made.push_back(one.defined ? Empty(one.sizes, one.strides, one.dtype) : at::Tensor());
    list.push_back(made.back());
  }
  return meta.list ? c10::IValue(std::move(list)) : c10::IValue(made.back());
}

}  // namespace

void Fallback(const c10::OperatorHandle& op, Stack* stack) {
  const OwnTime own;
  const OpInfo& info = InfoOf(op);
  const size_t n = op.schema().arguments().size();
  if (info.view) return RunView(op, stack, n);
  Call call = CallOf(info, *stack, n);
  if (info.sync) return Replace(stack, n, RunAndWait(op, info, std::move(call)));

  const auto argument = [&](size_t i) -> const c10::IValue& { return (*stack)[stack->size() - n + i]; };
  bool fresh = false, unsized = false;
  for (int r : info.returned) fresh = fresh || r < 0;
  for (size_t i = 0; i < n; ++i) {
    if (info.writes[i] && call.args[i].kind == Arg::kTensor && call.args[i].refs[0].defined)
      unsized = unsized || (argument(i).toTensor().numel() == 0 && op.schema().arguments()[i].kwarg_only());
  }
  std::vector<at::Tensor> made;
  Stack results;
  const std::vector<ResultMeta>* metas = nullptr;
  if (fresh || unsized) metas = &ResultsOf(op, info.name, call.args, info.generator);
  for (size_t i = 0; i < info.returned.size(); ++i) {
    if (info.returned[i] < 0) {
      results.push_back(MakeResult((*metas)[i], made));
      continue;
    }
    const auto at = static_cast<size_t>(info.returned[i]);
    const c10::IValue& v = argument(at);
    if (unsized && v.isTensor()) {
      v.toTensor().resize_((*metas)[i].tensors[0].sizes);
      call.args[at].refs[0] = RefOf(v.toTensor());
      Touch(call.touched, v.toTensor(), true);
    }
    results.push_back(v);
  }
  std::vector<Ref> out;
  for (const at::Tensor& t : made) {
    out.push_back(RefOf(t));
    Touch(call.touched, t, true);
  }
  Engine::Get().Enqueue(CurrentStream(), info.name, std::move(call.touched),
                        [op, &info, args = std::move(call.args), out = std::move(out)] {
                          CarryOut(op, info, args, out);
                          return true;
                        });
  Replace(stack, n, std::move(results));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // The CPU has kernels beside torch's decompositions, which would go before a fallback and give other bits.
  for (const char* name : {"_stack", "_stack.out", "any.dims", "any.dims_out", "all.dims", "all.dims_out",
                           "native_layer_norm", "native_group_norm", "addr", "addr.out", "linalg__powsum",
                           "native_channel_shuffle", "mish_backward", "silu_backward", "convolution", "convolution_backward",
                           // what the runtime that is tested has for devices without the CPU's
                           "_scaled_dot_product_flash_attention_for_cpu",
                           "_scaled_dot_product_flash_attention_for_cpu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  }
}

// Kernels of the runtime that is tested: those for the CPU.
TORCH_LIBRARY_IMPL(interlace, PrivateUse1, m) {
  for (const char* name : {"adam_step_", "sgd_step_", "norm_partial_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&Fallback>());
  }
}

}  // namespace soft
