// kernels_norm.cc — the exact norm (base/exact_sum.h): block sums of 32 squares in float64, then an exact fixed-point
// sum.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/clones.h"
#include "base/exact_sum.h"
#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

constexpr int64_t kGrainBlocks = 4096;  // blocks of 32 a thread takes at least

using Lanes = double __attribute__((vector_size(64)));
using HalfLanes = double __attribute__((vector_size(32)));

// Eight elements squared, in float64.
[[gnu::always_inline]] inline void SquareEight(const double* x, Lanes& out) {
  Lanes wide;
  std::memcpy(&wide, x, sizeof(wide));
  out = wide * wide;
}
[[gnu::always_inline]] inline void SquareEight(const float* x, Lanes& out) {
  float loaded __attribute__((vector_size(32)));
  std::memcpy(&loaded, x, sizeof(loaded));
  const Lanes wide = __builtin_convertvector(loaded, Lanes);
  out = wide * wide;
}

// The block sums of ExactSum::AddSquares, in its order, in explicit vectors: left to itself the compiler finds only
// half of them.
template <typename T>
[[gnu::always_inline]] inline void BlockSums(const T* x, int64_t blocks, double* sums) {
  for (int64_t b = 0; b < blocks; ++b, x += ExactSum::kBlock) {
    Lanes q0, q1, q2, q3;
    SquareEight(x, q0), SquareEight(x + 8, q1), SquareEight(x + 16, q2), SquareEight(x + 24, q3);
    const Lanes s = ((q0 + q1) + q2) + q3;
    HalfLanes low, high;
    std::memcpy(&low, &s, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&s) + sizeof(low), sizeof(high));
    const HalfLanes t = low + high;  // 0+4, 1+5, 2+6, 3+7
    sums[b] = (t[0] + t[2]) + (t[1] + t[3]);
  }
}

template <typename T>
[[gnu::always_inline]] inline void AddSquares(ExactSum& sum, const T* x, int64_t numel) {
  constexpr int64_t kBlocks = 32;  // at once: their sums, and 16-bit elements as float32, stay in the first-level cache
  double sums[kBlocks];
  while (numel >= ExactSum::kBlock) {
    const int64_t blocks = std::min(kBlocks, numel / ExactSum::kBlock), n = blocks * ExactSum::kBlock;
    if constexpr (sizeof(T) == 2) {
      float wide[kBlocks * ExactSum::kBlock];
      for (int64_t j = 0; j < n; ++j) wide[j] = x[j];
      BlockSums(wide, blocks, sums);
    } else {
      BlockSums(x, blocks, sums);
    }
    for (int64_t b = 0; b < blocks; ++b) sum.Add(sums[b]);
    x += n;
    numel -= n;
  }
  if (numel > 0) sum.AddSquares(x, numel);
}

#define INTERLACE_SQUARES(name, T)                                                          \
  INTERLACE_CLONES void name(ExactSum& sum, const void* data, int64_t begin, int64_t end) { \
    AddSquares(sum, static_cast<const T*>(data) + begin, end - begin);                      \
  }
INTERLACE_SQUARES(SquaresF64, double)
INTERLACE_SQUARES(SquaresF32, float)
INTERLACE_SQUARES(SquaresF16, Float16)
INTERLACE_SQUARES(SquaresBF16, BFloat16)
#undef INTERLACE_SQUARES

}  // namespace

void NormPartial(const at::Tensor& flat, const at::Tensor& acc) {
  TORCH_INTERNAL_ASSERT(flat.is_contiguous(), "the norm of a buffer that is not contiguous");
  TORCH_INTERNAL_ASSERT(acc.is_contiguous() && acc.scalar_type() == at::kLong && acc.numel() == ExactSum::kLimbs &&
                            acc.device() == flat.device(),
                        "the norm's accumulator must be int64[68] beside its buffer");
  if (flat.numel() == 0) return;
  if (!flat.device().is_cpu()) return NormPartialOnDevice(flat, acc);
  const auto squares = FormFor(flat.scalar_type(), &SquaresF64, &SquaresF32, &SquaresF16, &SquaresBF16);
  TORCH_INTERNAL_ASSERT(squares != nullptr, "the norm of ", c10::toString(flat.scalar_type()));
  int64_t* const limbs = acc.mutable_data_ptr<int64_t>();
  ExactSum total(limbs);
  const void* const data = flat.const_data_ptr();
  const int64_t numel = flat.numel(), blocks = (numel + ExactSum::kBlock - 1) / ExactSum::kBlock;
  std::mutex mutex;
  at::parallel_for(0, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    ExactSum sum;
    squares(sum, data, begin * ExactSum::kBlock, std::min(end * ExactSum::kBlock, numel));
    std::lock_guard lock(mutex);  // any order: the sum is exact
    total.Add(sum);
  });
  std::copy(total.Limbs().begin(), total.Limbs().end(), limbs);
}

void NormPartialAten(const at::Tensor& flat, const at::Tensor& acc) {
  constexpr int64_t kChunk = int64_t{1} << 22;  // elements at once: 32 MiB of doubles, several of them
  constexpr int64_t kSpread = 1024;             // copies of the accumulator, so that atomic additions seldom collide
  const at::Tensor rows = flat.reshape({-1});
  for (int64_t begin = 0; begin < rows.numel(); begin += kChunk) {
    at::Tensor x = rows.narrow(0, begin, std::min(kChunk, rows.numel() - begin)).to(at::kDouble);
    if (const int64_t rest = x.numel() % ExactSum::kBlock) x = at::constant_pad_nd(x, {0, ExactSum::kBlock - rest});
    // The order of ExactSum::AddSquares.
    const at::Tensor q = (x * x).view({-1, 4, 8});
    at::Tensor s = ((q.select(1, 0) + q.select(1, 1)) + q.select(1, 2)) + q.select(1, 3);
    s = s.narrow(1, 0, 4) + s.narrow(1, 4, 4);
    s = s.narrow(1, 0, 2) + s.narrow(1, 2, 2);
    s = s.select(1, 0) + s.select(1, 1);
    // ExactSum::Add on integers: a double is mantissa * 2^(shift - 1074).
    const at::Tensor bits = s.contiguous().view(at::kLong);
    const at::Tensor exponent = at::bitwise_and(bits.__rshift__(52), 0x7ff);
    at::Tensor mantissa = at::bitwise_and(bits, (int64_t{1} << 52) - 1);
    mantissa = mantissa + (exponent > 0).to(at::kLong) * (int64_t{1} << 52);
    mantissa = mantissa * (exponent < 0x7ff).to(at::kLong);
    const at::Tensor shift = at::where(exponent < 0x7ff, exponent, at::ones_like(exponent)).clamp_min(1) - 1;
    const at::Tensor limb = shift.__rshift__(5), within = at::bitwise_and(shift, 31);
    const at::Tensor low = at::bitwise_and(mantissa, 0xffffffff).__lshift__(within);  // below 2^63
    const at::Tensor high = mantissa.__rshift__(32).__lshift__(within);               // below 2^52
    const at::Tensor place = at::remainder(at::arange(s.numel(), limb.options()), kSpread) * ExactSum::kLimbs + limb;
    at::Tensor spread = at::zeros({kSpread * ExactSum::kLimbs}, acc.options());
    spread.scatter_add_(0, place, at::bitwise_and(low, 0xffffffff));
    spread.scatter_add_(0, place + 1, low.__rshift__(32) + at::bitwise_and(high, 0xffffffff));
    spread.scatter_add_(0, place + 2, high.__rshift__(32));
    acc.add_(spread.view({kSpread, ExactSum::kLimbs}).sum(0));
    acc.select(0, 66).add_(at::isinf(s).any().to(at::kLong));
    acc.select(0, 67).add_(at::isnan(s).any().to(at::kLong));
    // Carries one limb up, which keeps every limb below 2^34.
    at::Tensor numbers = acc.narrow(0, 0, ExactSum::kNumberLimbs - 1);
    const at::Tensor carry = numbers.__rshift__(32);
    numbers.bitwise_and_(0xffffffff);
    acc.narrow(0, 1, ExactSum::kNumberLimbs - 1).add_(carry);
  }
}

at::Tensor NormCoef(const at::Tensor& acc, double max_norm, double scale, const at::Tensor& out, double loss_scale) {
  TORCH_INTERNAL_ASSERT(acc.is_contiguous() && acc.scalar_type() == at::kLong && acc.numel() == ExactSum::kLimbs,
                        "the norm's accumulator");
  TORCH_INTERNAL_ASSERT(out.is_contiguous() && out.scalar_type() == at::kDouble && out.numel() == 3,
                        "the norm's result must be float64[3]");
  const at::Tensor host = acc.cpu();  // waits for the device
  const double norm = std::sqrt(ExactSum(host.const_data_ptr<int64_t>()).Round()) * scale / loss_scale;
  double coef = 1;
  if (max_norm >= 0) {
    const double ratio = max_norm / (norm + 1e-6);
    coef = ratio > 1 ? 1 : ratio;  // keeps a NaN
  }
  const at::Tensor result = out.device().is_cpu() ? out : at::zeros({3}, out.options().device(at::kCPU));
  double* const values = result.mutable_data_ptr<double>();
  values[0] = norm;
  values[1] = coef / loss_scale;
  values[2] = std::isfinite(norm) ? 1 : 0;
  if (!out.device().is_cpu()) out.copy_(result, /*non_blocking=*/true);
  return result;
}

}  // namespace interlace
