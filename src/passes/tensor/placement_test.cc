// Placements: which dimension of a view a cut of its storage cuts, and what a rank's part of it looks like. What is
// told by periods is checked against elements, one by one, on random views.
#include "passes/tensor/placement.h"

#include <gtest/gtest.h>

#include <random>

#include "passes/tensor/sizes.h"

namespace interlace::tensor {
namespace {

// A view of the packed part of a storage.
Geometry PartOfView(const Geometry& view, DimCut cut, int64_t period, int64_t ranks) {
  Program program;
  program.mesh = {{"tp", ranks}};
  Value& value = program.AddValue(ValueKind::kInput, {view.dtype, {}, {}});
  const ValueId id = value.id;
  Sizes(program, "tp", {}).WritePart(view, cut, period, value);
  return GeometryOf(program, id, Constant);
}

Geometry View(std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset = 0) {
  return {DType::kF32, std::move(sizes), std::move(strides), offset};
}

Geometry Rows(std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
  return View(std::move(sizes), std::move(strides));
}

// Offsets in the storage of all elements of a view, row-major.
std::vector<int64_t> Elements(const Geometry& g) {
  std::vector<int64_t> out;
  std::vector<int64_t> at(g.sizes.size(), 0);
  for (int64_t n = 0; n < g.numel(); ++n) {
    int64_t offset = g.offset;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * g.strides[d];
    out.push_back(offset);
    for (size_t d = at.size(); d-- > 0 && ++at[d] == g.sizes[d];) at[d] = 0;
  }
  return out;
}

TEST(Placement, OnePeriodSaysEveryCutThatMatters) {
  const Geometry matrix = Rows({32, 64});
  EXPECT_EQ(PeriodOf(matrix, {1, 1}, 2), 64);
  EXPECT_EQ(PeriodOf(matrix, {0, 1}, 2), 2048);
  EXPECT_EQ(PeriodOf(matrix, {0, 2}, 2), 1024);
  EXPECT_EQ(CutOfView(matrix, 1024, 2), (DimCut{0, 2}));
  EXPECT_EQ(CutOfView(matrix, 64, 2), (DimCut{1, 1}));
  EXPECT_EQ(PeriodOf(matrix, {0, 3}, 2), std::nullopt) << "32 rows are no three blocks";
  EXPECT_EQ(PeriodOf(Rows({3, 5}), {1, 1}, 2), std::nullopt);
}

TEST(Placement, HeadsAndFusedBlocks) {
  const Geometry heads = View({2, 4, 16, 16}, {1024, 16, 64, 1});
  ASSERT_EQ(CutOfView(heads, 64, 2), (DimCut{1, 1}));
  const Geometry part = PartOfView(heads, {1, 1}, 64, 2);
  EXPECT_EQ(part.sizes, (std::vector<int64_t>{2, 2, 16, 16}));
  EXPECT_EQ(part.strides, (std::vector<int64_t>{512, 16, 32, 1}));
  const Geometry fused = Rows({32, 192}), key = View({32, 64}, {192, 1}, 64);
  ASSERT_EQ(CutOfView(fused, 64, 2), (DimCut{1, 3}));
  ASSERT_EQ(CutOfView(key, 64, 2), (DimCut{1, 1}));
  const Geometry part_of_key = PartOfView(key, {1, 1}, 64, 2);
  EXPECT_EQ(part_of_key.offset, 32);
  EXPECT_EQ(part_of_key.strides, (std::vector<int64_t>{96, 1}));
  EXPECT_EQ(CutOfView(key, 192, 2), std::nullopt) << "the whole row in two: no part of the keys is a dimension";
  EXPECT_EQ(CutOfView(View({32, 3, 64}, {192, 64, 1}), 64, 2), (DimCut{2, 1}));
}

TEST(Placement, DenseStoragesHaveEachElementOnce) {
  EXPECT_TRUE(IsDense(Rows({3, 4})));
  EXPECT_TRUE(IsDense(View({3, 4}, {1, 3})));
  EXPECT_TRUE(IsDense(View({3, 1, 4}, {4, 99, 1})));
  EXPECT_FALSE(IsDense(View({3, 4}, {5, 1})));
  EXPECT_FALSE(IsDense(View({3, 4}, {0, 1})));
  EXPECT_FALSE(IsDense(View({3, 4}, {4, 1}, 1)));
}

// Rank r has the r-th segment of each period, packed: its part of a view are the elements of the view that lie there.
TEST(Placement, PartsOfViewsAreTheirElements) {
  std::mt19937_64 random(1);
  int cuts = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t ranks = 2 + static_cast<int64_t>(random() % 2);
    std::vector<int64_t> sizes;
    for (size_t d = 0; d < 2 + random() % 2; ++d) sizes.push_back(int64_t{1} << (random() % 3));
    sizes[random() % sizes.size()] *= ranks;
    if (random() % 2) sizes[random() % sizes.size()] *= 3;
    const Geometry storage = Rows(sizes);
    const int64_t numel = storage.numel();
    std::vector<int64_t> periods;
    for (int64_t period = ranks; period <= numel; ++period) {
      if (numel % period == 0 && period % ranks == 0) periods.push_back(period);
    }
    if (periods.empty()) continue;
    const int64_t period = periods[random() % periods.size()], segment = period / ranks;
    Geometry view = storage;
    for (int step = 0; step < 3; ++step) {  // swaps, narrows, splits
      const size_t d = random() % view.sizes.size(), e = random() % view.sizes.size();
      if (random() % 3 == 0) {
        std::swap(view.sizes[d], view.sizes[e]), std::swap(view.strides[d], view.strides[e]);
      } else if (random() % 2 && view.sizes[d] % 2 == 0) {
        view.sizes[d] /= 2;
        if (random() % 2) view.offset += view.sizes[d] * view.strides[d];
      } else if (view.sizes[d] % 2 == 0) {
        view.sizes.insert(view.sizes.begin() + static_cast<ptrdiff_t>(d) + 1, 2);
        view.strides.insert(view.strides.begin() + static_cast<ptrdiff_t>(d) + 1, view.strides[d]);
        view.sizes[d] /= 2;
        view.strides[d] *= 2;
      }
    }
    const std::optional<DimCut> cut = CutOfView(view, period, ranks);
    if (!cut) continue;
    ++cuts;
    const Geometry part = PartOfView(view, *cut, period, ranks);
    ASSERT_EQ(part.numel() * ranks, view.numel());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      std::vector<int64_t> expected;  // of the view, those that lie in this rank's segments, as the rank counts them
      for (int64_t element : Elements(view)) {
        if (element % period / segment == rank) expected.push_back(element / period * segment + element % segment);
      }
      ASSERT_EQ(Elements(part), expected) << "round " << round;
    }
  }
  EXPECT_GT(cuts, 2000);
}

}  // namespace
}  // namespace interlace::tensor
