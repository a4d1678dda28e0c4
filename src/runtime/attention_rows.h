// attention_rows.h — the loops of attention on CPUs over a row of scores. Lengths `n` are multiples of 16 but in Dot.
// Sums have a fixed order, and no step contracts a*b+c: the bits are the same for every instruction set.
#pragma once

#include <cstdint>

namespace interlace::attention_rows {

inline constexpr int64_t kLanes = 16;

inline int64_t RoundUp(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// scores += mask (nullptr: none); gives the largest that is a number.
float MaskedLargest(float* scores, const float* mask, int64_t n);
double MaskedLargest(double* scores, const double* mask, int64_t n);

// scores = exp(scores - less), within 2 ulp; gives their sum. NaN stays; float32 below exp(-87.3) is 0.
float ExpSum(float* scores, float less, int64_t n);
double ExpSum(double* scores, double less, int64_t n);

// The sum of a * b.
float Dot(const float* a, const float* b, int64_t n);
double Dot(const double* a, const double* b, int64_t n);

// d = p * (d - less): gradients of scores from those of their shares (softmax).
void ScoreGradients(float* d, const float* p, float less, int64_t n);
void ScoreGradients(double* d, const double* p, double less, int64_t n);

}  // namespace interlace::attention_rows
