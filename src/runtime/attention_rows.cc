// attention_rows.cc — the loops in explicit vectors of 16 lanes, which every instruction set carries out in the same
// order.
#include "runtime/attention_rows.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/clones.h"

namespace interlace::attention_rows {

namespace {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

// Vectors are handed over by reference: their registers are those of one instruction set.
[[gnu::always_inline]] inline void Load(const float* from, Floats& to) {
  std::memcpy(&to, from, sizeof(to));
}

// exp(x) for x up to 88, within 2 ulp (Cephes' polynomial); 0 below -87.3, NaN stays. No step of it contracts, so every
// instruction set gives the same bits.
[[gnu::always_inline]] inline void Exp(const Floats& x, Floats& out) {
  constexpr float kLeast = -87.336544f, kRound = 12582912.0f /* 1.5 * 2^23 */;
  const Floats clamped = x < kLeast ? Floats{} + kLeast : x;
  const Floats shifted = clamped * 1.44269504f + kRound, n = shifted - kRound;
  const Floats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (reinterpret_cast<Ints>(shifted) - std::bit_cast<int32_t>(kRound)) << 23;
  const Floats found = reinterpret_cast<Floats>(reinterpret_cast<Ints>(p) + power);
  out = x < kLeast ? Floats{} : (x == x ? found : x);
}

// The sum of 16 lanes in a fixed order.
[[gnu::always_inline]] inline float Sum(const Floats& lanes) {
  float at[kLanes];
  std::memcpy(at, &lanes, sizeof(at));
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) at[i] += at[i + half];
  return at[0];
}

template <typename T>
[[gnu::always_inline]] inline void ScoreGradientsLoop(T* __restrict d, const T* __restrict p, T less, int64_t n) {
  for (int64_t j = 0; j < n; ++j) d[j] = p[j] * (d[j] - less);
}

}  // namespace

INTERLACE_CLONES float MaskedLargest(float* scores, const float* mask, int64_t n) {
  Floats largest = Floats{} - std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < n; j += kLanes) {
    Floats s, more;
    Load(scores + j, s);
    if (mask != nullptr) {
      Load(mask + j, more);
      s += more;
      std::memcpy(scores + j, &s, sizeof(s));
    }
    largest = s > largest ? s : largest;
  }
  float found = largest[0];
  for (int64_t i = 1; i < kLanes; ++i) found = largest[i] > found ? largest[i] : found;
  return found;
}
double MaskedLargest(double* scores, const double* mask, int64_t n) {
  double found = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < n; ++j) {
    if (mask != nullptr) scores[j] += mask[j];
    found = scores[j] > found ? scores[j] : found;
  }
  return found;
}

INTERLACE_CLONES float ExpSum(float* scores, float less, int64_t n) {
  Floats sum{};
  for (int64_t j = 0; j < n; j += kLanes) {
    Floats e;
    Load(scores + j, e);
    Exp(e - less, e);
    std::memcpy(scores + j, &e, sizeof(e));
    sum += e;
  }
  return Sum(sum);
}
double ExpSum(double* scores, double less, int64_t n) {
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += scores[j] = std::exp(scores[j] - less);
  return sum;
}

INTERLACE_CLONES float Dot(const float* a, const float* b, int64_t n) {
  Floats sum{};
  int64_t j = 0;
  for (Floats x, y; j + kLanes <= n; j += kLanes) {
    Load(a + j, x), Load(b + j, y);
    sum += x * y;
  }
  float found = Sum(sum);
  for (; j < n; ++j) found += a[j] * b[j];
  return found;
}
double Dot(const double* a, const double* b, int64_t n) {
  double found = 0;
  for (int64_t j = 0; j < n; ++j) found += a[j] * b[j];
  return found;
}

INTERLACE_CLONES void ScoreGradients(float* d, const float* p, float less, int64_t n) {
  ScoreGradientsLoop(d, p, less, n);
}
INTERLACE_CLONES void ScoreGradients(double* d, const double* p, double less, int64_t n) {
  ScoreGradientsLoop(d, p, less, n);
}

}  // namespace interlace::attention_rows
