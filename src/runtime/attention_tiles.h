// attention_tiles.h — what attention on CPUs does with tiles beside their products. Tiles are row-major; their sides
// are multiples of 16 unless it says otherwise. Scores lie transposed, a line for each column (of the keys) with a lane
// for each row (of the queries), so that a row's largest score and its sum are lane by lane. Sums have a fixed order,
// and no step contracts a*b+c: the bits are the same for every instruction set.
#pragma once

#include <cstdint>

#include "base/clones.h"

namespace interlace::attention_tiles {

inline constexpr int64_t kLanes = 16;
inline constexpr int64_t kRows = 64;  // of a block, at most

inline int64_t RoundUp(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// to[i][j] = from[i][j], 0 beyond `rows` and `width` (any numbers) up to the next multiples of 16.
template <typename E>
void Widen(const E* from, int64_t ld, int64_t rows, int64_t width, MathOf<E>* to, int64_t ld_to);

// to[i][j] = factor * from[i][j] for any numbers of rows and columns.
template <typename E>
void Narrow(const MathOf<E>* from, int64_t ld, int64_t rows, int64_t width, MathOf<E> factor, E* to, int64_t ld_to);

// to[j][i] = from[i][j].
template <typename A>
void Transpose(const A* from, int64_t ld, int64_t rows, int64_t columns, A* to, int64_t ld_to);

// Lines 2i and 2i + 1 become one, number by number in turn: the right factor of a product in bfloat16.
void Pairs(const float* from, int64_t lines, int64_t columns, BFloat16* to);

// Which shares of a head's rows are dropped: a number drawn for each place, the same whenever it is asked for.
template <typename A>
struct Drop {
  uint32_t key;         // of the head
  int32_t below;        // of 2^24: kept
  int64_t row, column;  // of the first lane and line
  A factor;             // of those that are kept
};

// Scores as products give them, and what of them counts.
template <typename A>
struct ScoreTile {
  A* at;  // [lines, lanes]
  int64_t lines, lanes;
  int64_t known;     // lines from this one on are none
  int64_t diagonal;  // line j is seen by lanes from j - diagonal on
  A scale;
  const A* mask;  // [lines, lanes], or nullptr
  const Drop<A>* drop = nullptr;
};

// scores = scale * scores + mask, -inf where they are not seen; largest[lane] of them, -inf where none is a number.
template <typename A>
void Largest(const ScoreTile<A>& scores, A* largest);

// scores = exp(scores - less[lane]), within 2 ulp; their sums are added to sum[lane]. NaN stays; float32 below
// exp(-87.3) is 0. What is dropped is 0 after it was added.
template <typename A>
void ExpSums(const ScoreTile<A>& scores, const A* less, A* sum);

// p = exp(scale * scores + mask - less[lane]), 0 where they are not seen; scores = keep * p, d = p * (keep * d -
// dot[lane]), where keep is 0 or the factor of what is kept, 1 without drops.
template <typename A>
void ScoreGradients(const ScoreTile<A>& scores, const A* less, const A* dot, A* d);

// at[line][lane] *= factor[lane].
template <typename A>
void ScaleLanes(A* at, int64_t lines, int64_t lanes, const A* factor);

// The sum over lines of a * b, lane by lane.
template <typename A>
void Dots(const A* a, const A* b, int64_t lines, int64_t lanes, A* dot);

}  // namespace interlace::attention_tiles
