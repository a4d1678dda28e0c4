// cut_values.h — what one of tp tensor-parallel ranks holds of each value of a layer's program: all of it, its part of
// the sequence, or its part of one dimension that came from a weight. Inside the room only; tensor_parallel.h rewrites
// by it.
//
// A storage is cut, and every view of it shows the cut: types and offsets from before the rewrite say which dimension
// of a view steps through the cut one. Sizes are compared at one binding of large primes, so that b, s and widths stay
// apart.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace::plan {

struct Cut {
  enum class Kind : uint8_t { kWhole, kSequence, kParallel };
  Kind kind = Kind::kWhole;
  // kParallel: the cut dimension's stride and extent in elements of the storage, at the binding that is compared at.
  int64_t stride = 0, extent = 0;
};

// What the result of a product holds: a part of a sum over ranks, else cut in one way or whole.
struct ProductCut {
  bool partial = false;
  Cut::Kind kind = Cut::Kind::kWhole;
  size_t dim = 0;  // kParallel
  int64_t period = 0;
};

class CutValues {
 public:
  explicit CutValues(Program& program);  // whole, all of them

  // A value that the rewrite made, with the geometry that it would have on one device.
  void Add(ValueId id, Type type, Dim offset, Cut cut);

  // On one device.
  const Type& type(ValueId id) const { return types_[id]; }
  Dim offset(ValueId id) const { return offsets_[id]; }
  int64_t Number(Dim dim) const;  // at the binding that is compared at

  Cut::Kind KindOf(ValueId id) const { return cuts_[program_.RootOf(id)].kind; }
  // The dimension of a value that is cut, or -1: the outermost one that steps through the cut dimension of its storage,
  // alone or joined with what lies within it.
  int32_t CutDim(ValueId id) const;
  // Of the cut dimension `dim` of a value; a part of the storage (a split) may be shorter.
  int64_t Period(ValueId id, int32_t dim) const;
  Dim Shorter(Dim dim);  // the expression with s//tp in place of s

  // Of a product a b. Error: operands that are cut in ways that do not go together.
  Result<ProductCut> CutOfProduct(ValueId a, ValueId b, ValueId result) const;
  // Of an elementwise operation and the like: the dimension at the place of a cut operand's, counted from the front
  // where sizes agree, else from the back, and its period; -1 where the cut dimension was reduced.
  std::pair<int32_t, int64_t> CutOfOperands(const std::vector<ValueId>& operands, ValueId result) const;

  // Cuts a storage, and gives it that geometry. `period`: what is cut repeats after so many steps of the dimension
  // (heads of every sample, where both are one dimension).
  void CutAlong(ValueId root, size_t dim, int64_t period);
  void Set(ValueId root, Cut::Kind kind);  // whole, or along the sequence
  // Gives a value the geometry that its storage's cut says.
  void Apply(ValueId id);

 private:
  Dim PerRank(Dim size);

  Program& program_;
  const Dim tp_;
  std::vector<Type> types_;   // before the rewrite, by value
  std::vector<Dim> offsets_;  // likewise
  std::vector<Cut> cuts_;     // by root
};

}  // namespace interlace::plan
