#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <sstream>
#include <thread>
#include <unordered_map>

#include "memory.h"

namespace soft {

bool IsOurs(const at::Tensor& t) { return t.defined() && t.device().type() == c10::kPrivateUse1; }

namespace {
int64_t SpanOf(const at::Tensor& t) {
  int64_t span = 1;
  for (int64_t d = 0; d < t.dim(); ++d) span += (t.size(d) - 1) * t.stride(d);
  return span;
}
}  // namespace

at::Tensor HostCopy(const at::Tensor& t) {
  at::Tensor copy = at::Tensor(at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()));
  if (t.numel() > 0)
    std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), static_cast<size_t>(SpanOf(t)) * t.itemsize());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Ref RefOf(const at::Tensor& t) {
  Ref r;
  if (!t.defined()) return r;
  r.defined = true;
  r.dtype = t.dtype();
  r.sizes = t.sizes();
  r.strides = t.strides();
  if (!IsOurs(t)) {
    r.host = HostCopy(t);
    return r;
  }
  const void* p = t.storage().data();
  r.storage = p ? Real(p) : nullptr;
  r.bytes = t.storage().nbytes();
  r.offset = t.storage_offset();
  r.conj = t.is_conj(), r.neg = t.is_neg();
  return r;
}

at::Tensor Alias(const Ref& r) {
  if (!r.defined || r.host.defined()) return r.host;
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), r.bytes,
                                                       c10::DataPtr(r.storage, c10::kCPU), c10::GetCPUAllocator(), true);
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), r.dtype);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes, r.strides, r.offset);
  if (r.conj) t._set_conj(true);
  if (r.neg) t._set_neg(true);
  return t;
}

void TouchBytes(std::vector<Access>& list, const at::Tensor& t, bool write) {
  if (t.numel() == 0 || !t.storage().data()) return;
  const auto size = static_cast<int64_t>(t.itemsize());
  const char* begin = static_cast<const char*>(t.storage().data()) + t.storage_offset() * size;
  list.push_back({begin, begin + SpanOf(t) * size, write});
}
void Touch(std::vector<Access>& list, const at::Tensor& t, bool write) {
  if (IsOurs(t)) TouchBytes(list, t, write);
}

at::Tensor Empty(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, AskedAllocator(), keys, dtype));
}

void PushArg(torch::jit::Stack& stack, const Arg& arg, const std::vector<at::Tensor>& tensors) {
  switch (arg.kind) {
    case Arg::kValue:
      stack.push_back(arg.value);
      break;
    case Arg::kTensor:
      stack.emplace_back(tensors[0]);
      break;
    case Arg::kList:
      stack.emplace_back(c10::List<at::Tensor>(tensors));
      break;
    case Arg::kOptionalList: {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : tensors) list.push_back(t.defined() ? std::optional(t) : std::nullopt);
      stack.emplace_back(std::move(list));
      break;
    }
  }
}

at::Generator SeededBy(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

namespace {

ResultMeta MetaOf(const c10::IValue& v) {
  ResultMeta result;
  const auto add = [&](const at::Tensor& t) {
    ResultMeta::One one;
    if (t.defined()) one = {true, c10::DimVector(t.sizes()), c10::DimVector(t.strides()), t.scalar_type()};
    result.tensors.push_back(std::move(one));
  };
  if (v.isTensor()) {
    add(v.toTensor());
  } else {
    result.list = true;
    for (const auto& t : v.toTensorVector()) add(t);
  }
  return result;
}

template <typename T>
void AddKey(std::string& key, const T& x) {
  key.append(reinterpret_cast<const char*>(&x), sizeof x);
}

std::string KeyOf(const char* name, const std::vector<Arg>& args) {
  std::string key(name);
  for (const Arg& arg : args) {
    key.push_back(static_cast<char>(arg.kind));
    if (arg.kind == Arg::kValue) {
      const c10::IValue& v = arg.value;
      if (v.isNone()) {
        key.push_back('n');
      } else if (v.isInt()) {
        AddKey(key, v.toInt());
      } else if (v.isDouble()) {
        AddKey(key, v.toDouble());
      } else if (v.isGenerator()) {
        key.push_back('g');
      } else {
        std::ostringstream s;
        s << v;
        key += s.str();
      }
      continue;
    }
    AddKey(key, arg.refs.size());
    for (const Ref& r : arg.refs) {
      AddKey(key, r.defined);
      if (!r.defined) continue;
      key.push_back(static_cast<char>(r.dtype.toScalarType()));
      AddKey(key, r.sizes.size());
      for (int64_t s : r.sizes) AddKey(key, s);
      for (int64_t s : r.strides) AddKey(key, s);
    }
  }
  return key;
}

// In a thread of its own: nothing of the caller's thread state may count.
std::vector<ResultMeta> Trial(const c10::OperatorHandle& op, const char* name, const std::vector<Arg>& args,
                              int generator) {
  std::vector<ResultMeta> result;
  std::string error;
  std::thread([&] {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      torch::jit::Stack stack;
      for (size_t i = 0; i < args.size(); ++i) {
        std::vector<at::Tensor> tensors;
        for (const Ref& r : args[i].refs) {
          at::Tensor t = r.host;
          if (r.defined && !t.defined()) {
            t = at::Tensor(at::detail::empty_strided_cpu(r.sizes, r.strides, r.dtype.toScalarType()));
            std::memset(t.mutable_data_ptr(), 0, t.storage().nbytes());
          }
          tensors.push_back(std::move(t));
        }
        if (static_cast<int>(i) == generator) {
          stack.emplace_back(SeededBy(0));
        } else {
          PushArg(stack, args[i], tensors);
        }
      }
      op.callBoxed(&stack);
      for (const auto& v : stack) result.push_back(MetaOf(v));
    } catch (const std::exception& e) {
      error = e.what();
    }
  }).join();
  TORCH_CHECK(error.empty(), "soft device: a trial of ", name, " on zeros failed: ", error);
  return result;
}

}  // namespace

const std::vector<ResultMeta>& ResultsOf(const c10::OperatorHandle& op, const char* name, const std::vector<Arg>& args,
                                         int generator) {
  static std::unordered_map<std::string, std::vector<ResultMeta>> known;
  static std::mutex mutex;
  const std::string key = KeyOf(name, args);
  {
    std::lock_guard lock(mutex);
    if (const auto it = known.find(key); it != known.end()) return it->second;
  }
  std::vector<ResultMeta> found = Trial(op, name, args, generator);
  std::lock_guard lock(mutex);
  return known.try_emplace(key, std::move(found)).first->second;
}

}  // namespace soft
