#include "passes/tensor/placement.h"

#include <algorithm>
#include <utility>

namespace interlace::tensor {

int64_t Geometry::numel() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

Geometry Contiguous(DType dtype, std::vector<int64_t> sizes) {
  Geometry out{dtype, std::move(sizes), {}, 0};
  out.strides.assign(out.sizes.size(), 1);
  for (size_t d = out.sizes.size(); d-- > 1;) out.strides[d - 1] = out.strides[d] * out.sizes[d];
  return out;
}

int64_t Constant(Dim dim) {
  return dim.is_const() ? dim.value : -1;
}

Geometry GeometryOf(const Program& program, ValueId id, const NumberOf& number) {
  const Value& value = program.value(id);
  Geometry out{value.type.dtype, {}, {}, number(value.offset)};
  out.foreign = DTypeBytes(out.dtype) != DTypeBytes(program.value(program.RootOf(id)).type.dtype);
  bool known = out.offset >= 0;
  auto add = [&](std::vector<int64_t>& numbers, Dim dim) {
    numbers.push_back(number(dim));
    known = known && numbers.back() >= 0;
  };
  for (Dim size : value.type.sizes) add(out.sizes, size);
  for (Dim stride : value.type.strides) add(out.strides, stride);
  return known ? out : Geometry{};
}

Layout LayoutOf(const Program& program, const NumberOf& number) {
  const auto count = static_cast<size_t>(program.num_values());
  Layout out{std::vector<Geometry>(count), std::vector<std::vector<ValueId>>(count)};
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (!program.HasValue(id)) continue;
    out.geometry[id] = GeometryOf(program, id, number);
    out.views[program.RootOf(id)].push_back(id);
  }
  return out;
}

bool IsDense(const Geometry& geometry) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t i = 0; i < geometry.sizes.size(); ++i) {
    if (geometry.sizes[i] != 1) steps.emplace_back(geometry.strides[i], geometry.sizes[i]);
  }
  std::sort(steps.begin(), steps.end());
  int64_t next = 1;
  for (const auto& [stride, size] : steps) {
    if (stride != next) return false;
    next *= size;
  }
  return geometry.offset == 0;
}

std::optional<DimCut> CutOfView(const Geometry& view, int64_t period, int64_t ranks) {
  if (view.foreign) return std::nullopt;
  const int64_t segment = period / ranks;
  std::optional<DimCut> found;
  int64_t step = 0;
  for (size_t i = 0; i < view.sizes.size(); ++i) {
    const int64_t size = view.sizes[i], stride = view.strides[i];
    if (size == 1 || stride == 0 || stride >= period) continue;
    if (segment % stride != 0 || size * stride % period != 0) continue;
    if (found) return std::nullopt;  // dimensions that overlap
    found = DimCut{static_cast<int32_t>(i), size * stride / period};
    step = stride;
  }
  if (!found) return std::nullopt;
  // All other dimensions step over periods, or stay within one step of the cut one.
  int64_t inside = view.offset % period;
  for (size_t i = 0; i < view.sizes.size(); ++i) {
    const int64_t size = view.sizes[i], stride = view.strides[i];
    if (size == 1 || stride == 0 || static_cast<int32_t>(i) == found->dim) continue;
    if (stride < step) {
      inside += (size - 1) * stride;
    } else if (stride % period != 0) {
      return std::nullopt;
    }
  }
  if (inside >= step) return std::nullopt;
  return found;
}

std::optional<int64_t> PeriodOf(const Geometry& view, DimCut cut, int64_t ranks) {
  const int64_t size = view.sizes[cut.dim], stride = view.strides[cut.dim];
  if (size % cut.blocks != 0 || size / cut.blocks % ranks != 0 || stride == 0) return std::nullopt;
  const int64_t period = size / cut.blocks * stride;
  if (CutOfView(view, period, ranks) != cut) return std::nullopt;
  return period;
}

}  // namespace interlace::tensor
