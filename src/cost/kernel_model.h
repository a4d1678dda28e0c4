// kernel_model.h — time of a kernel that nobody has measured: a roofline whose efficiency depends on the size.
//
//   matrix product (batch of m x n x k)   t0 + flops / (peak * efficiency) * waves^q * (1 + k0 / k), or the time of its
//                                         bytes if that is longer; waves is what the last, partly filled wave of output
//                                         tiles costs over all processors
//   flash attention                       t0 + flops / (peak * e / (1 + s0 / sequence))
//   all else moves bytes                  t0 + bytes / bandwidth, faster for what fits into the last cache
//
// The constants are the cluster's ([device], [kernels]); bench/fit_kernels.py fits them on public timings. Each rate is
// then what the cluster's software stack reaches of it in whole steps ([step.STACK], bench/fit_presets.py). Heads that
// are not a multiple of 32 wide take as long as the next one.
#pragma once

#include <cstdint>

#include "cost/cluster.h"
#include "ir/program.h"

namespace interlace {

struct KernelWork {
  enum class Kind : uint8_t { kFree, kMemory, kProduct, kAttention };
  Kind kind = Kind::kMemory;
  bool transposed = false;  // product: the second operand is read along its columns
  bool backward = false;    // attention
  DType dtype = DType::kF32;
  double batch = 1, m = 0, n = 0, k = 0;
  double aligned = 1;  // product: share of the rate, for rows of 2-byte numbers that do not begin at 16 bytes
  double sequence = 0, head = 128;  // attention
  double flops = 0;
  double bytes = 0;  // read and written
};

// What an op does. Error: a size that is not yet a number (bind first).
Result<KernelWork> WorkOf(const Program& program, const Op& op);
double KernelUs(const ClusterSpec& cluster, const KernelWork& work);

}  // namespace interlace
