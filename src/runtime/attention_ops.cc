// attention_ops.cc — attention on devices other than CPUs. A step is captured as it runs on a CPU, so scaled
// dot-product attention is in the program as the CPU's fused operator; here other backends get it as a few calls that
// all of them have. In float32 for 16-bit types; the scores of all pairs are in memory at once.
//
//   forward   S = scale * Q K' + mask    L = logsumexp(S)    P = exp(S - L)    O = P V
//   backward  dV = P' dO    dS = P * (dO V' - rowsum(dO * O))    dQ = scale * dS K    dK = scale * dS' Q
#include "runtime/attention_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace interlace {

namespace {

at::Tensor Wide(const at::Tensor& t) {
  return t.to(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

double ScaleOf(const at::Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

at::Tensor Scores(const at::Tensor& query, const at::Tensor& key, bool is_causal, const std::optional<at::Tensor>& mask,
                  double scale) {
  at::Tensor scores = at::matmul(Wide(query) * scale, Wide(key).transpose(-2, -1));
  if (mask && mask->defined()) scores = scores + Wide(*mask);
  if (is_causal) {
    const at::Tensor later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

// Rows that may look at nothing are 0.
at::Tensor Weights(const at::Tensor& scores, const at::Tensor& logsumexp) {
  const at::Tensor base = Wide(logsumexp).unsqueeze(-1);
  return at::exp(scores - base.masked_fill(base.isinf(), 0));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             double dropout_p, bool is_causal, const std::optional<at::Tensor>& mask,
                                             std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0, "fused attention of the CPU has no dropout");
  const at::Tensor scores = Scores(query, key, is_causal, mask, ScaleOf(query, scale));
  const at::Tensor logsumexp = at::logsumexp(scores, {-1});
  return {at::matmul(Weights(scores, logsumexp), Wide(value)).to(query.scalar_type()), logsumexp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> AttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                 const at::Tensor& key, const at::Tensor& value,
                                                                 const at::Tensor& out, const at::Tensor& logsumexp,
                                                                 double dropout_p, bool is_causal,
                                                                 const std::optional<at::Tensor>& mask,
                                                                 std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0, "fused attention of the CPU has no dropout");
  const double factor = ScaleOf(query, scale);
  const at::Tensor weights = Weights(Scores(query, key, is_causal, mask, factor), logsumexp);
  const at::Tensor grad = Wide(grad_out);
  const at::Tensor along = (grad * Wide(out)).sum(-1, /*keepdim=*/true);
  const at::Tensor grad_scores = weights * (at::matmul(grad, Wide(value).transpose(-2, -1)) - along) * factor;
  return {at::matmul(grad_scores, Wide(key)).to(query.scalar_type()),
          at::matmul(grad_scores.transpose(-2, -1), Wide(query)).to(key.scalar_type()),
          at::matmul(weights.transpose(-2, -1), grad).to(value.scalar_type())};
}

// The CPU has kernels of its own, which go before these.
TORCH_LIBRARY_IMPL(aten, CompositeExplicitAutograd, m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", &Attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &AttentionBackward);
}

}  // namespace interlace
