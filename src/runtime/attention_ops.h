// attention_ops.h — scaled dot-product attention for devices other than CPUs, with the arguments and results of the
// CPU's fused operator: query, key, value [.., rows, width], an additive mask, logsumexp [.., rows] in float32
// (float64).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace interlace {

std::tuple<at::Tensor, at::Tensor> Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             double dropout_p, bool is_causal, const std::optional<at::Tensor>& mask,
                                             std::optional<double> scale);
// Gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> AttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                 const at::Tensor& key, const at::Tensor& value,
                                                                 const at::Tensor& out, const at::Tensor& logsumexp,
                                                                 double dropout_p, bool is_causal,
                                                                 const std::optional<at::Tensor>& mask,
                                                                 std::optional<double> scale);

}  // namespace interlace
