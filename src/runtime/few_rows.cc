#include "runtime/few_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>

#include "runtime/attention_tiles.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define INTERLACE_AVX512 [[gnu::target("avx512f")]]
#endif

namespace interlace {

namespace few_rows {
namespace {

constexpr int kRows = 8, kLanes = 16, kColumns = 3 * kLanes;  // 24 sums and 3 vectors of b are in 32 registers
constexpr int64_t kMostRows = 48, kLeastColumns = 64, kDepth = 256, kPieceOfWork = 1 << 20;

#ifdef INTERLACE_AVX512

// A block of rows and columns: out[r][c] = or += sum over i of a[i][r] b[i][c].
struct Block {
  const float* a;  // [depth, kRows]
  const float* b;  // [depth, b_row]
  int64_t b_row;
  float* out;
  int64_t out_row, depth;
  bool more;
  __mmask16 lanes;  // of the vector where there is only one
};

template <int kR, int kC>
INTERLACE_AVX512 void Sum(const Block& block) {
  __m512 sum[kR][kC];
  for (int r = 0; r < kR; ++r) {
    for (int c = 0; c < kC; ++c) sum[r][c] = _mm512_setzero_ps();
  }
  const float *a = block.a, *b = block.b;
  for (int64_t i = 0; i < block.depth; ++i, a += kRows, b += block.b_row) {
    __m512 right[kC];
    for (int c = 0; c < kC; ++c)
      right[c] = kC > 1 ? _mm512_loadu_ps(b + kLanes * c) : _mm512_maskz_loadu_ps(block.lanes, b);
    for (int r = 0; r < kR; ++r) {
      const __m512 left = _mm512_set1_ps(a[r]);
      for (int c = 0; c < kC; ++c) sum[r][c] = _mm512_fmadd_ps(left, right[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int c = 0; c < kC; ++c) {
      float* to = block.out + r * block.out_row + kLanes * c;
      const __mmask16 lanes = kC > 1 ? __mmask16{0xffff} : block.lanes;
      const __m512 before = block.more ? _mm512_maskz_loadu_ps(lanes, to) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(to, lanes, block.more ? _mm512_add_ps(before, sum[r][c]) : sum[r][c]);
    }
  }
}

using Kernel = void (*)(const Block&);
template <int kC>
constexpr std::array<Kernel, kRows> kSums = {Sum<1, kC>, Sum<2, kC>, Sum<3, kC>, Sum<4, kC>,
                                             Sum<5, kC>, Sum<6, kC>, Sum<7, kC>, Sum<8, kC>};
constexpr std::array<std::array<Kernel, kRows>, 3> kKernels = {kSums<1>, kSums<2>, kSums<3>};  // by vectors, rows

// Columns of b, whose columns are without gaps, as rows: panel[i][c] = from[c][i].
void Turn(const float* from, int64_t column, int64_t width, int64_t depth, float* panel) {
  const int64_t whole = width < kLanes ? 0 : depth / kLanes * kLanes;
  if (whole > 0) attention_tiles::Transpose(from, column, width, whole, panel, kColumns);
  for (int64_t i = whole; i < depth; ++i) {
    for (int64_t c = 0; c < width; ++c) panel[i * kColumns + c] = from[c * column + i];
  }
}

void Product(const at::Tensor& a, const at::Tensor& b, float* out) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1), b_row = b.stride(0), b_column = b.stride(1);
  const int64_t blocks = (m + kRows - 1) / kRows, rows = (m + blocks - 1) / blocks;
  alignas(64) float left[kMostRows / kRows * kRows * kDepth];
  for (int64_t first = 0; first < k; first += kDepth) {
    const int64_t depth = std::min(kDepth, k - first);
    for (int64_t r = 0; r < m; ++r) {
      const float* from = a.const_data_ptr<float>() + r * a.stride(0) + first * a.stride(1);
      float* to = left + r / rows * kRows * depth + r % rows;
      for (int64_t i = 0; i < depth; ++i) to[i * kRows] = from[i * a.stride(1)];
    }
    const float* right = b.const_data_ptr<float>() + first * b_row;
    const int64_t pieces = (n + kColumns - 1) / kColumns,
                  grain = std::max<int64_t>(1, kPieceOfWork / (m * depth * kColumns));
    at::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
      alignas(64) float panel[kDepth * kColumns];
      for (int64_t at = begin * kColumns, width = 0; at < std::min(n, end * kColumns); at += width) {
        const int64_t columns = std::min<int64_t>(kColumns, n - at), vectors = std::max<int64_t>(1, columns / kLanes);
        width = std::min(columns, vectors * kLanes);
        const auto lanes = static_cast<__mmask16>((1u << std::min<int64_t>(width, kLanes)) - 1);
        Block block{left, right + at, b_row, out + at, n, depth, first > 0, lanes};
        if (b_column != 1) {
          Turn(right + at * b_column, b_column, width, depth, panel);
          block.b = panel, block.b_row = kColumns;
        }
        for (int64_t r = 0; r < m; r += rows, block.a += kRows * depth, block.out += rows * n) {
          kKernels[vectors - 1][std::min(rows, m - r) - 1](block);
        }
      }
    });
  }
}

#endif

}  // namespace
}  // namespace few_rows

#ifdef INTERLACE_AVX512

bool FewRowsPay(int64_t rows, int64_t columns) {
  static const bool found = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
  return found && rows >= 1 && rows <= few_rows::kMostRows && columns >= few_rows::kLeastColumns;
}

bool FewRowsProduct(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out) {
  if (a.dim() != 2 || b.dim() != 2 || !out.is_contiguous() || !FewRowsPay(a.size(0), b.size(1))) return false;
  for (const at::Tensor* t : {&a, &b, &out}) {
    if (t->scalar_type() != at::kFloat || !t->device().is_cpu()) return false;
  }
  if (a.size(1) == 0 || (b.stride(1) != 1 && b.stride(0) != 1)) return false;
  few_rows::Product(a, b, out.mutable_data_ptr<float>());
  if (bias.defined()) out.add_(bias);
  return true;
}

#else

bool FewRowsPay(int64_t, int64_t) {
  return false;
}
bool FewRowsProduct(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return false;
}

#endif

}  // namespace interlace
