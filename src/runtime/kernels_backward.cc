// kernels_backward.cc — two backward kernels that write parameter gradients where they are told to, with ATen's bits.
// ATen is built with contraction of a*b+c, which code of ours could not repeat for every build of it; so layer norm
// calls ATen's own inner kernel (which takes its outputs as arguments), and embedding, whose sums have nothing to
// contract, is a loop.

// The inner kernel is reached through ATen's dispatch table, whose shape is fixed by these macros in official x86-64
// builds.
#if defined(__x86_64__)
#define HAVE_AVX512_CPU_DEFINITION
#define HAVE_AVX2_CPU_DEFINITION
#define INTERLACE_LAYER_NORM_STUB 1
#endif

#include <ATen/Parallel.h>
#include <ATen/native/layer_norm.h>

#include <algorithm>
#include <cstring>

#include "base/clones.h"
#include "runtime/kernels.h"

namespace interlace {

namespace {

// target[j] += source[j], 16-bit types by way of float32.
template <typename T>
[[gnu::always_inline]] inline void AddRow(T* __restrict target, const T* __restrict source, int64_t n) {
  using M = MathOf<T>;
  for (int64_t j = 0; j < n; ++j) target[j] = T(M(target[j]) + M(source[j]));
}

// Rows [begin, end) of the table get the gradients of their indices, in the order of the indices.
template <typename T, typename Index>
[[gnu::always_inline]] inline void AddRows(void* out, const void* grad, const void* indices, int64_t count,
                                           int64_t width, int64_t padding_idx, int64_t begin, int64_t end) {
  T* const table = static_cast<T*>(out);
  const T* const rows = static_cast<const T*>(grad);
  const Index* const index = static_cast<const Index*>(indices);
  std::memset(static_cast<void*>(table + begin * width), 0, static_cast<size_t>(end - begin) * width * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const auto k = static_cast<int64_t>(index[i]);
    if (k != padding_idx && k >= begin && k < end) AddRow(table + k * width, rows + i * width, width);
  }
}

#define INTERLACE_ADD_ROWS(name, T, Index)                                                                   \
  INTERLACE_CLONES void name(void* out, const void* grad, const void* indices, int64_t count, int64_t width, \
                             int64_t padding_idx, int64_t begin, int64_t end) {                              \
    AddRows<T, Index>(out, grad, indices, count, width, padding_idx, begin, end);                            \
  }
INTERLACE_ADD_ROWS(AddRowsF64I64, double, int64_t)
INTERLACE_ADD_ROWS(AddRowsF32I64, float, int64_t)
INTERLACE_ADD_ROWS(AddRowsF16I64, Float16, int64_t)
INTERLACE_ADD_ROWS(AddRowsBF16I64, BFloat16, int64_t)
INTERLACE_ADD_ROWS(AddRowsF64I32, double, int32_t)
INTERLACE_ADD_ROWS(AddRowsF32I32, float, int32_t)
INTERLACE_ADD_ROWS(AddRowsF16I32, Float16, int32_t)
INTERLACE_ADD_ROWS(AddRowsBF16I32, BFloat16, int32_t)
#undef INTERLACE_ADD_ROWS

}  // namespace

bool EmbeddingBackwardInto(const at::Tensor& grad, const at::Tensor& indices, int64_t num_weights, int64_t padding_idx,
                           bool scale_grad_by_freq, const at::Tensor& out) {
  if (!grad.device().is_cpu() || !indices.device().is_cpu() || !out.device().is_cpu()) return false;
  if (scale_grad_by_freq || grad.dim() == 0 || grad.scalar_type() != out.scalar_type()) return false;
  const bool wide = indices.scalar_type() == at::kLong;
  if (!wide && indices.scalar_type() != at::kInt) return false;
  const int64_t width = grad.size(-1);
  if (!grad.is_contiguous() || !indices.is_contiguous() || !out.is_contiguous()) return false;
  if (grad.numel() != indices.numel() * width || out.numel() != num_weights * width) return false;
  const auto add = wide ? FormFor(grad.scalar_type(), &AddRowsF64I64, &AddRowsF32I64, &AddRowsF16I64, &AddRowsBF16I64)
                        : FormFor(grad.scalar_type(), &AddRowsF64I32, &AddRowsF32I32, &AddRowsF16I32, &AddRowsBF16I32);
  if (add == nullptr) return false;
  if (out.numel() == 0) return true;
  void* const table = out.mutable_data_ptr();
  const void *const rows = grad.const_data_ptr(), *const index = indices.const_data_ptr();
  const int64_t grain = std::max<int64_t>(1, int64_t{64} * 1024 / width);  // table rows a thread clears at least
  at::parallel_for(0, num_weights, grain, [&](int64_t begin, int64_t end) {
    add(table, rows, index, indices.numel(), width, padding_idx, begin, end);
  });
  return true;
}

bool LayerNormBackwardInto(const at::Tensor& grad, const at::Tensor& input, int64_t normalized_numel,
                           const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                           const at::Tensor& dx, const at::Tensor& dweight, const at::Tensor& dbias) {
#ifdef INTERLACE_LAYER_NORM_STUB
  const int64_t n = normalized_numel;
  if (n <= 0 || input.numel() == 0 || input.numel() % n != 0 || grad.sizes() != input.sizes()) return false;
  const int64_t m = input.numel() / n;
  if (!grad.device().is_cpu() || !input.device().is_cpu() || grad.scalar_type() != input.scalar_type()) return false;
  if (mean.numel() != m || rstd.numel() != m || !mean.is_contiguous() || !rstd.is_contiguous()) return false;
  switch (input.scalar_type()) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
      break;
    default:
      return false;
  }
  if (weight.defined() && (weight.numel() != n || !weight.is_contiguous())) return false;
  // ATen's kernel reads mean, rstd and weight either in the input's dtype, or (16-bit inputs) all in float32.
  const auto parameter = weight.defined() ? weight.scalar_type() : mean.scalar_type();
  if (mean.scalar_type() != parameter || rstd.scalar_type() != parameter) return false;
  if (parameter != input.scalar_type() && !(parameter == at::kFloat && input.element_size() == 2)) return false;
  for (const at::Tensor* out : {&dweight, &dbias}) {
    if (out->defined() && (out->numel() != n || !out->is_contiguous() || out->scalar_type() != parameter)) return false;
  }
  if (dx.defined() && (dx.numel() != input.numel() || !dx.is_contiguous() || dx.scalar_type() != input.scalar_type()))
    return false;
  at::Tensor dx_out = dx, dweight_out = dweight, dbias_out = dbias;
  at::native::LayerNormBackwardKernel(at::kCPU, grad.contiguous(), input.contiguous(), mean, rstd, weight, m, n,
                                      &dx_out, &dweight_out, &dbias_out);
  return true;
#else
  (void)grad, (void)input, (void)normalized_numel, (void)mean, (void)rstd, (void)weight, (void)dx, (void)dweight,
      (void)dbias;
  return false;
#endif
}

}  // namespace interlace
