// few_rows.h — products whose left factor has few rows, in float32: steps of recurrent nets, experts with few tokens,
// small batches. The libraries pack the right factor first, which so few rows do not pay back; here it is read where it
// lies, 8 rows by 48 columns in registers, with fused multiply-adds. Of the faster library's time: 4 to 8 rows 0.36 to
// 0.85, 16 rows 0.67 to 0.97, 32 rows 0.86 to 1.02, from 64 rows on 1.0 (bench/products.py). On Intel's processors MKL
// has kernels of its own for them, and this takes 1.0 to 2.2 x as long.
// An element is the sum over blocks of 256 summands, in order, whatever the number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace interlace {

// Whether a product [rows, .] [., columns] is one of them, and this processor one on which that was measured (AMD's
// with AVX-512).
bool FewRowsPay(int64_t rows, int64_t columns);

// out = a b ([m, k] and [k, n]) + bias, of a form that out's can be broadcast from, where it is defined. False: nothing
// was done, for it is none of them, or b's rows and columns both have gaps.
bool FewRowsProduct(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out);

}  // namespace interlace
