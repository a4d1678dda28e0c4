// placement.h — what a rank of a tensor-parallel axis holds of a storage, and what a view of it then shows.
//
// A storage of P ranks is whole, a part of a sum over the ranks, or cut: it is a row of periods of L elements, and of
// each period a rank holds one of P equal segments, packed one after the other. One number says every cut that matters:
//
//   f32[32,64], P = 2     L = 64: columns are cut          L = 2048: rows are cut in two
//                         L = 1024: rows are cut in each of two blocks of 16 (the sequence of each sample)
//
// A view of a cut storage has a cut dimension when one of its dimensions steps exactly through the periods:
//
//   view f32[2,4,16,16]{1024,16,64,1}, L = 64: dimension 1 (4 heads of 16) is cut      → f32[2,2,16,16]{512,16,32,1}
//   view f32[32,192] of fused q, k, v, L = 64: dimension 1 is cut in each of 3 blocks  → f32[32,96]
//
// Geometry is that of one device, before the rewrite; elements of the storage's own dtype.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "ir/program.h"

namespace interlace::tensor {

struct Placement {
  enum class Kind : uint8_t { kWhole, kCut, kSum };  // kSum: the storage is the sum of what the ranks hold
  Kind kind = Kind::kWhole;
  int64_t period = 0;  // kCut
  bool is_whole() const { return kind == Kind::kWhole; }
  bool is_cut() const { return kind == Kind::kCut; }
  bool is_sum() const { return kind == Kind::kSum; }
  friend bool operator==(const Placement&, const Placement&) = default;
};

// A dimension in equal parts, one a rank, of each of its equal blocks.
struct DimCut {
  int32_t dim = 0;
  int64_t blocks = 1;
  friend bool operator==(const DimCut&, const DimCut&) = default;
};

struct Geometry {
  DType dtype = DType::kF32;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool foreign = false;  // a view of a storage of elements of another size (complex numbers as pairs): it shows no cut
  int64_t numel() const;
  int64_t bytes() const { return numel() * DTypeBytes(dtype); }
};

Geometry Contiguous(DType dtype, std::vector<int64_t> sizes);

// A program's values as numbers, before the rewrite.
struct Layout {
  std::vector<Geometry> geometry;           // by value; empty: a size is no number
  std::vector<std::vector<ValueId>> views;  // by root, itself included
};
// `number`: a size as a number, or below 0.
using NumberOf = std::function<int64_t(Dim)>;
Geometry GeometryOf(const Program& program, ValueId id, const NumberOf& number);
Layout LayoutOf(const Program& program, const NumberOf& number);
// A size that is written as a number.
int64_t Constant(Dim dim);

// Whether a storage of this geometry has each element once and nothing between them, in whatever order.
bool IsDense(const Geometry& geometry);

// The dimension of a view that a cut of its storage cuts; nullopt: its part is not a dimension's.
std::optional<DimCut> CutOfView(const Geometry& view, int64_t period, int64_t ranks);

// The period of a dense storage whose view is cut so; nullopt: it cannot be cut in equal parts.
std::optional<int64_t> PeriodOf(const Geometry& view, DimCut cut, int64_t ranks);

}  // namespace interlace::tensor
