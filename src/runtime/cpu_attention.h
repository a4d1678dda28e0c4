// cpu_attention.h — fused attention on CPUs, with the arguments, results and layouts of torch's own operator
// (_scaled_dot_product_flash_attention_for_cpu): query [batch, heads, rows, width], key and value [batch, heads or a
// divisor of them, columns, width], an additive mask, logsumexp [batch, heads, rows] in the type of sums. What no row
// of a block looks at (above the diagonal, or masked) is not computed, where torch's kernel computes 512 columns at a
// time: a causal step on 512 tokens has half the work. Products are oneDNN's for small tiles where the processor has
// AVX-512, in bfloat16 where it has such products, else BLAS's; float16 and, elsewhere, bfloat16 in float32. Dropout,
// which torch's operator has an argument for and refuses, keys what it drops by the default generator's next number:
// the gradient drops the same where that is seeded the same. What is not covered (no mask, diagonal or dropout where
// products are BLAS's) goes to torch's kernel. Bits depend on the data alone, not on threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace interlace {

std::tuple<at::Tensor, at::Tensor> CpuAttention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                double dropout_p, bool is_causal, const std::optional<at::Tensor>& mask,
                                                std::optional<double> scale);
// Whether it is here, with dropout too.
bool CpuAttentionDrops();
// Gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> CpuAttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                    const at::Tensor& key, const at::Tensor& value,
                                                                    const at::Tensor& out, const at::Tensor& logsumexp,
                                                                    double dropout_p, bool is_causal,
                                                                    const std::optional<at::Tensor>& mask,
                                                                    std::optional<double> scale);

}  // namespace interlace
