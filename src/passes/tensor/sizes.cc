#include "passes/tensor/sizes.h"

#include <utility>

namespace interlace::tensor {

Sizes::Sizes(Program& program, std::string axis, const Binding& sample)
    : program_(program), axis_(std::move(axis)), sample_(sample) {
  ranks_ = program.AxisSize(axis_);
  written_ranks_ = Dim(ranks_);
  for (const Symbol& symbol : program.symbols) {
    auto found = sample_.find(symbol.name);
    if (found == sample_.end()) continue;
    if (symbol.name == axis_) {
      ranks_ = found->second;
      written_ranks_ = program.dims.Symbol(axis_);
    } else {
      factors_.push_back({found->second, program.dims.Symbol(symbol.name)});
    }
  }
}

int64_t Sizes::Number(Dim dim) {
  if (dim.is_const()) return dim.value;
  const Result<int64_t> number = program_.dims.Evaluate(dim, sample_);
  if (!number.ok()) return -1;
  known_.emplace(*number, dim);
  return *number;
}

Dim Sizes::Product(int64_t number, bool part) {
  Dim out = 1;
  for (const Factor& factor : factors_) {
    while (number > 0 && number % factor.number == 0) {
      number /= factor.number;
      const bool shared = part && factor.number % ranks_ == 0;
      out = program_.dims.Mul(out, shared ? program_.dims.FloorDiv(factor.dim, written_ranks_) : factor.dim);
      part = part && !shared;
    }
  }
  const Dim rest = part && number != 0 ? program_.dims.FloorDiv(Dim(number), written_ranks_) : Dim(number);
  return program_.dims.Mul(out, rest);
}

Dim Sizes::Written(int64_t number) {
  if (factors_.empty()) return Dim(number);
  auto found = known_.find(number);
  return found == known_.end() ? Product(number, false) : found->second;
}

Dim Sizes::Part(int64_t number) {
  if (factors_.empty()) return program_.dims.FloorDiv(Dim(number), written_ranks_);
  auto found = known_.find(number);
  const bool product = found == known_.end() || found->second == Product(number, false);
  return product ? Product(number, true) : program_.dims.FloorDiv(found->second, written_ranks_);
}

Dim Sizes::RankTimesPart(int64_t whole) {
  return program_.dims.Mul(program_.AxisRank(axis_), Part(whole));
}

Type Sizes::TypeOf(const Geometry& geometry) {
  Type type{geometry.dtype, {}, {}};
  for (int64_t size : geometry.sizes) type.sizes.push_back(Written(size));
  for (int64_t stride : geometry.strides) type.strides.push_back(Written(stride));
  return type;
}

void Sizes::WritePart(const Geometry& geometry, DimCut cut, int64_t period, Value& value) {
  DimTable& dims = program_.dims;
  value.type = TypeOf(geometry);
  const Dim part = Part(geometry.sizes[cut.dim] / cut.blocks);
  const Dim step = dims.Mul(part, Written(geometry.strides[cut.dim]));  // a period's
  value.type.sizes[cut.dim] = dims.Mul(Written(cut.blocks), part);
  for (size_t i = 0; i < geometry.strides.size(); ++i) {
    const int64_t stride = geometry.strides[i];
    if (stride < period) continue;  // else whole periods, but for a dimension of length 1, whose stride says nothing
    value.type.strides[i] = stride % period == 0 ? dims.Mul(Written(stride / period), step) : Part(stride);
  }
  value.offset = dims.Add(dims.Mul(Written(geometry.offset / period), step), Written(geometry.offset % period));
}

}  // namespace interlace::tensor
