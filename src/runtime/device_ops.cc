// device_ops.cc — the kernels of our own as operators of torch's dispatcher, `interlace::adam_step_` and the like: a
// backend that has a kernel for one registers it under that name, whatever language it is written in, and others run
// the ATen form (kernels_aten.h). On CPUs the loops are called directly, and by the operator where a backend passes on
// to them.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

using Numbers = c10::ArrayRef<double>;

// numbers: lr, beta1, beta2, eps, weight_decay, t, grad_scale
AdamArgs AdamArgsOf(Numbers n, bool maximize, bool decoupled) {
  TORCH_CHECK(n.size() == 7, "an Adam step takes 7 numbers, not ", n.size());
  return {.lr = n[0],
          .beta1 = n[1],
          .beta2 = n[2],
          .eps = n[3],
          .weight_decay = n[4],
          .t = n[5],
          .maximize = maximize,
          .decoupled = decoupled,
          .grad_scale = n[6]};
}

// numbers: lr, momentum, dampening, weight_decay, t, grad_scale
SgdArgs SgdArgsOf(Numbers n, bool nesterov, bool maximize) {
  TORCH_CHECK(n.size() == 6, "an SGD step takes 6 numbers, not ", n.size());
  return {.lr = n[0],
          .momentum = n[1],
          .dampening = n[2],
          .weight_decay = n[3],
          .t = n[4],
          .nesterov = nesterov,
          .maximize = maximize,
          .grad_scale = n[5]};
}

using Flats = at::TensorList;

void AdamAtenOp(Flats w, Flats g, Flats exp_avg, Flats exp_avg_sq, Numbers numbers, bool maximize, bool decoupled,
                bool consume) {
  const AdamArgs args = AdamArgsOf(numbers, maximize, decoupled);
  AdamStepAten({w.vec(), g.vec(), exp_avg.vec(), exp_avg_sq.vec()}, args, consume);
}
void AdamOp(Flats w, Flats g, Flats exp_avg, Flats exp_avg_sq, Numbers numbers, bool maximize, bool decoupled,
            bool /*consume*/) {
  const AdamArgs args = AdamArgsOf(numbers, maximize, decoupled);
  for (size_t i = 0; i < w.size(); ++i) AdamStep(w[i], g[i], exp_avg[i], exp_avg_sq[i], args);
}

template <auto kStep>
void SgdOp(const at::Tensor& w, const at::Tensor& g, const std::optional<at::Tensor>& momentum, Numbers numbers,
           bool nesterov, bool maximize) {
  kStep(w, g, momentum.value_or(at::Tensor()), SgdArgsOf(numbers, nesterov, maximize));
}

void NormPartialAtenOp(const at::Tensor& flat, const at::Tensor& acc) {
  NormPartialAten(flat, acc);
}
void NormPartialOp(const at::Tensor& flat, const at::Tensor& acc) {
  NormPartial(flat, acc);
}

TORCH_LIBRARY(interlace, m) {
  m.def(
      "adam_step_(Tensor(a!)[] w, Tensor(b!)[] g, Tensor(c!)[] exp_avg, Tensor(d!)[] exp_avg_sq, float[] numbers, "
      "bool maximize, bool decoupled, bool consume) -> ()");
  m.def("sgd_step_(Tensor(a!) w, Tensor g, Tensor(b!)? momentum, float[] numbers, bool nesterov, bool maximize) -> ()");
  m.def("norm_partial_(Tensor flat, Tensor(a!) acc) -> ()");
}

TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("adam_step_", &AdamAtenOp);
  m.impl("sgd_step_", &SgdOp<SgdStepAten>);
  m.impl("norm_partial_", &NormPartialAtenOp);
}

TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("adam_step_", &AdamOp);
  m.impl("sgd_step_", &SgdOp<SgdStep>);
  m.impl("norm_partial_", &NormPartialOp);
}

template <typename Signature>
auto Operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void AdamStepOnDevice(const AdamFlats& flats, const AdamArgs& a, bool consume) {
  static const auto op = Operator<decltype(AdamOp)>("interlace::adam_step_");
  const double numbers[] = {a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.t, a.grad_scale};
  op.call(flats.w, flats.g, flats.exp_avg, flats.exp_avg_sq, numbers, a.maximize, a.decoupled, consume);
}

void SgdStepOnDevice(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& a) {
  static const auto op = Operator<decltype(SgdOp<SgdStep>)>("interlace::sgd_step_");
  const double numbers[] = {a.lr, a.momentum, a.dampening, a.weight_decay, a.t, a.grad_scale};
  op.call(w, g, momentum.defined() ? std::optional(momentum) : std::nullopt, numbers, a.nesterov, a.maximize);
}

void NormPartialOnDevice(const at::Tensor& flat, const at::Tensor& acc) {
  static const auto op = Operator<decltype(NormPartialOp)>("interlace::norm_partial_");
  op.call(flat, acc);
}

}  // namespace interlace
