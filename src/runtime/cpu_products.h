// cpu_products.h — matrix products in float32 on CPUs, by the faster of two libraries. torch has MKL do them; on AMD's
// processors with AVX-512, which MKL does not use there, oneDNN takes 0.87 to 0.96 x its time from some 20 MFLOP on,
// and 0.75 to 0.82 x for batches of products (bench/products.py). The choice goes by processor and shape alone, so that
// it is the same in every run; elsewhere, for small products and for other layouts torch's operators run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace interlace {

// Whether this processor is one of those, torch has oneDNN, and a product of so many operations (2 m k n) pays its
// call.
bool OneDnnPays(int64_t operations);

// out = a b for matrices or batches of them ([m, k] and [k, n], [b, m, k] and [b, k, n]); + bias, of a form that out's
// can be broadcast from, where it is defined. False: nothing was done, torch's operator is as fast or must do it.
bool OneDnnProduct(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, const at::Tensor& out);

}  // namespace interlace
