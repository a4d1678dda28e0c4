// tensors.h — how an op that is carried out later finds its operands: CPU tensors over the bytes of device memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "engine.h"

namespace soft {

// What makes the CPU tensor of an operand, on a worker.
struct Ref {
  bool defined = false;
  void* storage = nullptr;  // as workers see it
  size_t bytes = 0;
  int64_t offset = 0;
  c10::DimVector sizes, strides;
  caffe2::TypeMeta dtype;
  bool conj = false, neg = false;
  at::Tensor host;  // a small CPU tensor, by value
};

bool IsOurs(const at::Tensor& t);
Ref RefOf(const at::Tensor& t);  // of a host tensor: a copy of its values
at::Tensor Alias(const Ref& r);
at::Tensor HostCopy(const at::Tensor& t);
// Adds the bytes from a tensor's first element to its last, if it lies on the device.
void Touch(std::vector<Access>& list, const at::Tensor& t, bool write);
void TouchBytes(std::vector<Access>& list, const at::Tensor& t, bool write);  // wherever it lies
at::Tensor Empty(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

// What the results of an operator will look like: asked once for each kind of call, by a trial on zeros.
struct ResultMeta {
  struct One {
    bool defined = false;
    c10::DimVector sizes, strides;
    c10::ScalarType dtype = c10::kFloat;
  };
  bool list = false;
  std::vector<One> tensors;
};
struct Arg {
  enum Kind { kValue, kTensor, kList, kOptionalList } kind = kValue;
  c10::IValue value;
  std::vector<Ref> refs;
};
void PushArg(torch::jit::Stack& stack, const Arg& arg, const std::vector<at::Tensor>& tensors);
const std::vector<ResultMeta>& ResultsOf(const c10::OperatorHandle& op, const char* name, const std::vector<Arg>& args,
                                         int generator);
at::Generator SeededBy(uint64_t seed);  // a CPU generator

// The boxed kernel of every operator that has no other: the CPU's, as an op of the current stream.
void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace soft
