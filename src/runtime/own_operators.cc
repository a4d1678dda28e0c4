// own_operators.cc — the operators by name: products (cpu_products.h, few_rows.h) and attention (cpu_attention.h).
#include "runtime/own_operators.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "runtime/cpu_attention.h"
#include "runtime/cpu_products.h"
#include "runtime/few_rows.h"

namespace interlace {

namespace {

at::Tensor& MmOut(const at::Tensor& self, const at::Tensor& mat2, at::Tensor& out) {
  const bool done = FewRowsProduct(self, mat2, {}, out) || OneDnnProduct(self, mat2, {}, out);
  return done ? out : at::mm_out(out, self, mat2);
}

at::Tensor Mm(const at::Tensor& self, const at::Tensor& mat2) {
  at::Tensor out = at::empty({self.size(0), mat2.size(1)}, self.options());
  return MmOut(self, mat2, out);
}

at::Tensor& BmmOut(const at::Tensor& self, const at::Tensor& mat2, at::Tensor& out) {
  return OneDnnProduct(self, mat2, {}, out) ? out : at::bmm_out(out, self, mat2);
}

at::Tensor Bmm(const at::Tensor& self, const at::Tensor& mat2) {
  at::Tensor out = at::empty({self.size(0), self.size(1), mat2.size(2)}, self.options());
  return BmmOut(self, mat2, out);
}

at::Tensor& AddmmOut(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                     const at::Scalar& alpha, at::Tensor& out) {
  const bool plain = beta.equal(1) && alpha.equal(1) && self.scalar_type() == at::kFloat;
  const bool done = plain && (FewRowsProduct(mat1, mat2, self, out) || OneDnnProduct(mat1, mat2, self, out));
  return done ? out : at::addmm_out(out, self, mat1, mat2, beta, alpha);
}

at::Tensor Addmm(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  at::Tensor out = at::empty({mat1.size(0), mat2.size(1)}, mat1.options());
  return AddmmOut(self, mat1, mat2, beta, alpha, out);
}

}  // namespace

const char* OwnOperator(const BuildContext& context, const Op& op) {
  struct Own {
    std::string_view theirs;
    const char* ours;
    int factor;  // the operand that is a product's left factor; -1: no product
  };
  static constexpr std::array<Own, 5> kNames{{
      {"aten.mm", "interlace::mm", 0},
      {"aten.bmm", "interlace::bmm", 0},
      {"aten.addmm", "interlace::addmm", 1},
      {"aten._scaled_dot_product_flash_attention_for_cpu", "interlace::attention_for_cpu", -1},
      {"aten._scaled_dot_product_flash_attention_for_cpu_backward", "interlace::attention_for_cpu_backward", -1},
  }};
  if (!context.options.own_kernels || !context.device.is_cpu()) return nullptr;
  const auto own = std::find_if(kNames.begin(), kNames.end(), [&](const Own& o) { return o.theirs == op.name; });
  if (own == kNames.end() || own->factor < 0) return own == kNames.end() ? nullptr : own->ours;
  const auto right = static_cast<size_t>(own->factor) + 1;
  if (op.args.size() <= right || op.args[right].kind != Arg::Kind::kValue) return nullptr;
  const Geometry& factor = context.geometry[op.args[right].value];
  if (op.results.size() != 1 || op.results[0] == kNone || factor.sizes.size() < 2) return nullptr;
  const int64_t summed = factor.sizes[factor.sizes.size() - 2];
  const Geometry& product = context.geometry[op.results[0]];
  const bool few = product.sizes.size() == 2 && FewRowsPay(product.sizes[0], product.sizes[1]);
  return few || OneDnnPays(2 * summed * product.elements) ? own->ours : nullptr;
}

TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("mm(Tensor self, Tensor mat2) -> Tensor");
  m.def("mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("bmm(Tensor self, Tensor mat2) -> Tensor");
  m.def("bmm.out(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor");
  m.def(
      "addmm.out(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1, Tensor(a!) out) -> "
      "Tensor(a!)");
  m.def(
      "attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, "
      "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)");
  m.def(
      "attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}

TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("mm", &Mm);
  m.impl("mm.out", &MmOut);
  m.impl("bmm", &Bmm);
  m.impl("bmm.out", &BmmOut);
  m.impl("addmm", &Addmm);
  m.impl("addmm.out", &AddmmOut);
  m.impl("attention_for_cpu", &CpuAttention);
  m.impl("attention_for_cpu_backward", &CpuAttentionBackward);
}

}  // namespace interlace
