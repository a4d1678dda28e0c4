// kernels_optimizer.cc — AdamW, Adam and SGD over a flat shard in one pass: every element is read and written once.
// The formulas are those of torch.optim with fused=True, operation by operation, without contraction into fused
// multiply-adds; so the bits do not depend on the machine, and differ from torch's own (which contracts) by rounding
// only.
#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/clones.h"
#include "runtime/kernel_loops.h"
#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

inline float Sqrt(float x) {
  return __builtin_sqrtf(x);
}
inline double Sqrt(double x) {
  return __builtin_sqrt(x);
}

// All that does not depend on the element, computed in double as torch does.
struct AdamConstants {
  double grad_scale, decay, first_weight, beta2, second_weight, bias2_sqrt, eps, minus_step;
  bool decoupled;
};

AdamConstants ConstantsOf(const AdamArgs& a) {
  const double bias1 = 1 - std::pow(a.beta1, a.t), bias2 = 1 - std::pow(a.beta2, a.t);
  return {.grad_scale = a.maximize ? -a.grad_scale : a.grad_scale,
          .decay = a.decoupled ? 1 - a.lr * a.weight_decay : a.weight_decay,
          .first_weight = 1 - a.beta1,
          .beta2 = a.beta2,
          .second_weight = 1 - a.beta2,
          .bias2_sqrt = std::sqrt(bias2),
          .eps = a.eps,
          .minus_step = -(a.lr / bias1),
          .decoupled = a.decoupled};
}

template <typename T, bool kDecoupled, bool kSmallWeight>
[[gnu::always_inline]] inline void AdamLoop(T* __restrict w, const T* __restrict g, T* __restrict exp_avg,
                                            T* __restrict exp_avg_sq, const AdamConstants& c, int64_t n) {
  const T scale = T(c.grad_scale), decay = T(c.decay), beta2 = T(c.beta2), second = T(c.second_weight);
  const T bias2_sqrt = T(c.bias2_sqrt), eps = T(c.eps), minus_step = T(c.minus_step);
  // torch's lerp: from the nearer end.
  const T first = kSmallWeight ? T(c.first_weight) : T(c.first_weight) - T(1);
  for (int64_t i = 0; i < n; ++i) {
    T weight = w[i];
    T grad = g[i] * scale;
    if constexpr (kDecoupled) {
      weight = weight * decay;
    } else {
      grad = grad + weight * decay;
    }
    const T old = exp_avg[i];
    const T mean = (kSmallWeight ? old : grad) + first * (grad - old);
    const T square = exp_avg_sq[i] * beta2 + second * grad * grad;
    exp_avg[i] = mean;
    exp_avg_sq[i] = square;
    w[i] = weight + minus_step * mean / (Sqrt(square) / bias2_sqrt + eps);
  }
}

template <typename T>
[[gnu::always_inline]] inline void AdamSpan(T* w, const T* g, T* m, T* v, const AdamConstants& c, int64_t n) {
  const bool small = std::abs(T(c.first_weight)) < T(0.5);
  if (c.decoupled) {
    small ? AdamLoop<T, true, true>(w, g, m, v, c, n) : AdamLoop<T, true, false>(w, g, m, v, c, n);
  } else {
    small ? AdamLoop<T, false, true>(w, g, m, v, c, n) : AdamLoop<T, false, false>(w, g, m, v, c, n);
  }
}

// 16-bit elements go through float32 in pieces that stay in the first-level cache.
constexpr int64_t kPiece = 512;

template <typename T>
[[gnu::always_inline]] inline void AdamAny(void* w_data, const void* g_data, void* m_data, void* v_data,
                                           const AdamConstants& c, int64_t begin, int64_t end) {
  T* w = static_cast<T*>(w_data) + begin;
  const T* g = static_cast<const T*>(g_data) + begin;
  T* m = static_cast<T*>(m_data) + begin;
  T* v = static_cast<T*>(v_data) + begin;
  if constexpr (sizeof(T) > 2) {
    AdamSpan<T>(w, g, m, v, c, end - begin);
  } else {
    float wide_w[kPiece], wide_g[kPiece], wide_m[kPiece], wide_v[kPiece];
    for (; begin < end; begin += kPiece, w += kPiece, g += kPiece, m += kPiece, v += kPiece) {
      const int64_t n = std::min(kPiece, end - begin);
      Convert(w, wide_w, n), Convert(g, wide_g, n), Convert(m, wide_m, n), Convert(v, wide_v, n);
      AdamSpan<float>(wide_w, wide_g, wide_m, wide_v, c, n);
      Convert(wide_w, w, n), Convert(wide_m, m, n), Convert(wide_v, v, n);
    }
  }
}

struct SgdConstants {
  double grad_scale, weight_decay, momentum, undamped, minus_lr;
  bool first, nesterov;
};

template <typename T, bool kMomentum, bool kFirst, bool kNesterov>
[[gnu::always_inline]] inline void SgdLoop(T* __restrict w, const T* __restrict g, T* __restrict buffer,
                                           const SgdConstants& c, int64_t n) {
  const T scale = T(c.grad_scale), decay = T(c.weight_decay), momentum = T(c.momentum), undamped = T(c.undamped);
  const T minus_lr = T(c.minus_lr);
  for (int64_t i = 0; i < n; ++i) {
    const T weight = w[i];
    T grad = g[i] * scale + weight * decay;
    if constexpr (kMomentum) {
      const T velocity = kFirst ? grad : buffer[i] * momentum + grad * undamped;
      buffer[i] = velocity;
      grad = kNesterov ? grad + velocity * momentum : velocity;
    }
    w[i] = weight + grad * minus_lr;
  }
}

template <typename T>
[[gnu::always_inline]] inline void SgdSpan(T* w, const T* g, T* buffer, const SgdConstants& c, int64_t n) {
  if (buffer == nullptr) {
    SgdLoop<T, false, false, false>(w, g, buffer, c, n);
  } else if (c.first) {
    c.nesterov ? SgdLoop<T, true, true, true>(w, g, buffer, c, n) : SgdLoop<T, true, true, false>(w, g, buffer, c, n);
  } else {
    c.nesterov ? SgdLoop<T, true, false, true>(w, g, buffer, c, n) : SgdLoop<T, true, false, false>(w, g, buffer, c, n);
  }
}

template <typename T>
[[gnu::always_inline]] inline void SgdAny(void* w_data, const void* g_data, void* buffer_data, const SgdConstants& c,
                                          int64_t begin, int64_t end) {
  T* w = static_cast<T*>(w_data) + begin;
  const T* g = static_cast<const T*>(g_data) + begin;
  T* buffer = buffer_data == nullptr ? nullptr : static_cast<T*>(buffer_data) + begin;
  if constexpr (sizeof(T) > 2) {
    SgdSpan<T>(w, g, buffer, c, end - begin);
  } else {
    float wide_w[kPiece], wide_g[kPiece], wide_buffer[kPiece];
    for (; begin < end; begin += kPiece, w += kPiece, g += kPiece) {
      const int64_t n = std::min(kPiece, end - begin);
      Convert(w, wide_w, n), Convert(g, wide_g, n);
      if (buffer != nullptr) Convert(buffer, wide_buffer, n);
      SgdSpan<float>(wide_w, wide_g, buffer == nullptr ? nullptr : wide_buffer, c, n);
      Convert(wide_w, w, n);
      if (buffer != nullptr) {
        Convert(wide_buffer, buffer, n);
        buffer += kPiece;
      }
    }
  }
}

#define INTERLACE_OPTIMIZERS(suffix, T)                                                                           \
  INTERLACE_CLONES void Adam##suffix(void* w, const void* g, void* m, void* v, const AdamConstants& c, int64_t b, \
                                     int64_t e) {                                                                 \
    AdamAny<T>(w, g, m, v, c, b, e);                                                                              \
  }                                                                                                               \
  INTERLACE_CLONES void Sgd##suffix(void* w, const void* g, void* buffer, const SgdConstants& c, int64_t b,       \
                                    int64_t e) {                                                                  \
    SgdAny<T>(w, g, buffer, c, b, e);                                                                             \
  }
INTERLACE_OPTIMIZERS(F64, double)
INTERLACE_OPTIMIZERS(F32, float)
INTERLACE_OPTIMIZERS(F16, Float16)
INTERLACE_OPTIMIZERS(BF16, BFloat16)
#undef INTERLACE_OPTIMIZERS

void CheckFlat(const at::Tensor& w, const at::Tensor& other, const char* name) {
  TORCH_INTERNAL_ASSERT(other.is_contiguous() && other.numel() == w.numel() && other.scalar_type() == w.scalar_type() &&
                            other.device() == w.device(),
                        name, " differs from the weights in size, dtype, device or is not contiguous");
}

// The gradient a device op is given: it has no factor of its own that leaves the gradient as it is.
at::Tensor ScaledGrad(const at::Tensor& g, double scale) {
  return scale == 1.0 ? g : at::mul(g, scale);
}

}  // namespace

void AdamStepAten(const AdamFlats& flats, const AdamArgs& a, bool consume) {
  std::vector<at::Tensor> grads = flats.g;
  if (consume && a.grad_scale != 1.0) {
    at::_foreach_mul_(grads, a.grad_scale);
  } else {
    for (at::Tensor& g : grads) g = ScaledGrad(g, a.grad_scale);
  }
  const at::Tensor step = at::full({}, a.t, flats.w.front().options().dtype(at::kFloat));
  const auto run = a.decoupled ? static_cast<decltype(&at::_ops::_fused_adamw_::call)>(&at::_ops::_fused_adamw_::call)
                               : static_cast<decltype(&at::_ops::_fused_adamw_::call)>(&at::_ops::_fused_adam_::call);
  run(flats.w, grads, flats.exp_avg, flats.exp_avg_sq, {}, std::vector<at::Tensor>(flats.w.size(), step), a.lr, a.beta1,
      a.beta2, a.weight_decay, a.eps, /*amsgrad=*/false, a.maximize, {}, {});
}

void AdamStep(const at::Tensor& w, const at::Tensor& g, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
              const AdamArgs& args) {
  TORCH_INTERNAL_ASSERT(w.is_contiguous(), "weights are not contiguous");
  CheckFlat(w, g, "gradient");
  CheckFlat(w, exp_avg, "exp_avg");
  CheckFlat(w, exp_avg_sq, "exp_avg_sq");
  if (w.numel() == 0) return;
  if (!w.device().is_cpu()) return AdamStepOnDevice({{w}, {g}, {exp_avg}, {exp_avg_sq}}, args, false);
  const AdamConstants constants = ConstantsOf(args);
  const auto step = FormFor(w.scalar_type(), &AdamF64, &AdamF32, &AdamF16, &AdamBF16);
  TORCH_INTERNAL_ASSERT(step != nullptr, "Adam of ", c10::toString(w.scalar_type()));
  void *const weight = w.mutable_data_ptr(), *const mean = exp_avg.mutable_data_ptr(),
              *const square = exp_avg_sq.mutable_data_ptr();
  const void* const grad = g.const_data_ptr();
  at::parallel_for(0, w.numel(), kGrain,
                   [&](int64_t begin, int64_t end) { step(weight, grad, mean, square, constants, begin, end); });
}

void SgdStepAten(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& a) {
  const at::Tensor grad = ScaledGrad(g, a.grad_scale);
  std::vector<at::Tensor> buffers;
  if (momentum.defined()) buffers.push_back(momentum);
  at::_fused_sgd_({w}, {grad}, buffers, a.weight_decay, momentum.defined() ? a.momentum : 0.0, a.lr, a.dampening,
                  a.nesterov, a.maximize, /*is_first_step=*/a.t <= 1);
}

void SgdStep(const at::Tensor& w, const at::Tensor& g, const at::Tensor& momentum, const SgdArgs& args) {
  TORCH_INTERNAL_ASSERT(w.is_contiguous(), "weights are not contiguous");
  CheckFlat(w, g, "gradient");
  if (momentum.defined()) CheckFlat(w, momentum, "momentum buffer");
  if (w.numel() == 0) return;
  if (!w.device().is_cpu()) return SgdStepOnDevice(w, g, momentum, args);
  const SgdConstants constants{.grad_scale = args.maximize ? -args.grad_scale : args.grad_scale,
                               .weight_decay = args.weight_decay,
                               .momentum = args.momentum,
                               .undamped = 1 - args.dampening,
                               .minus_lr = -args.lr,
                               .first = args.t <= 1,
                               .nesterov = args.nesterov};
  const auto step = FormFor(w.scalar_type(), &SgdF64, &SgdF32, &SgdF16, &SgdBF16);
  TORCH_INTERNAL_ASSERT(step != nullptr, "SGD of ", c10::toString(w.scalar_type()));
  void* const weight = w.mutable_data_ptr();
  void* const buffer = momentum.defined() ? momentum.mutable_data_ptr() : nullptr;
  const void* const grad = g.const_data_ptr();
  at::parallel_for(0, w.numel(), kGrain,
                   [&](int64_t begin, int64_t end) { step(weight, grad, buffer, constants, begin, end); });
}

}  // namespace interlace
