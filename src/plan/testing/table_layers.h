// table_layers.h — layer costs of a GPT from closed formulas, for tests and benchmarks of what stands on them.
//
// Sizes: activations of a block 34 s b h bytes without recomputation of attention kept (Korthikanti et al. 2023), bf16.
#pragma once

#include "plan/layer_cost.h"

namespace interlace::plan::testing {

struct GptLayers : LayerSource {
  int64_t hidden = 1024, heads = 16, layers = 24, sequence = 2048, vocabulary = 50304;
  double flop_per_us = 60e6;     // reached by matrix products
  double bytes_per_us = 240e3;   // of memory
  double tp_bytes_per_us = 5e3;  // of a collective within a node

  GptLayers(int64_t h, int64_t a, int64_t n) : hidden(h), heads(a), layers(n) {}
  int32_t blocks() const override { return static_cast<int32_t>(layers); }
  int32_t largest_tp() const override { return static_cast<int32_t>(heads & -heads); }
  Result<LayerCost> Cost(Role role, int32_t b, int32_t tp) const override {
    const int64_t tokens = b * sequence;
    const auto share = [&](int64_t n) { return n / tp; };
    LayerCost c;
    c.boundary = 2 * tokens * hidden / tp;
    const double tp_us = tp > 1 ? 2.0 * static_cast<double>(tokens * hidden) * (tp - 1) / tp / tp_bytes_per_us : 0;
    if (role == Role::kBlock) {
      c.parameters = share(12 * hidden * hidden + 13 * hidden);
      c.largest_unit = c.parameters;
      const double flop =
          24.0 * static_cast<double>(tokens * hidden * hidden) + 4.0 * static_cast<double>(tokens * sequence * hidden);
      c.forward_us = flop / tp / flop_per_us + static_cast<double>(c.boundary) * 12 / bytes_per_us;
      c.backward_us = 2 * c.forward_us;
      c.tp_forward_us = c.tp_backward_us = 4 * tp_us;
      c.recompute_full_us = c.forward_us, c.tp_recompute_full_us = c.tp_forward_us;
      c.recompute_selective_us = c.forward_us * 0.2;
      c.saved_kept = share(34 * tokens * hidden);
      c.saved_selective = share(20 * tokens * hidden);
      c.saved_full = c.boundary;
      c.work_forward = share(10 * tokens * hidden);
      c.work_backward = share(16 * tokens * hidden);
      c.work_backward_selective = c.work_backward + c.saved_kept - c.saved_selective;
      c.work_backward_full = c.work_backward + c.saved_kept - c.saved_full;
    } else if (role == Role::kEmbedding) {
      c.parameters = share(vocabulary * hidden) + sequence * hidden;
      c.largest_unit = c.parameters;
      c.forward_us = static_cast<double>(4 * tokens * hidden) / bytes_per_us;
      c.backward_us = 2 * c.forward_us;
      c.tp_forward_us = tp_us;
      c.saved_kept = c.saved_selective = c.saved_full = 8 * tokens;
      c.work_forward = c.work_backward = c.work_backward_selective = c.work_backward_full = 2 * c.boundary;
    } else {
      c.parameters = share(vocabulary * hidden);
      c.largest_unit = c.parameters;
      c.forward_us = 2.0 * static_cast<double>(tokens * hidden * vocabulary) / tp / flop_per_us;
      c.backward_us = 2 * c.forward_us;
      c.tp_forward_us = c.tp_backward_us = tp_us;
      c.saved_kept = c.saved_selective = c.saved_full = share(4 * tokens * vocabulary) + 2 * c.boundary;
      c.work_forward = c.work_backward = c.work_backward_selective = c.work_backward_full =
          share(4 * tokens * vocabulary);
    }
    return c;
  }
};

}  // namespace interlace::plan::testing
