// random_step.h — machines with round numbers, and random steps, for the tests of the simulator.
#pragma once

#include <random>

#include "cost/cluster.h"
#include "ir/program.h"

namespace interlace {

// 1 GB/s everywhere (1 byte a nanosecond), no latency, no launch cost, no interference, kernels that move 1 GB/s.
inline ClusterSpec RoundCluster(int64_t devices, int64_t per_node) {
  ClusterSpec c;
  c.name = "round";
  c.devices = devices;
  c.per_node = per_node;
  c.device_name = "round";
  c.memory_gib = 1;
  c.tflops_half = c.tflops_single = c.tflops_double = 1e-3;  // 1 flop a nanosecond
  c.memory_gb_per_s = 1;
  c.mm_efficiency = c.mm_transposed_efficiency = c.memory_efficiency = 1;
  c.attention_efficiency = c.attention_backward_efficiency = 1;
  c.h2d_gb_per_s = c.d2h_gb_per_s = 1;
  c.host_gb_per_s = 1000;
  c.file_read_gb_per_s = c.file_write_gb_per_s = 1;
  c.cores = 1000;
  c.intra = {0, 1, 0, 0};
  c.inter = {0, 1, 0, 0};
  c.interference = "none";
  return c;
}

// A scheduled step that obeys the rules of docs/ir.md on starts, waits and releases: gathers, reduces, all-reduces,
// copies to the host and back, compute of random sizes, micro-batch phases under accumulation with values handed on, an
// update.
Program RandomStep(std::mt19937& random);

}  // namespace interlace
