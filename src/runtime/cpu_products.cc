// cpu_products.cc — oneDNN's matmul as torch wraps it: primitives are kept by shape, and workspaces come from torch's
// allocator, so that they lie in the plan like those of other operators.
#include "runtime/cpu_products.h"

#include <ATen/Context.h>

namespace at::native {
// Exported by torch without a header: result = beta result + alpha a b, in result's memory.
[[gnu::weak]] void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);
}  // namespace at::native

namespace interlace {

namespace {

constexpr int64_t kLeast = 20'000'000;  // operations; below, a call costs more than it saves

// Rows or columns without gaps, as oneDNN reads them without a copy.
bool Dense(const at::Tensor& t) {
  return t.is_contiguous() || t.transpose(-1, -2).is_contiguous();
}

}  // namespace

bool OneDnnPays(int64_t operations) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found =
      at::native::mkldnn_matmul != nullptr && __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
  return found && operations >= kLeast && at::globalContext().userEnabledMkldnn();  // torch.backends.mkldnn
#else
  (void)operations;
  return false;
#endif
}

bool OneDnnProduct(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out) {
  if ((a.dim() != 2 && a.dim() != 3) || b.dim() != a.dim() || out.dim() != a.dim()) return false;
  for (const at::Tensor* t : {&a, &b, &out}) {
    if (t->scalar_type() != at::kFloat || !t->device().is_cpu()) return false;
  }
  if (!OneDnnPays(2 * a.numel() * b.size(-1)) || !out.is_contiguous() || !Dense(a) || !Dense(b)) return false;
  if (bias.defined()) out.copy_(bias.expand_as(out));
  at::native::mkldnn_matmul(a, b, out, bias.defined() ? 1.0f : 0.0f, 1.0f);
  return true;
}

}  // namespace interlace
