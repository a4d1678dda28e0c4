// attention_factors.h — one call of attention on CPUs, and its rows as the factors of products (cpu_attention.cc).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/attention_tiles.h"

namespace interlace::attention_tiles {

inline constexpr int64_t kChunk = 128;  // columns: scores of a block are 32 KiB in float32

inline int64_t RoundUpTo(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Sizes, strides in elements, and where the values lie. E: of the tensors, A: of sums.
template <typename E>
struct Call {
  using A = MathOf<E>;
  int64_t batch, heads, shared /* heads of queries that share one of keys */, rows, columns, width;
  int64_t wide, padded;  // width and columns, rounded up
  int64_t block;         // rows of one; fewer where there are few, of which less is above the diagonal
  int64_t chunk;         // columns of a block that are in memory at once
  bool causal;
  A scale;
  double dropout;     // probability
  uint64_t seed = 0;  // of what is dropped: the first number of torch's own generator, which keys have seeded
  const at::Tensor &query, &key, &value;
  const at::Tensor* mask = nullptr;
  int64_t mask_batch = 0, mask_head = 0, mask_row = 0;  // strides; 0 where it is the same for all

  Call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal,
       const std::optional<at::Tensor>& m, std::optional<double> given)
      : batch(q.size(0)),
        heads(q.size(1)),
        shared(q.size(1) / k.size(1)),
        rows(q.size(2)),
        columns(k.size(2)),
        width(q.size(3)),
        wide(RoundUp(width)),
        padded(RoundUp(columns)),
        block(std::min(RoundUp(rows), rows < 192 ? kRows / 2 : kRows)),
        chunk(std::min(kChunk, padded)),
        causal(causal),
        scale(static_cast<A>(given ? *given : 1 / std::sqrt(static_cast<double>(q.size(3))))),
        dropout(dropout),
        query(q),
        key(k),
        value(v) {
    if (dropout > 0) {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      const std::lock_guard lock(generator.mutex());
      seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    }
    if (!m) return;
    mask = &*m;
    const int64_t dims = m->dim();
    mask_row = m->size(dims - 2) == 1 ? 0 : m->stride(dims - 2);
    if (dims < 4) return;
    mask_batch = m->size(0) == 1 ? 0 : m->stride(0), mask_head = m->size(1) == 1 ? 0 : m->stride(1);
  }

  const E* MaskRow(int64_t b, int64_t h, int64_t row) const {
    return static_cast<const E*>(mask->const_data_ptr()) + b * mask_batch + h * mask_head + row * mask_row;
  }

  // The columns that some row of [begin, end) looks at, in whole blocks, so that products have few sizes. Masks say no
  // with -inf or with the least number there is; a row that has nothing else looks at all of them.
  std::pair<int64_t, int64_t> Seen(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    const auto [first, last] = Looked(b, h, begin, end);
    return {first / block * block, std::min(RoundUpTo(last, block), padded)};
  }
  std::pair<int64_t, int64_t> Looked(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    const int64_t last = causal ? std::min(end, columns) : columns;
    if (mask == nullptr) return {0, last};
    constexpr A kMasked = -1e30;
    int64_t low = last, high = 0;
    for (int64_t row = end; row-- > begin;) {  // from the last, which under a diagonal sees most
      const E* const m = MaskRow(b, h, row);
      int64_t right = last, left = 0;
      while (right > high && A(m[right - 1]) <= kMasked) --right;
      while (left < low && A(m[left]) <= kMasked) ++left;
      if (right <= high && left >= low && std::all_of(m + low, m + high, [](E e) { return A(e) <= kMasked; }))
        return {0, last};
      low = std::min(low, left), high = std::max(high, right);
      if (mask_row == 0) break;
    }
    return {low, high};
  }
};

template <typename E>
struct Rows {
  E* at;
  int64_t ld;  // elements from row to row
};

template <typename E, typename Tensor>
Rows<E> HeadOf(const Tensor& t, int64_t b, int64_t h, int64_t row) {
  auto* const data = static_cast<std::remove_const_t<E>*>(const_cast<void*>(t.const_data_ptr()));
  return {data + b * t.stride(0) + h * t.stride(1) + row * t.stride(2), t.stride(2)};
}

// ---- room of a thread: laid out twice, first from no address, which gives its size ----

struct Room {
  uintptr_t at = 0;
  template <typename U>
  U* Take(int64_t count) {
    U* const begin = reinterpret_cast<U*>(at);
    at += (static_cast<uintptr_t>(count) * sizeof(U) + 63) / 64 * 64;
    return begin;
  }
};

// Rows of a head (at most a block of them) as factors of products, in T.
template <typename E, typename T>
struct Factors {
  using A = MathOf<E>;
  static constexpr bool kSame = std::is_same_v<T, A>;
  int64_t wide;
  A *straight, *turned;  // room for a block of rows, of a mask as wide as one is long

  Factors(Room& room, const Call<E>& call) : wide(call.wide) {
    const int64_t rows = std::min(kRows, RoundUp(std::max(call.rows, call.columns)));
    const int64_t count = rows * (call.mask == nullptr ? wide : std::max(rows, wide));
    straight = room.Take<A>(count), turned = room.Take<A>(count);
  }
  void Left(Rows<const E> from, int64_t rows, int64_t width, T* to) const {
    if constexpr (kSame)
      return Widen(from.at, from.ld, rows, width, to, wide);
    else {
      Widen(from.at, from.ld, rows, width, straight, wide);
      Narrow(straight, wide, RoundUp(rows), wide, A(1), to, wide);
    }
  }
  void LeftTurned(Rows<const E> from, int64_t rows, int64_t width, T* to, int64_t ld) const {
    Widen(from.at, from.ld, rows, width, straight, wide);
    if constexpr (kSame)
      return Transpose(straight, wide, RoundUp(rows), wide, to, ld);
    else {
      Transpose(straight, wide, RoundUp(rows), wide, turned, RoundUp(rows));
      Narrow(turned, RoundUp(rows), wide, RoundUp(rows), A(1), to, ld);
    }
  }
  void Right(Rows<const E> from, int64_t rows, int64_t width, T* to) const {
    if constexpr (kSame)
      return Widen(from.at, from.ld, rows, width, to, wide);
    else {
      Widen(from.at, from.ld, rows, width, straight, wide);
      Pairs(straight, RoundUp(rows), wide, to);
    }
  }
  // `numbers`: also as they are, where it is not `to` itself.
  void RightTurned(Rows<const E> from, int64_t rows, int64_t width, T* to, A* numbers = nullptr) const {
    A* between = numbers == nullptr ? turned : numbers;
    Widen(from.at, from.ld, rows, width, straight, wide);
    if constexpr (kSame) between = numbers == nullptr ? to : numbers;
    Transpose(straight, wide, RoundUp(rows), wide, between, RoundUp(rows));
    if constexpr (!kSame) Pairs(between, wide, RoundUp(rows), to);
  }
  // A mask's rows [m, n], as scores lie: n lines of RoundUp(m) lanes.
  void Mask(Rows<const E> from, int64_t m, int64_t n, A* to) const {
    for (int64_t j = 0; j < n; j += kRows) {
      const int64_t lines = std::min(kRows, n - j);
      Widen(from.at + j, from.ld, m, lines, straight, RoundUp(lines));
      Transpose(straight, RoundUp(lines), RoundUp(m), RoundUp(lines), to + j * RoundUp(m), RoundUp(m));
    }
  }
};

}  // namespace interlace::attention_tiles
