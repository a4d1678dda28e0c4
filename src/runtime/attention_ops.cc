// attention_ops.cc — attention on devices other than CPUs. A step is captured as it runs on a CPU, so scaled
// dot-product attention is in the program as the CPU's fused operator. On CUDA it is the fused kernel that torch itself
// would choose there (cuDNN's, flash or memory-efficient): all leave the natural logarithm of the sums of exp(S), as the
// CPU's does. Where torch would choose none, and on other backends, it is a few calls that all of them have: in float32
// for 16-bit types, with the scores of all pairs in memory at once.
//
//   forward   S = scale * Q K' + mask    L = logsumexp(S)    P = exp(S - L)    O = P V
//   backward  dV = P' dO    dS = P * (dO V' - rowsum(dO * O))    dQ = scale * dS K    dK = scale * dS' Q
//
// Several heads of queries may share one of keys and values (grouped-query attention): these are repeated, and their
// gradients summed over the heads that shared them.
#include "runtime/attention_ops.h"

#include <ATen/SDPBackend.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

namespace interlace {

namespace {

at::Tensor Wide(const at::Tensor& t) {
  return t.to(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// How many heads of queries share one of keys.
int64_t SharedBy(const at::Tensor& query, const at::Tensor& key) {
  return query.dim() < 3 || query.size(-3) == key.size(-3) ? 1 : query.size(-3) / key.size(-3);
}

at::Tensor Repeated(const at::Tensor& t, int64_t times) {
  return times == 1 ? t : t.repeat_interleave(times, -3);
}

at::Tensor SummedHeads(const at::Tensor& grad, int64_t times, const at::Tensor& of) {
  if (times == 1) return grad;
  std::vector<int64_t> sizes = of.sizes().vec();
  sizes.insert(sizes.end() - 2, times);
  return grad.view(sizes).sum(-3);
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

constexpr int64_t kWidthMultiple = 8;    // of query, key and value: else torch pads them before its kernels
constexpr int64_t kMaskMultiple = 16;    // of the rows of a mask in memory, for the memory-efficient kernel
constexpr int64_t kSumsMultiple = 32;    // it takes its sums in rows of so many

// math: none.
at::SDPBackend FusedFor(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool is_causal,
                        const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const bool square = !is_causal || query.size(-2) == key.size(-2);  // of others kernels have other corners
  if (!query.is_cuda() || query.dim() != 4 || !square || query.size(-1) % kWidthMultiple != 0 ||
      value.size(-1) != query.size(-1) || query.numel() == 0 || key.numel() == 0)
    return at::SDPBackend::math;
  return static_cast<at::SDPBackend>(at::_fused_sdp_choice(query, key, value, mask, 0.0, is_causal, scale));
}

// Of one number for every query and key, with rows as the kernels need them.
std::optional<at::Tensor> MaskFor(const std::optional<at::Tensor>& mask, const at::Tensor& query,
                                  const at::Tensor& key) {
  if (!mask || !mask->defined()) return std::nullopt;
  const int64_t keys = key.size(-2);
  std::vector<int64_t> sizes = mask->sizes().vec();
  sizes.back() = keys;
  at::Tensor rows = mask->to(query.scalar_type()).expand(sizes);
  if (keys % kMaskMultiple != 0 || rows.stride(-1) != 1)
    rows = at::constant_pad_nd(rows, {0, (kMaskMultiple - keys % kMaskMultiple) % kMaskMultiple}).slice(-1, 0, keys);
  return rows.expand({query.size(0), query.size(1), query.size(2), keys});
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> Attention(const at::Tensor& query, const at::Tensor& one_key,
                                             const at::Tensor& one_value, double dropout_p, bool is_causal,
                                             const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0, "fused attention of the CPU has no dropout");
  const int64_t shared = SharedBy(query, one_key);
  const at::Tensor key = Repeated(one_key, shared), value = Repeated(one_value, shared);
  const at::SDPBackend fused = FusedFor(query, key, value, is_causal, mask, scale);
  if (fused == at::SDPBackend::flash_attention) {
    const auto found = at::_scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, false, scale);
    return {std::get<0>(found), std::get<1>(found)};
  }
  if (fused == at::SDPBackend::cudnn_attention) {
    const auto found = at::_scaled_dot_product_cudnn_attention(query, key, value, MaskFor(mask, query, key), true, 0.0,
                                                               is_causal, false, scale);
    return {std::get<0>(found), std::get<1>(found).reshape({query.size(0), query.size(1), query.size(2)})};
  }
  if (fused == at::SDPBackend::efficient_attention) {
    const auto found = at::_scaled_dot_product_efficient_attention(query, key, value, MaskFor(mask, query, key), true,
                                                                   0.0, is_causal, scale);
    return {std::get<0>(found), std::get<1>(found).slice(-1, 0, query.size(2))};
  }
  const at::Tensor scores = Scores(query, key, is_causal, mask, ScaleOf(query, scale));
  const at::Tensor logsumexp = at::logsumexp(scores, {-1});
  return {at::matmul(Weights(scores, logsumexp), Wide(value)).to(query.scalar_type()), logsumexp};
}

namespace {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Of as many heads of keys as of queries.
Gradients BackwardOf(const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& out, const at::Tensor& logsumexp, bool is_causal,
                     const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const at::SDPBackend fused = FusedFor(query, key, value, is_causal, mask, scale);
  const at::Tensor none;
  if (fused == at::SDPBackend::flash_attention || fused == at::SDPBackend::cudnn_attention ||
      fused == at::SDPBackend::efficient_attention) {
    const at::Tensor unused = at::empty({2}, query.options().dtype(at::kLong));  // keys of dropout, which is 0
    const at::Tensor bias = MaskFor(mask, query, key).value_or(none);
    const at::Tensor sums = logsumexp.contiguous();  // the kernels go by its address alone; the CPU's has rows outside
    if (fused == at::SDPBackend::flash_attention)
      return at::_scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, sums, none, none,
                                                              query.size(2), key.size(2), 0.0, is_causal, unused,
                                                              unused, scale);
    if (fused == at::SDPBackend::cudnn_attention)
      return at::_scaled_dot_product_cudnn_attention_backward(grad_out, query, key, value, out,
                                                              sums.unsqueeze(-1), unused, unused, bias, none, none,
                                                              query.size(2), key.size(2), 0.0, is_causal, scale);
    const int64_t more = (kSumsMultiple - query.size(2) % kSumsMultiple) % kSumsMultiple;
    const auto found = at::_scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, at::constant_pad_nd(sums, {0, more}), unused, unused, 0.0,
        {true, true, true, false}, is_causal, scale);
    return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
  }
  const double factor = ScaleOf(query, scale);
  const at::Tensor weights = Weights(Scores(query, key, is_causal, mask, factor), logsumexp);
  const at::Tensor grad = Wide(grad_out);
  const at::Tensor along = (grad * Wide(out)).sum(-1, /*keepdim=*/true);
  const at::Tensor grad_scores = weights * (at::matmul(grad, Wide(value).transpose(-2, -1)) - along) * factor;
  return {at::matmul(grad_scores, Wide(key)), at::matmul(grad_scores.transpose(-2, -1), Wide(query)),
          at::matmul(weights.transpose(-2, -1), grad)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> AttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                 const at::Tensor& key, const at::Tensor& value,
                                                                 const at::Tensor& out, const at::Tensor& logsumexp,
                                                                 double dropout_p, bool is_causal,
                                                                 const std::optional<at::Tensor>& mask,
                                                                 std::optional<double> scale) {
  TORCH_CHECK(dropout_p == 0, "fused attention of the CPU has no dropout");
  const int64_t shared = SharedBy(query, key);
  const auto [grad_query, grad_key, grad_value] = BackwardOf(grad_out, query, Repeated(key, shared),
                                                             Repeated(value, shared), out, logsumexp, is_causal, mask,
                                                             scale);
  return {grad_query.to(query.scalar_type()), SummedHeads(grad_key, shared, key).to(key.scalar_type()),
          SummedHeads(grad_value, shared, value).to(value.scalar_type())};
}

// The CPU has kernels of its own, which go before these.
TORCH_LIBRARY_IMPL(aten, CompositeExplicitAutograd, m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", &Attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &AttentionBackward);
}

}  // namespace interlace
