// cpu_attention.cc — FlashAttention's blocks (Dao et al. 2022) on CPUs: rows of a block against columns of a chunk,
// whose scores stay in the cache, by BLAS's products.
//
//   forward   S = scale * Q K' + mask    L = logsumexp(S)    P = exp(S - L)    O = P V
//   backward  dV = P' dO    dS = P * (dO V' - rowsum(dO * O))    dQ = scale * dS K    dK = scale * dS' Q
#include "runtime/cpu_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/attention_rows.h"

// The BLAS that torch is linked with; where it shows none, torch's kernel runs.
extern "C" {
[[gnu::weak]] void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                          const int*, const float*, const int*, const float*, float*, const int*);
[[gnu::weak]] void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*,
                          const int*, const double*, const int*, const double*, double*, const int*);
}

namespace interlace {

namespace cpu_attention {

namespace {

using attention_rows::Dot, attention_rows::ExpSum, attention_rows::kLanes, attention_rows::MaskedLargest,
    attention_rows::RoundUp, attention_rows::ScoreGradients;

constexpr int64_t kRows = 64;      // of a block; half of it where there are few
constexpr int64_t kColumns = 512;  // of a chunk: scores of a block are 128 KiB in float32

// ---- products of row-major matrices: C (m x n, rows ldc apart) = alpha op(A) op(B) + beta C ----

template <typename T>
struct Matrix {
  T* at;
  int64_t ld;  // elements between rows
};

void Gemm(const char* ta, const char* tb, int m, int n, int k, float alpha, const float* a, int lda, const float* b,
          int ldb, float beta, float* c, int ldc) {
  sgemm_(ta, tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}
void Gemm(const char* ta, const char* tb, int m, int n, int k, double alpha, const double* a, int lda, const double* b,
          int ldb, double beta, double* c, int ldc) {
  dgemm_(ta, tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

// BLAS counts by columns: C' = op(B)' op(A)'.
template <typename T>
void Product(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, Matrix<const T> a, Matrix<const T> b,
             double beta, Matrix<T> c) {
  Gemm(tb ? "T" : "N", ta ? "T" : "N", static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), T(alpha), b.at,
       static_cast<int>(b.ld), a.at, static_cast<int>(a.ld), T(beta), c.at, static_cast<int>(c.ld));
}

// ---- blocks ----

// One call: sizes, strides in elements, and where the values lie.
template <typename T>
struct Call {
  int64_t batch, heads, shared /* heads of queries that share one of keys */, rows, columns, width;
  int64_t block, chunk;                                 // rows and columns (with the lanes beyond them) of scores in memory
  bool causal;
  double scale;
  const at::Tensor &query, &key, &value;
  const at::Tensor* mask = nullptr;
  int64_t mask_batch = 0, mask_head = 0, mask_row = 0;  // strides; 0 where it is the same for all

  Call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, const std::optional<at::Tensor>& m,
       std::optional<double> given)
      : batch(q.size(0)),
        heads(q.size(1)),
        shared(q.size(1) / k.size(1)),
        rows(q.size(2)),
        columns(k.size(2)),
        width(q.size(3)),
        block(std::min(rows, rows < 192 ? kRows / 2 : kRows)),
        chunk(std::min(kColumns, RoundUp(columns))),
        causal(causal),
        scale(given ? *given : 1 / std::sqrt(static_cast<double>(q.size(3)))),
        query(q),
        key(k),
        value(v) {
    if (!m) return;
    mask = &*m;
    const int64_t dims = m->dim();
    mask_row = m->size(dims - 2) == 1 ? 0 : m->stride(dims - 2);
    if (dims < 4) return;
    mask_batch = m->size(0) == 1 ? 0 : m->stride(0), mask_head = m->size(1) == 1 ? 0 : m->stride(1);
  }

  template <typename U = const T>
  static Matrix<U> Head(const at::Tensor& t, int64_t b, int64_t h, int64_t row) {
    T* const data = static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
    return {data + b * t.stride(0) + h * t.stride(1) + row * t.stride(2), t.stride(2)};
  }
  const T* MaskRow(int64_t b, int64_t h, int64_t row) const {
    if (mask == nullptr) return nullptr;
    return mask->template const_data_ptr<T>() + b * mask_batch + h * mask_head + row * mask_row;
  }

  // The columns that some row of [begin, end) looks at. Masks say no with -inf or with the least number there is; a row
  // that has nothing else looks at all of them.
  std::pair<int64_t, int64_t> Seen(int64_t b, int64_t h, int64_t begin, int64_t end) const {
    const int64_t last = causal ? std::min(end, columns) : columns;
    if (mask == nullptr) return {0, last};
    constexpr T kMasked = -1e30;
    int64_t low = last, high = 0;
    for (int64_t row = end; row-- > begin;) {  // from the last, which under a diagonal sees most
      const T* const m = MaskRow(b, h, row);
      int64_t right = last, left = 0;
      while (right > high && m[right - 1] <= kMasked) --right;
      while (left < low && m[left] <= kMasked) ++left;
      if (right <= high && left >= low && !Sees(m, low, high, kMasked)) return {0, last};
      low = std::min(low, left), high = std::max(high, right);
      if (mask_row == 0) break;
    }
    return {low, high};
  }
  static bool Sees(const T* m, int64_t low, int64_t high, T masked) {
    for (int64_t j = low; j < high; ++j)
      if (!(m[j] <= masked)) return true;
    return false;
  }

  // Scores of a block's rows [row, row + m) and columns [column, column + n), into `s`; what a row
  // does not see, and the columns up to a multiple of 16, is -inf. Without the mask, which the caller adds.
  void Scores(int64_t b, int64_t h, int64_t row, int64_t m, int64_t column, int64_t n, T* s) const {
    Product<T>(false, true, m, n, width, scale, Head(query, b, h, row), Head(key, b, h / shared, column), 0, {s, chunk});
    const int64_t padded = RoundUp(n);
    for (int64_t r = 0; r < m; ++r) {
      const int64_t seen = causal ? std::clamp<int64_t>(row + r + 1 - column, 0, n) : n;
      std::fill(s + r * chunk + seen, s + r * chunk + padded, -std::numeric_limits<T>::infinity());
    }
  }
};

// A row of a mask as whole vectors: the last ones are copied, so that nothing beyond it is read.
template <typename T>
const T* Padded(const T* mask, int64_t n, T* room) {
  if (mask == nullptr || n % kLanes == 0) return mask;
  std::copy(mask, mask + n, room);
  std::fill(room + n, room + RoundUp(n), T(0));
  return room;
}

template <typename T>
void ForwardBlock(const Call<T>& call, int64_t b, int64_t h, int64_t row, T* s, const at::Tensor& out,
                  const at::Tensor& logsumexp) {
  const int64_t m = std::min(call.block, call.rows - row);
  const auto [first, last] = call.Seen(b, h, row, row + m);
  const Matrix<T> o = Call<T>::template Head<T>(out, b, h, row);
  T largest[kRows], sum[kRows], room[kColumns];
  std::fill_n(largest, m, -std::numeric_limits<T>::infinity());
  std::fill_n(sum, m, T(0));
  for (int64_t column = first; column < last; column += kColumns) {
    const int64_t n = std::min(kColumns, last - column), padded = RoundUp(n);
    call.Scores(b, h, row, m, column, n, s);
    for (int64_t r = 0; r < m; ++r) {
      T* const scores = s + r * call.chunk;
      const T* const mask = call.MaskRow(b, h, row + r);
      const T here = MaskedLargest(scores, Padded(mask == nullptr ? mask : mask + column, n, room), padded);
      const T before = largest[r], now = std::max(before, here);
      // Where all is -inf, exp is 0 of all of them, and NaN of a NaN.
      const T found = ExpSum(scores, now == -std::numeric_limits<T>::infinity() ? T(0) : now, padded);
      if (column > first && now != before) {
        const T less = std::exp(before - now);
        for (int64_t j = 0; j < call.width; ++j) o.at[r * o.ld + j] *= less;
        sum[r] *= less;
      }
      sum[r] += found, largest[r] = now;
    }
    Product<T>(false, false, m, call.width, n, 1, {s, call.chunk}, Call<T>::Head(call.value, b, h / call.shared, column),
               column == first ? 0 : 1, o);
  }
  T* const l = logsumexp.mutable_data_ptr<T>() + b * logsumexp.stride(0) + h * logsumexp.stride(1);
  for (int64_t r = 0; r < m; ++r) {
    const T part = sum[r] == 0 ? T(0) : 1 / sum[r];  // a row that sees nothing has the result 0
    for (int64_t j = 0; j < call.width; ++j) o.at[r * o.ld + j] = first < last ? o.at[r * o.ld + j] * part : T(0);
    l[(row + r) * logsumexp.stride(2)] = sum[r] == 0 ? T(0) : largest[r] + std::log(sum[r]);
  }
}

struct Gradients {
  at::Tensor query, key, value;
};

// All heads of queries that share head `kv` of keys and values. `s` and `d`: room for a block's scores.
template <typename T>
void BackwardHead(const Call<T>& call, int64_t b, int64_t kv, const at::Tensor& grad_out, const at::Tensor& out,
                  const at::Tensor& logsumexp, T* s, T* d, const Gradients& grads) {
  const auto head = [&](const at::Tensor& t, int64_t h, int64_t row) { return Call<T>::Head(t, b, h, row); };
  const auto target = [&](const at::Tensor& t, int64_t h, int64_t row) {
    return Call<T>::template Head<T>(t, b, h, row);
  };
  for (int64_t column = 0; column < call.columns; ++column) {
    std::fill_n(target(grads.key, kv, column).at, call.width, T(0));
    std::fill_n(target(grads.value, kv, column).at, call.width, T(0));
  }
  T room[kColumns], dot[kRows];
  for (int64_t h = kv * call.shared; h < (kv + 1) * call.shared; ++h) {
    const T* const l = logsumexp.const_data_ptr<T>() + b * logsumexp.stride(0) + h * logsumexp.stride(1);
    for (int64_t row = 0; row < call.rows; row += call.block) {
      const int64_t m = std::min(call.block, call.rows - row);
      const auto [first, last] = call.Seen(b, h, row, row + m);
      const Matrix<const T> g = head(grad_out, h, row), o = head(out, h, row), q = head(call.query, h, row);
      const Matrix<T> dq = target(grads.query, h, row);
      for (int64_t r = 0; r < m; ++r) {
        dot[r] = Dot(g.at + r * g.ld, o.at + r * o.ld, call.width);
        if (first >= last) std::fill_n(dq.at + r * dq.ld, call.width, T(0));
      }
      for (int64_t column = first; column < last; column += kColumns) {
        const int64_t n = std::min(kColumns, last - column), padded = RoundUp(n);
        const Matrix<const T> k = head(call.key, kv, column), v = head(call.value, kv, column);
        call.Scores(b, h, row, m, column, n, s);
        Product<T>(false, true, m, n, call.width, 1, g, v, 0, {d, call.chunk});
        for (int64_t r = 0; r < m; ++r) {
          T *const p = s + r * call.chunk, *const dp = d + r * call.chunk;
          const T* const mask = call.MaskRow(b, h, row + r);
          if (mask != nullptr) MaskedLargest(p, Padded(mask + column, n, room), padded);
          ExpSum(p, l[(row + r) * logsumexp.stride(2)], padded);
          std::fill(dp + n, dp + padded, T(0));
          ScoreGradients(dp, p, dot[r], padded);
        }
        const Matrix<const T> p{s, call.chunk}, ds{d, call.chunk};
        Product<T>(true, false, n, call.width, m, 1, p, g, 1, target(grads.value, kv, column));
        Product<T>(true, false, n, call.width, m, call.scale, ds, q, 1, target(grads.key, kv, column));
        Product<T>(false, false, m, call.width, n, call.scale, ds, k, column == first ? 0 : 1, dq);
      }
    }
  }
}

// As torch's kernel lays them out: heads inside rows.
at::Tensor HeadsInside(const at::Tensor& query, int64_t heads, int64_t rows) {
  return at::empty({query.size(0), rows, heads, query.size(3)}, query.options()).transpose(1, 2);
}

// Scores of `blocks` blocks for every thread.
template <typename T>
at::Tensor Room(const Call<T>& call, int64_t blocks) {
  return at::empty({at::get_num_threads(), blocks * call.block * call.chunk}, call.query.options());
}

template <typename T>
std::tuple<at::Tensor, at::Tensor> Forward(const Call<T>& call) {
  const at::Tensor& q = call.query;
  at::Tensor out = HeadsInside(q, call.heads, call.rows);
  at::Tensor logsumexp = at::empty({call.batch, call.rows, call.heads}, q.options()).transpose(1, 2);
  const at::Tensor room = Room(call, 1);
  const int64_t blocks = (call.rows + call.block - 1) / call.block;
  at::parallel_for(0, call.batch * call.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    T* const s = room.mutable_data_ptr<T>() + at::get_thread_num() * room.stride(0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks;
      ForwardBlock(call, head / call.heads, head % call.heads, i % blocks * call.block, s, out, logsumexp);
    }
  });
  return {out, logsumexp};
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor> Backward(const Call<T>& call, const at::Tensor& grad_out,
                                                        const at::Tensor& out, const at::Tensor& logsumexp) {
  const at::Tensor& q = call.query;
  const int64_t kv_heads = call.heads / call.shared;
  const Gradients grads{HeadsInside(q, call.heads, call.rows), HeadsInside(q, kv_heads, call.columns),
                        HeadsInside(q, kv_heads, call.columns)};
  const at::Tensor room = Room(call, 2);
  at::parallel_for(0, call.batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    T* const s = room.mutable_data_ptr<T>() + at::get_thread_num() * room.stride(0);
    for (int64_t i = begin; i < end; ++i) {
      BackwardHead(call, i / kv_heads, i % kv_heads, grad_out, out, logsumexp, s, s + call.block * call.chunk, grads);
    }
  });
  return {grads.query, grads.key, grads.value};
}

bool Covered(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout_p, bool is_causal,
             const std::optional<at::Tensor>& mask) {
  if (!is_causal && !mask) return false;  // nothing to leave out
  const auto dtype = query.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) return false;
  if (dtype == at::kFloat ? sgemm_ == nullptr : dgemm_ == nullptr) return false;
  if (dropout_p != 0 || query.numel() == 0 || key.numel() == 0) return false;
  for (const at::Tensor* t : {&query, &key, &value}) {
    if (t->dim() != 4 || t->scalar_type() != dtype || t->stride(3) != 1) return false;
    if (t->stride(2) < t->size(3) || t->stride(2) > std::numeric_limits<int>::max()) return false;
    if (t->size(3) != query.size(3)) return false;
  }
  if (value.size(1) != key.size(1) || query.size(1) % key.size(1) != 0) return false;
  if (!mask) return true;
  if (mask->scalar_type() != dtype || (mask->dim() != 2 && mask->dim() != 4)) return false;
  return mask->size(-1) == key.size(2) && (mask->stride(-1) == 1 || mask->size(-1) == 1);
}

}  // namespace

}  // namespace cpu_attention

std::tuple<at::Tensor, at::Tensor> CpuAttention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                double dropout_p, bool is_causal, const std::optional<at::Tensor>& mask,
                                                std::optional<double> scale) {
  if (!cpu_attention::Covered(query, key, value, dropout_p, is_causal, mask)) {
    return at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, mask, scale);
  }
  if (query.scalar_type() == at::kFloat)
    return cpu_attention::Forward(cpu_attention::Call<float>(query, key, value, is_causal, mask, scale));
  return cpu_attention::Forward(cpu_attention::Call<double>(query, key, value, is_causal, mask, scale));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> CpuAttentionBackward(const at::Tensor& grad_out, const at::Tensor& query,
                                                                    const at::Tensor& key, const at::Tensor& value,
                                                                    const at::Tensor& out, const at::Tensor& logsumexp,
                                                                    double dropout_p, bool is_causal,
                                                                    const std::optional<at::Tensor>& mask,
                                                                    std::optional<double> scale) {
  if (!cpu_attention::Covered(query, key, value, dropout_p, is_causal, mask) || out.stride(3) != 1) {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp,
                                                                    dropout_p, is_causal, mask, scale);
  }
  const at::Tensor grad =
      grad_out.stride(3) == 1 && grad_out.stride(2) >= grad_out.size(3) ? grad_out : grad_out.contiguous();
  if (query.scalar_type() == at::kFloat)
    return cpu_attention::Backward(cpu_attention::Call<float>(query, key, value, is_causal, mask, scale), grad, out,
                                   logsumexp);
  return cpu_attention::Backward(cpu_attention::Call<double>(query, key, value, is_causal, mask, scale), grad, out,
                                 logsumexp);
}

}  // namespace interlace
