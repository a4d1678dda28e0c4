// kernels.h — the CPU kernels of our own: flat optimizers, the exact norm, and two backward kernels that write
// gradients straight into a unit's flat buffer. On other devices the same functions run as a few ATen calls. All are
// elementwise or have a fixed order, so their bits depend on nothing but the data. One thread's work is split over
// at::parallel_for where that changes no bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "base/result.h"
#include "ir/rule.h"

namespace interlace {

// The form of a kernel for a floating dtype; nullptr for others.
template <typename F>
F FormFor(at::ScalarType dtype, F f64, F f32, F f16, F bf16) {
  switch (dtype) {
    case at::kDouble:
      return f64;
    case at::kFloat:
      return f32;
    case at::kHalf:
      return f16;
    case at::kBFloat16:
      return bf16;
    default:
      return nullptr;
  }
}

// Adam family; the formulas of torch.optim (fused=True). t counts from 1. grad is multiplied by grad_scale first.
struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay, t;
  bool maximize, decoupled; /* AdamW */
  double grad_scale;
};
struct SgdArgs {
  double lr, momentum, dampening, weight_decay, t;
  bool nesterov, maximize;
  double grad_scale;
};

// All tensors: flat, contiguous, same length; any floating dtype, arithmetic in float32 for 16-bit types, else in their
// own.
void AdamStep(const at::Tensor& w, const at::Tensor& g, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
              const AdamArgs& args);
// momentum may be undefined.
void SgdStep(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& args);

// What a rule's form is compiled to (ir/rule_loop.h): flats, numbers, the gradient's scale, elements [begin, end).
using RuleLoop = void (*)(char* const*, const double*, double, int64_t, int64_t);
// A captured step (ir/rule.h): `flats` are weights, gradient and states, `numbers` those of the form. With the form's
// loop, if there is one, on CPUs; the bits are the same.
void RuleStep(const RuleForm& form, std::span<const at::Tensor> flats, std::span<const double> numbers,
              double grad_scale, RuleLoop loop = nullptr);

// acc (int64[kNormLimbs]) += exact fixed-point sum of the squares of flat, block sums of 32 elements in float64
// (docs/ir.md).
void NormPartial(const at::Tensor& flat, const at::Tensor& acc);
// out (float64[3]) = {norm * scale, min(1, max_norm / (norm * scale + 1e-6)) or 1 when max_norm < 0, 1 if finite else
// 0}, of gradients that are loss_scale times too large: the norm is of what they should be, and the coefficient makes
// them that. Returned as well, in the host's memory: for them the host waits for a device, once.
at::Tensor NormCoef(const at::Tensor& acc, double max_norm, double scale, const at::Tensor& out, double loss_scale = 1);

// The bits of aten::embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq), written to
// out. Returns false when the case is not covered (the caller then computes and copies).
bool EmbeddingBackwardInto(const at::Tensor& grad, const at::Tensor& indices, int64_t num_weights, int64_t padding_idx,
                           bool scale_grad_by_freq, const at::Tensor& out);
// The bits of aten::native_layer_norm_backward's weight and bias gradients, written to dweight and dbias (either may be
// undefined); dx is returned when wanted, else undefined. Returns false when the case is not covered.
bool LayerNormBackwardInto(const at::Tensor& grad, const at::Tensor& input, int64_t normalized_numel,
                           const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                           const at::Tensor& dx, const at::Tensor& dweight, const at::Tensor& dbias);

}  // namespace interlace
