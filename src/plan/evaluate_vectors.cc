// The vector code: several strategies at a time without branches. Each formula is the sum over equal layers of what
// reference_cost.cc adds one by one; times agree to rounding, bytes exactly, whatever the instruction set.
//
// Vectors are those of GCC and clang, so that nothing depends on what a compiler manages to vectorize by itself. GCC 12
// takes such vectors apart before it clones a function for other targets, so the code is included once for each
// instead.
#include <algorithm>

#include "plan/stage_sums.h"

#define INTERLACE_INLINE [[gnu::always_inline]] inline
// By reference, so that no vector crosses a call that an instruction set would lay out in its own way.
#define INTERLACE_AT(row) (*reinterpret_cast<const Vector*>(&(row)[i]))
#define INTERLACE_MAX(a, b) ((a) > (b) ? (a) : (b))
#define INTERLACE_MIN(a, b) ((a) < (b) ? (a) : (b))

namespace interlace::plan {
namespace {

namespace baseline {
constexpr int kVector = 2;
#include "plan/vector_formula.h"
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define INTERLACE_VECTORS_BY_TARGET 1
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace avx2 {
constexpr int kVector = 4;
#include "plan/vector_formula.h"
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
namespace avx512 {
constexpr int kVector = 8;
#include "plan/vector_formula.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

}  // namespace

std::span<const VectorFunction> VectorFunctions() {
  static constexpr VectorFunction kAll[] = {
      baseline::EvaluateVectors,
#ifdef INTERLACE_VECTORS_BY_TARGET
      avx2::EvaluateVectors,
      avx512::EvaluateVectors,
#endif
  };
  size_t count = 1;
#ifdef INTERLACE_VECTORS_BY_TARGET
  if (__builtin_cpu_supports("x86-64-v3")) count = __builtin_cpu_supports("x86-64-v4") ? 3 : 2;
#endif
  return {kAll, count};
}

void EvaluateVectors(const StageSums& sums, StrategyVectors& vectors, Wanted wanted) {
  static const VectorFunction best = VectorFunctions().back();
  best(sums, vectors, wanted);
}

}  // namespace interlace::plan
