// cpu_attention.cc — FlashAttention's blocks (Dao et al. 2022) on CPUs: rows of a block against columns of a chunk,
// whose scores stay in the cache. They are transposed (attention_tiles.h), so that all products are of plain factors:
//
//   forward   S' = K Q'    P' = exp(scale * S' + mask' - L)    O' = V' P'    L = logsumexp
//   backward  dP' = V dO'    dS' = P' * (dP' - rowsum(dO * O))    dV = P' dO    dK = scale * dS' Q    dQ' = scale * K' dS'
#include "runtime/cpu_attention.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <vector>

#include "runtime/attention_factors.h"
#include "runtime/random.h"

// The BLAS that torch is linked with, and oneDNN's products of small tiles; where it shows none, torch's kernel runs.
extern "C" {
[[gnu::weak]] void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                          const int*, const float*, const int*, const float*, float*, const int*);
[[gnu::weak]] void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*,
                          const int*, const double*, const int*, const double*, double*, const int*);
}
namespace at::native::cpublas {
[[gnu::weak]] void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                          const float* a, const float* b, float* c, bool pairs);
[[gnu::weak]] void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                          const at::BFloat16* a, const at::BFloat16* b, float* c, bool pairs);
[[gnu::weak]] void brgemm_release(bool pairs);
}  // namespace at::native::cpublas

namespace interlace {

namespace cpu_attention {

namespace {

using namespace attention_tiles;  // NOLINT: this file is their only user

// ---- products: C (m x n) = A (m x k, lines lda apart) B (k x n), or C += that ----

using Tiles32 = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*, float*,
                         bool);
using Tiles16 = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const at::BFloat16*,
                         const at::BFloat16*, float*, bool);

// oneDNN's are faster than BLAS from AVX-512 on (113 and 92 GFLOP/s for tiles of 64 on one core); in bfloat16 where the
// processor has such products (218).
bool OneDnnTiles() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found =
      static_cast<Tiles32>(at::native::cpublas::brgemm) != nullptr && __builtin_cpu_supports("avx512f");
  return found && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}
// Whether products in bfloat16 work: oneDNN may have been told to leave instructions unused ($ONEDNN_MAX_CPU_ISA).
bool TwoIsTwo() {
  const std::vector<at::BFloat16> ones(kLanes * 2, at::BFloat16(1.0f));
  std::vector<float> sums(kLanes * kLanes);
  try {
    at::native::cpublas::brgemm(kLanes, kLanes, 2, 2, kLanes, kLanes, false, ones.data(), ones.data(), sums.data(),
                                true);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(sums.begin(), sums.end(), [](float sum) { return sum == 2; });
}

bool NarrowTiles() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool found = static_cast<Tiles16>(at::native::cpublas::brgemm) != nullptr &&
                            __builtin_cpu_supports("avx512bf16") && TwoIsTwo();
  return found && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

void Multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, bool add, float* c) {
  if (OneDnnTiles()) return at::native::cpublas::brgemm(m, n, k, lda, n, n, add, a, b, c, false);
  const int columns = static_cast<int>(n), rows = static_cast<int>(m), summed = static_cast<int>(k),
            ld = static_cast<int>(lda);
  const float one = 1, more = add ? 1 : 0;  // BLAS counts by columns: C' = B' A'
  sgemm_("N", "N", &columns, &rows, &summed, &one, b, &columns, a, &ld, &more, c, &columns);
}
void Multiply(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda, const double* b, bool add, double* c) {
  const int columns = static_cast<int>(n), rows = static_cast<int>(m), summed = static_cast<int>(k),
            ld = static_cast<int>(lda);
  const double one = 1, more = add ? 1 : 0;
  dgemm_("N", "N", &columns, &rows, &summed, &one, b, &columns, a, &ld, &more, c, &columns);
}
void Multiply(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t lda, const BFloat16* b, bool add, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, n, n, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c, true);
}

// ---- forward ----

template <typename A>
struct Tile {
  Drop<A> drop;
  ScoreTile<A> scores;

  template <typename E>
  Tile(const Call<E>& call, int64_t b, int64_t h, int64_t row, int64_t lanes, int64_t column, int64_t lines, A* at,
       const A* mask)
      : drop{static_cast<uint32_t>(MixKey(call.seed, 0, 0, static_cast<uint64_t>(b), static_cast<uint64_t>(h))),
             static_cast<int32_t>((1 - call.dropout) * (1 << 24)), row, column, static_cast<A>(1 / (1 - call.dropout))},
        scores{at,
               lines,
               lanes,
               call.columns - column,
               call.causal ? row - column : std::numeric_limits<int64_t>::max() / 2,
               call.scale,
               mask,
               call.dropout > 0 ? &drop : nullptr} {}
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;
};

template <typename E, typename T>
struct ForwardRoom {
  using A = MathOf<E>;
  T *k /* [columns, width] */, *v /* [width, columns] */, *q /* [width, lanes] */, *p /* [lines, lanes] */;
  A *s /* as p */, *o /* as q */, *mask /* as s */;
  Factors<E, T> factors;

  ForwardRoom(Room room, const Call<E>& call, uintptr_t* end)
      : k(room.Take<T>(call.padded * call.wide)),
        v(room.Take<T>(call.padded * call.wide)),
        q(room.Take<T>(call.wide * call.block)),
        p(Factors<E, T>::kSame ? nullptr : room.Take<T>(call.chunk * call.block)),
        s(room.Take<A>(call.chunk * call.block)),
        o(room.Take<A>(call.wide * call.block)),
        mask(call.mask == nullptr ? nullptr : room.Take<A>(call.chunk * call.block)),
        factors(room, call) {
    *end = room.at;
  }
};

template <typename E, typename T, typename A = MathOf<E>>
void ForwardBlock(const Call<E>& call, const ForwardRoom<E, T>& room, int64_t b, int64_t h, int64_t row,
                  const at::Tensor& out, const at::Tensor& logsumexp) {
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  const int64_t m = std::min(call.block, call.rows - row), lanes = RoundUp(m);
  const auto [first, last] = call.Seen(b, h, row, row + m);
  A largest[kRows], here[kRows], less[kRows], factor[kRows], sum[kRows];
  std::fill_n(largest, lanes, kNone);
  std::fill_n(sum, lanes, A(0));
  room.factors.RightTurned(HeadOf<const E>(call.query, b, h, row), m, call.width, room.q);
  for (int64_t column = first; column < last; column += kChunk) {
    const int64_t n = std::min(kChunk, last - column);
    Multiply(n, lanes, call.wide, room.k + column * call.wide, call.wide, room.q, false, room.s);
    if (call.mask != nullptr) {
      room.factors.Mask({call.MaskRow(b, h, row) + column, call.mask_row}, m, std::min(n, call.columns - column),
                        room.mask);
    }
    const Tile<A> tile(call, b, h, row, lanes, column, n, room.s, room.mask);
    Largest(tile.scores, here);
    bool grows = false;
    for (int64_t r = 0; r < lanes; ++r) {
      const A now = std::max(largest[r], here[r]);
      less[r] = now == kNone ? A(0) : now;  // where all is -inf, exp is 0 of all of them, and NaN of a NaN
      factor[r] = now == largest[r] ? A(1) : std::exp(largest[r] - now);
      grows |= now != largest[r];
      sum[r] *= factor[r], largest[r] = now;
    }
    if (column > first && grows) ScaleLanes(room.o, call.wide, lanes, factor);
    ExpSums(tile.scores, less, sum);
    const T* p;
    if constexpr (Factors<E, T>::kSame)
      p = room.s;
    else
      Pairs(room.s, n, lanes, room.p), p = room.p;
    Multiply(call.wide, lanes, n, room.v + column, call.padded, p, column > first, room.o);
  }
  if (first >= last) std::fill_n(room.o, call.wide * lanes, A(0));
  auto* const l = static_cast<A*>(logsumexp.mutable_data_ptr()) + b * logsumexp.stride(0) + h * logsumexp.stride(1);
  for (int64_t r = 0; r < lanes; ++r) {
    factor[r] = sum[r] == 0 ? A(0) : 1 / sum[r];  // a row that sees nothing has the result 0
    if (r < m) l[(row + r) * logsumexp.stride(2)] = sum[r] == 0 ? A(0) : largest[r] + std::log(sum[r]);
  }
  ScaleLanes(room.o, call.wide, lanes, factor);
  Transpose(room.o, lanes, call.wide, lanes, room.factors.turned, call.wide);
  const Rows<E> o = HeadOf<E>(out, b, h, row);
  Narrow(room.factors.turned, call.wide, m, call.width, A(1), o.at, o.ld);
}

// As torch's kernel lays them out: heads inside rows.
at::Tensor HeadsInside(const at::Tensor& query, int64_t heads, int64_t rows) {
  return at::empty({query.size(0), rows, heads, query.size(3)}, query.options()).transpose(1, 2);
}

// Room for every thread, so many bytes each.
at::Tensor Rooms(uintptr_t bytes) {
  return at::empty({at::get_num_threads(), static_cast<int64_t>(bytes) + 64}, at::kByte);
}
Room RoomOf(const at::Tensor& rooms) {
  const auto begin = reinterpret_cast<uintptr_t>(rooms.mutable_data_ptr()) +
                     static_cast<uintptr_t>(at::get_thread_num() * rooms.stride(0));
  return {(begin + 63) / 64 * 64};
}

template <typename T>
void Release() {
  if (std::is_same_v<T, BFloat16> && at::native::cpublas::brgemm_release != nullptr)
    at::native::cpublas::brgemm_release(true);
}

template <typename E, typename T>
std::tuple<at::Tensor, at::Tensor> Forward(const Call<E>& call) {
  using A = MathOf<E>;
  const at::Tensor& q = call.query;
  at::Tensor out = HeadsInside(q, call.heads, call.rows);
  at::Tensor logsumexp =
      at::empty({call.batch, call.rows, call.heads}, q.options().dtype(c10::CppTypeToScalarType<A>::value))
          .transpose(1, 2);
  uintptr_t bytes = 0;
  ForwardRoom<E, T>({}, call, &bytes);
  const at::Tensor rooms = Rooms(bytes);
  // A head's keys and values are made factors once, or once for each of the parts that occupy all threads.
  const int64_t heads = call.batch * call.heads, blocks = RoundUpTo(call.rows, call.block) / call.block;
  const int64_t parts = std::min(blocks, (at::get_num_threads() + heads - 1) / heads),
                each = (blocks + parts - 1) / parts;
  at::parallel_for(0, heads * parts, 1, [&](int64_t begin, int64_t end) {
    const ForwardRoom<E, T> room(RoomOf(rooms), call, &bytes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / parts, b = head / call.heads, h = head % call.heads, kv = h / call.shared;
      const int64_t from = i % parts * each * call.block, to = std::min(call.rows, from + each * call.block);
      const int64_t needed = call.causal ? std::min(RoundUpTo(to, call.block), call.columns) : call.columns;
      for (int64_t c = 0; c < needed && from < to; c += kRows) {
        const int64_t n = std::min(kRows, needed - c);
        room.factors.Left(HeadOf<const E>(call.key, b, kv, c), n, call.width, room.k + c * call.wide);
        room.factors.LeftTurned(HeadOf<const E>(call.value, b, kv, c), n, call.width, room.v + c, call.padded);
      }
      for (int64_t row = from; row < to; row += call.block) ForwardBlock(call, room, b, h, row, out, logsumexp);
    }
    Release<T>();
  });
  return {out, logsumexp};
}

// ---- backward ----

struct Gradient {
  at::Tensor query, key, value;
};

template <typename E, typename T>
struct BackwardRoom {
  using A = MathOf<E>;
  static constexpr bool kSame = Factors<E, T>::kSame;
  T *k, *v /* [columns, width] */, *k_turned /* [width, columns] */;
  A *dk, *dv;  // [columns, width]
  T *q, *g /* [lanes, width] */, *q_turned, *g_turned /* [width, lanes] */;
  T *p, *ds /* [lines, lanes] */, *ds_right;
  A *s, *d, *mask;  // [lines, lanes]
  A* dq;            // [width, lanes]
  Factors<E, T> factors;

  BackwardRoom(Room room, const Call<E>& call, uintptr_t* end)
      : k(room.Take<T>(call.padded * call.wide)),
        v(room.Take<T>(call.padded * call.wide)),
        k_turned(room.Take<T>(call.padded * call.wide)),
        dk(room.Take<A>(call.padded * call.wide)),
        dv(room.Take<A>(call.padded * call.wide)),
        q(room.Take<T>(call.wide * call.block)),
        g(room.Take<T>(call.wide * call.block)),
        q_turned(room.Take<T>(call.wide * call.block)),
        g_turned(room.Take<T>(call.wide * call.block)),
        p(kSame ? nullptr : room.Take<T>(call.chunk * call.block)),
        ds(kSame ? nullptr : room.Take<T>(call.chunk * call.block)),
        ds_right(kSame ? nullptr : room.Take<T>(call.chunk * call.block)),
        s(room.Take<A>(call.chunk * call.block)),
        d(room.Take<A>(call.chunk * call.block)),
        mask(call.mask == nullptr ? nullptr : room.Take<A>(call.chunk * call.block)),
        dq(room.Take<A>(call.wide * call.block)),
        factors(room, call) {
    *end = room.at;
  }
};

template <typename E, typename T, typename A = MathOf<E>>
void BackwardBlock(const Call<E>& call, const BackwardRoom<E, T>& room, int64_t b, int64_t h, int64_t row,
                   const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& logsumexp,
                   const Gradient& grads) {
  const int64_t m = std::min(call.block, call.rows - row), lanes = RoundUp(m), wide = call.wide, width = call.width;
  const auto [first, last] = call.Seen(b, h, row, row + m);
  const Rows<E> dq = HeadOf<E>(grads.query, b, h, row);
  const Rows<const E> q = HeadOf<const E>(call.query, b, h, row), g = HeadOf<const E>(grad_out, b, h, row);
  A less[kRows], dot[kRows];
  const auto* const l =
      static_cast<const A*>(logsumexp.const_data_ptr()) + b * logsumexp.stride(0) + h * logsumexp.stride(1);
  for (int64_t r = 0; r < lanes; ++r)  // a lane that is no row has shares of 0
    less[r] = r < m ? l[(row + r) * logsumexp.stride(2)] : std::numeric_limits<A>::infinity();
  room.factors.RightTurned(HeadOf<const E>(out, b, h, row), m, width, room.q_turned, room.factors.turned);
  room.factors.RightTurned(g, m, width, room.g_turned, room.dq);
  Dots(room.factors.turned, room.dq, wide, lanes, dot);
  if constexpr (BackwardRoom<E, T>::kSame) std::copy_n(room.dq, wide * lanes, room.g_turned);
  room.factors.RightTurned(q, m, width, room.q_turned);
  room.factors.Right(q, m, width, room.q);
  room.factors.Right(g, m, width, room.g);
  for (int64_t column = first; column < last; column += kChunk) {
    const int64_t n = std::min(kChunk, last - column);
    Multiply(n, lanes, wide, room.k + column * wide, wide, room.q_turned, false, room.s);
    Multiply(n, lanes, wide, room.v + column * wide, wide, room.g_turned, false, room.d);
    if (call.mask != nullptr) {
      room.factors.Mask({call.MaskRow(b, h, row) + column, call.mask_row}, m, std::min(n, call.columns - column),
                        room.mask);
    }
    const Tile<A> tile(call, b, h, row, lanes, column, n, room.s, room.mask);
    ScoreGradients(tile.scores, less, dot, room.d);
    const T *p, *ds, *ds_right;
    if constexpr (BackwardRoom<E, T>::kSame) {
      p = room.s, ds = ds_right = room.d;
    } else {
      Narrow(room.s, lanes, n, lanes, A(1), room.p, lanes);
      Narrow(room.d, lanes, n, lanes, A(1), room.ds, lanes);
      Pairs(room.d, n, lanes, room.ds_right);
      p = room.p, ds = room.ds, ds_right = room.ds_right;
    }
    Multiply(n, wide, lanes, p, lanes, room.g, true, room.dv + column * wide);
    Multiply(n, wide, lanes, ds, lanes, room.q, true, room.dk + column * wide);
    Multiply(wide, lanes, n, room.k_turned + column, call.padded, ds_right, column > first, room.dq);
  }
  if (first >= last) std::fill_n(room.dq, wide * lanes, A(0));
  Transpose(room.dq, lanes, wide, lanes, room.factors.turned, wide);
  Narrow(room.factors.turned, wide, m, width, call.scale, dq.at, dq.ld);
}

template <typename E, typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor> Backward(const Call<E>& call, const at::Tensor& grad_out,
                                                        const at::Tensor& out, const at::Tensor& logsumexp) {
  using A = MathOf<E>;
  const at::Tensor& query = call.query;
  const int64_t kv_heads = call.heads / call.shared;
  const Gradient grads{HeadsInside(query, call.heads, call.rows), HeadsInside(query, kv_heads, call.columns),
                       HeadsInside(query, kv_heads, call.columns)};
  uintptr_t bytes = 0;
  BackwardRoom<E, T>({}, call, &bytes);
  const at::Tensor rooms = Rooms(bytes);
  at::parallel_for(0, call.batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    const BackwardRoom<E, T> room(RoomOf(rooms), call, &bytes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / kv_heads, kv = i % kv_heads;
      for (int64_t c = 0; c < call.columns; c += kRows) {
        const int64_t n = std::min(kRows, call.columns - c);
        const Rows<const E> k = HeadOf<const E>(call.key, b, kv, c), v = HeadOf<const E>(call.value, b, kv, c);
        room.factors.Left(k, n, call.width, room.k + c * call.wide);
        room.factors.Left(v, n, call.width, room.v + c * call.wide);
        room.factors.LeftTurned(k, n, call.width, room.k_turned + c, call.padded);
      }
      std::fill_n(room.dk, call.padded * call.wide, A(0));
      std::fill_n(room.dv, call.padded * call.wide, A(0));
      for (int64_t h = kv * call.shared; h < (kv + 1) * call.shared; ++h)
        for (int64_t row = 0; row < call.rows; row += call.block)
          BackwardBlock(call, room, b, h, row, grad_out, out, logsumexp, grads);
      const Rows<E> dk = HeadOf<E>(grads.key, b, kv, 0), dv = HeadOf<E>(grads.value, b, kv, 0);
      Narrow(room.dk, call.wide, call.columns, call.width, call.scale, dk.at, dk.ld);
      Narrow(room.dv, call.wide, call.columns, call.width, A(1), dv.at, dv.ld);
    }
    Release<T>();
  });
  return {grads.query, grads.key, grads.value};
}

// ---- what is covered ----

// With a last dimension that has no gaps.
at::Tensor Whole(const at::Tensor& t) {
  return t.dim() > 0 && t.size(-1) != 1 && t.stride(-1) != 1 ? t.contiguous() : t;
}
std::optional<at::Tensor> Whole(const std::optional<at::Tensor>& t) {
  return t ? std::optional(Whole(*t)) : t;
}

bool Covered(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout_p, bool is_causal,
             const std::optional<at::Tensor>& mask) {
  const auto dtype = query.scalar_type();
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!narrow && dtype != at::kFloat && dtype != at::kDouble) return false;
  if (dtype == at::kDouble ? dgemm_ == nullptr : sgemm_ == nullptr && !OneDnnTiles()) return false;
  const bool leaves_out = is_causal || mask || dropout_p != 0;
  if (!leaves_out && (dtype == at::kDouble || !OneDnnTiles())) return false;
  if (query.numel() == 0 || key.numel() == 0) return false;
  for (const at::Tensor* t : {&query, &key, &value}) {
    if (t->dim() != 4 || t->scalar_type() != dtype) return false;
    if (t->size(3) != query.size(3) || t->size(2) > std::numeric_limits<int>::max() / 2) return false;
  }
  if (value.size(1) != key.size(1) || query.size(1) % key.size(1) != 0) return false;
  if (!mask) return true;
  if (mask->scalar_type() != dtype || (mask->dim() != 2 && mask->dim() != 4)) return false;
  return mask->size(-1) == key.size(2);
}

// f(element, type of tiles), by the tensors' dtype.
template <typename F>
auto ByType(at::ScalarType dtype, F f) {
  if (dtype == at::kDouble) return f(double(), double());
  if (dtype == at::kHalf) return f(Float16(), float());
  if (dtype == at::kFloat) return f(float(), float());
  return NarrowTiles() ? f(BFloat16(), BFloat16()) : f(BFloat16(), float());
}

}  // namespace

}  // namespace cpu_attention

bool CpuAttentionDrops() {
  return sgemm_ != nullptr && dgemm_ != nullptr;
}

std::tuple<at::Tensor, at::Tensor> CpuAttention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                double dropout_p, bool is_causal, const std::optional<at::Tensor>& mask,
                                                std::optional<double> scale) {
  const at::Tensor q = cpu_attention::Whole(query), k = cpu_attention::Whole(key), v = cpu_attention::Whole(value);
  const std::optional<at::Tensor> added = cpu_attention::Whole(mask);
  if (!cpu_attention::Covered(q, k, v, dropout_p, is_causal, added)) {
    return at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, mask, scale);
  }
  return cpu_attention::ByType(query.scalar_type(), [&]<typename E, typename T>(E, T) {
    return cpu_attention::Forward<E, T>(cpu_attention::Call<E>(q, k, v, dropout_p, is_causal, added, scale));
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> CpuAttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                    const at::Tensor& key, const at::Tensor& value,
                                                                    const at::Tensor& out, const at::Tensor& logsumexp,
                                                                    double dropout_p, bool is_causal,
                                                                    const std::optional<at::Tensor>& mask,
                                                                    std::optional<double> scale) {
  const at::Tensor q = cpu_attention::Whole(query), k = cpu_attention::Whole(key), v = cpu_attention::Whole(value);
  const std::optional<at::Tensor> added = cpu_attention::Whole(mask);
  if (!cpu_attention::Covered(q, k, v, dropout_p, is_causal, added)) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp,
                                                                    dropout_p, is_causal, mask, scale);
  }
  return cpu_attention::ByType(query.scalar_type(), [&]<typename E, typename T>(E, T) {
    return cpu_attention::Backward<E, T>(cpu_attention::Call<E>(q, k, v, dropout_p, is_causal, added, scale),
                                         cpu_attention::Whole(grad_out), cpu_attention::Whole(out), logsumexp);
  });
}

}  // namespace interlace
