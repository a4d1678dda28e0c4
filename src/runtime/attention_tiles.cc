// attention_tiles.cc — the loops in explicit vectors of 16 lanes, which every instruction set carries out in the same
// order. Vectors are handed over by reference: their registers are those of one instruction set.
#include "runtime/attention_tiles.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace interlace::attention_tiles {

namespace {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Doubles = double __attribute__((vector_size(128)));
using Words = uint32_t __attribute__((vector_size(64)));
using Longs = int64_t __attribute__((vector_size(128)));
template <typename A>
using Lanes = std::conditional_t<std::is_same_v<A, float>, Floats, Doubles>;

template <typename V>
[[gnu::always_inline]] inline void Load(const void* from, V& to) {
  std::memcpy(&to, from, sizeof(to));
}
template <typename V>
[[gnu::always_inline]] inline void Store(const V& from, void* to) {
  std::memcpy(to, &from, sizeof(from));
}

// exp(x) for x up to 88, within 2 ulp (Cephes' polynomial); 0 below -87.3, NaN stays.
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
[[gnu::always_inline]] inline void Exp(const Doubles& x, Doubles& out) {
  for (int64_t i = 0; i < kLanes; ++i) out[i] = std::exp(x[i]);
}

// Exchanges the two halves off the diagonal of every square of 2 H lines and lanes.
template <int H>
[[gnu::always_inline]] inline void Exchange(Floats (&r)[kLanes]) {
  Ints low, high;
  for (int t = 0; t < kLanes; ++t)
    low[t] = (t & H) == 0 ? t : kLanes + t - H, high[t] = (t & H) == 0 ? t + H : kLanes + t;
  for (int i = 0; i < kLanes; ++i) {
    if ((i & H) != 0) continue;
    const Floats a = r[i], b = r[i + H];
    r[i] = __builtin_shuffle(a, b, low), r[i + H] = __builtin_shuffle(a, b, high);
  }
}

// What counts of 16 lanes of line j, from lane l on.
template <typename A>
[[gnu::always_inline]] inline void Look(const ScoreTile<A>& scores, int64_t j, int64_t l, Lanes<A>& v) {
  using Index = std::conditional_t<std::is_same_v<A, float>, Ints, Longs>;
  Load(scores.at + j * scores.lanes + l, v);
  v *= scores.scale;
  if (scores.mask != nullptr) {
    Lanes<A> more;
    Load(scores.mask + j * scores.lanes + l, more);
    v += more;
  }
  const int64_t hidden = j >= scores.known ? kLanes : std::min<int64_t>(j - scores.diagonal - l, kLanes);
  if (hidden > 0) {
    Index lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    v = lane < static_cast<std::remove_reference_t<decltype(lane[0])>>(hidden)
            ? Lanes<A>{} - std::numeric_limits<A>::infinity()
            : v;
  }
}

// 0 or the factor of what is kept, of 16 lanes of line j, from lane l on: an avalanche over the place in two rounds.
template <typename A>
[[gnu::always_inline]] inline void Keep(const Drop<A>& drop, int64_t j, int64_t l, Lanes<A>& keep) {
  Words x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<uint32_t>(i);
  x = (x + static_cast<uint32_t>(drop.row + l)) * 0x9E3779B1u ^
      (static_cast<uint32_t>(drop.column + j) * 0x85EBCA77u + drop.key);
  x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15, x *= 0x846CA68Bu, x ^= x >> 16;
  const Ints kept = reinterpret_cast<Ints>(x >> 8) < drop.below;
  if constexpr (std::is_same_v<A, float>)
    keep = kept ? Floats{} + drop.factor : Floats{};
  else
    for (int i = 0; i < kLanes; ++i) keep[i] = kept[i] != 0 ? drop.factor : 0;
}

}  // namespace

template <typename E>
INTERLACE_CLONES void Widen(const E* from, int64_t ld, int64_t rows, int64_t width, MathOf<E>* to, int64_t ld_to) {
  for (int64_t i = 0; i < rows; ++i) {
    const E* __restrict const in = from + i * ld;
    MathOf<E>* __restrict const out = to + i * ld_to;
    for (int64_t j = 0; j < width; ++j) out[j] = static_cast<MathOf<E>>(in[j]);
    for (int64_t j = width; j < RoundUp(width); ++j) out[j] = 0;
  }
  for (int64_t i = rows; i < RoundUp(rows); ++i) std::fill_n(to + i * ld_to, RoundUp(width), MathOf<E>(0));
}

template <typename E>
INTERLACE_CLONES void Narrow(const MathOf<E>* from, int64_t ld, int64_t rows, int64_t width, MathOf<E> factor, E* to,
                             int64_t ld_to) {
  for (int64_t i = 0; i < rows; ++i) {
    const MathOf<E>* __restrict const in = from + i * ld;
    E* __restrict const out = to + i * ld_to;
    for (int64_t j = 0; j < width; ++j) out[j] = static_cast<E>(factor * in[j]);
  }
}

template <typename A>
INTERLACE_CLONES void Largest(const ScoreTile<A>& scores, A* largest) {
  for (int64_t l = 0; l < scores.lanes; l += kLanes) {
    Lanes<A> most = Lanes<A>{} - std::numeric_limits<A>::infinity();
    for (int64_t j = 0; j < scores.lines; ++j) {
      Lanes<A> v;
      Look(scores, j, l, v);
      Store(v, scores.at + j * scores.lanes + l);
      most = v > most ? v : most;
    }
    Store(most, largest + l);
  }
}

template <typename A>
INTERLACE_CLONES void ExpSums(const ScoreTile<A>& scores, const A* less, A* sum) {
  for (int64_t l = 0; l < scores.lanes; l += kLanes) {
    Lanes<A> less_here, sum_here, v;
    Load(less + l, less_here), Load(sum + l, sum_here);
    for (int64_t j = 0; j < scores.lines; ++j) {
      A* const at = scores.at + j * scores.lanes + l;
      Load(at, v);
      Exp(v - less_here, v);
      sum_here += v;
      if (scores.drop != nullptr) {
        Lanes<A> keep;
        Keep(*scores.drop, j, l, keep);
        v *= keep;
      }
      Store(v, at);
    }
    Store(sum_here, sum + l);
  }
}

template <typename A>
INTERLACE_CLONES void ScoreGradients(const ScoreTile<A>& scores, const A* less, const A* dot, A* d) {
  for (int64_t l = 0; l < scores.lanes; l += kLanes) {
    Lanes<A> less_here, dot_here, p, dp;
    Load(less + l, less_here), Load(dot + l, dot_here);
    for (int64_t j = 0; j < scores.lines; ++j) {
      const int64_t at = j * scores.lanes + l;
      Look(scores, j, l, p);
      Exp(p - less_here, p);
      Load(d + at, dp);
      if (scores.drop == nullptr) {
        Store(p, scores.at + at);
      } else {
        Lanes<A> keep;
        Keep(*scores.drop, j, l, keep);
        Store(p * keep, scores.at + at);
        dp *= keep;
      }
      Store(p * (dp - dot_here), d + at);
    }
  }
}

template <typename A>
INTERLACE_CLONES void ScaleLanes(A* at, int64_t lines, int64_t lanes, const A* factor) {
  for (int64_t l = 0; l < lanes; l += kLanes) {
    Lanes<A> f, v;
    Load(factor + l, f);
    for (int64_t j = 0; j < lines; ++j) {
      Load(at + j * lanes + l, v);
      Store(v * f, at + j * lanes + l);
    }
  }
}

template <typename A>
INTERLACE_CLONES void Dots(const A* a, const A* b, int64_t lines, int64_t lanes, A* dot) {
  for (int64_t l = 0; l < lanes; l += kLanes) {
    Lanes<A> sum{}, x, y;
    for (int64_t j = 0; j < lines; ++j) {
      Load(a + j * lanes + l, x), Load(b + j * lanes + l, y);
      sum += x * y;
    }
    Store(sum, dot + l);
  }
}

template <typename A>
INTERLACE_CLONES void Transpose(const A* from, int64_t ld, int64_t rows, int64_t columns, A* to, int64_t ld_to) {
  if constexpr (std::is_same_v<A, float>) {
    for (int64_t i = 0; i < rows; i += kLanes) {
      for (int64_t j = 0; j < columns; j += kLanes) {
        Floats r[kLanes];
        for (int64_t t = 0; t < kLanes; ++t) Load(from + (i + t) * ld + j, r[t]);
        Exchange<8>(r), Exchange<4>(r), Exchange<2>(r), Exchange<1>(r);
        for (int64_t t = 0; t < kLanes; ++t) Store(r[t], to + (j + t) * ld_to + i);
      }
    }
  } else {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to[j * ld_to + i] = from[i * ld + j];
  }
}

INTERLACE_CLONES void Pairs(const float* from, int64_t lines, int64_t columns, BFloat16* to) {
  static_assert(std::endian::native == std::endian::little, "the first of a pair is the lower half of 32 bits");
  for (int64_t i = 0; i < lines; i += 2) {
    const float* __restrict const even = from + i * columns, * __restrict const odd = even + columns;
    auto* __restrict const out = reinterpret_cast<uint32_t*>(to + i * columns);
    for (int64_t j = 0; j < columns; ++j)
      out[j] = BFloat16(even[j]).bits | static_cast<uint32_t>(BFloat16(odd[j]).bits) << 16;
  }
}

// ---- of these types ----

#define INTERLACE_CONVERSIONS(E)                                                 \
  template void Widen(const E*, int64_t, int64_t, int64_t, MathOf<E>*, int64_t); \
  template void Narrow(const MathOf<E>*, int64_t, int64_t, int64_t, MathOf<E>, E*, int64_t);
INTERLACE_CONVERSIONS(float)
INTERLACE_CONVERSIONS(double)
INTERLACE_CONVERSIONS(BFloat16)
INTERLACE_CONVERSIONS(Float16)
#undef INTERLACE_CONVERSIONS

#define INTERLACE_TILES(A)                                                   \
  template void Transpose(const A*, int64_t, int64_t, int64_t, A*, int64_t); \
  template void Largest(const ScoreTile<A>&, A*);                            \
  template void ExpSums(const ScoreTile<A>&, const A*, A*);                  \
  template void ScoreGradients(const ScoreTile<A>&, const A*, const A*, A*); \
  template void ScaleLanes(A*, int64_t, int64_t, const A*);                  \
  template void Dots(const A*, const A*, int64_t, int64_t, A*);
INTERLACE_TILES(float)
INTERLACE_TILES(double)
#undef INTERLACE_TILES

}  // namespace interlace::attention_tiles
