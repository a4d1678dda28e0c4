// What makes a value fit: transfers between placements, slices of what is whole, views of another storage.
#include <algorithm>
#include <utility>

#include "ir/op_table.h"
#include "passes/phase_editor.h"
#include "passes/tensor/cutter.h"

namespace interlace::tensor {
namespace {
using Kind = Placement::Kind;

// Kernels that take the elements of a mean or a deviation one after the other in memory, whatever the strides say.
bool ReadsMemoryInOrder(std::string_view name) {
  return BaseName(name) == "aten.native_layer_norm_backward" || BaseName(name) == "aten.native_group_norm_backward";
}

}  // namespace

ValueId Cutter::AsWhole(ValueId id) {
  const ValueId root = program_.RootOf(id);
  if (placement_[root].is_whole()) return id;
  return SeenIn(Storage(root, {}), id);
}

ValueId Cutter::AsPart(ValueId id, DimCut cut) {
  const ValueId root = program_.RootOf(id);
  const Geometry& geometry = geometry_[id];
  const int64_t size = geometry.sizes[cut.dim], stride = geometry.strides[cut.dim];
  const std::optional<int64_t> period = PeriodOf(geometry, cut, ranks_);
  const Placement& placement = placement_[root];
  if (placement.is_cut() && period == placement.period) return id;
  if (period && copies_.count({root, *period}) != 0) return SeenIn(copies_[{root, *period}], id);
  if (placement.is_sum() && period && IsDense(geometry_[root])) return SeenIn(Storage(root, {Kind::kCut, *period}), id);
  const ValueId whole = AsWhole(id);
  // Of what is whole a rank takes its part where it lies: a view, which has gaps where an outer dimension is not cut.
  const bool gaps =
      std::any_of(geometry.sizes.begin(), geometry.sizes.begin() + cut.dim, [](int64_t n) { return n > 1; });
  const bool packed = gaps && period && current_ != nullptr && ReadsMemoryInOrder(current_->name);
  if (stride == 0 || (cut.blocks == 1 && !packed)) {
    Op& op = NewOp("view");
    op.args.push_back(Arg::Of(whole));
    Geometry part = geometry;
    part.sizes[cut.dim] = size / ranks_;
    const ValueId seen = AddView(op, program_.RootOf(whole), part);
    if (stride != 0)
      program_.value(seen).offset = program_.dims.Add(sizes_.Written(part.offset), sizes_.RankTimesPart(size * stride));
    program_.value(seen).type.sizes[cut.dim] = sizes_.Part(size);
    phase_.ops.push_back(op.id);
    return seen;
  }
  if (!period) {  // a view whose storage has no such cut, as a diagonal: of a copy
    const Geometry copy = Contiguous(geometry.dtype, geometry.sizes);
    return AsPart(Emit("aten.clone", {Arg::Of(whole)}, copy, {}, {{"memory_format", Arg::Word("contiguous")}}), cut);
  }
  const ValueId dense = Storage(program_.RootOf(whole), {Kind::kCut, *period});
  return SeenIn(dense, id);
}

// All transfers see a storage as rows of a period each, [numel / L, L], or flat where it is one.
ValueId Cutter::Storage(ValueId root, Placement wanted) {
  const Placement from = placement_[root];
  if (auto known = copies_.find({root, wanted.period}); known != copies_.end()) return known->second;
  const int64_t period = wanted.is_cut() ? wanted.period : from.is_cut() ? from.period : geometry_[root].numel();
  const int64_t rows = geometry_[root].numel() / period;
  Geometry whole{geometry_[root].dtype, {rows, period}, {period, 1}, 0};
  if (rows == 1) whole.sizes = {period}, whole.strides = {1};
  const auto dim = static_cast<int64_t>(whole.sizes.size()) - 1;
  Op& view = NewOp("view");
  view.args.push_back(Arg::Of(root));
  Type seen = sizes_.TypeOf(whole);
  if (from.is_cut()) {
    seen.sizes[dim] = sizes_.Part(period);
    seen.strides = program_.ContiguousStrides(seen.sizes);
  }
  const ValueId operand = program_.AddView(view, std::move(seen), root, Dim(0));
  Know(operand, whole);
  phase_.ops.push_back(view.id);
  ValueId result = kNone;
  if (from.is_sum()) {
    result = wanted.is_cut() ? Exchange(OpKind::kReduceScatterStart, operand, whole, dim, wanted)
                             : Exchange(OpKind::kAllReduceStart, operand, whole, -1, wanted);
  } else if (from.is_cut() && wanted.is_whole()) {
    result = Exchange(OpKind::kAllGatherStart, operand, whole, dim, wanted);
  } else {  // whole to cut: a copy of this rank's segments
    Op& slice = NewOp("view");
    slice.args.push_back(Arg::Of(operand));
    Geometry strided = whole;
    strided.sizes[dim] = period / ranks_;
    const ValueId mine = AddView(slice, root, strided);
    program_.value(mine).type.sizes[dim] = sizes_.Part(period);
    program_.value(mine).offset = sizes_.RankTimesPart(period);
    phase_.ops.push_back(slice.id);
    Op& copy = NewOp("copy");
    copy.args.push_back(Arg::Of(mine));
    result = AddResult(copy, whole, wanted);
    phase_.ops.push_back(copy.id);
  }
  const auto before = seen_as_.find(root);
  seen_as_[result] = before == seen_as_.end() ? root : before->second;
  copies_[{root, wanted.period}] = result;
  return result;
}

ValueId Cutter::Exchange(OpKind kind, ValueId operand, const Geometry& result, int64_t dim, Placement placement) {
  Op& start = program_.AddOp(kind);
  if (current_ != nullptr) CopyTags(*current_, start);
  start.part = part_;
  start.args.push_back(Arg::Of(operand));
  start.SetAttr("axis", Arg::Word(options_.axis));
  if (dim >= 0) start.SetAttr("dim", Arg::Int(dim));
  const ValueId value = AddResult(start, result, placement);
  phase_.ops.push_back(start.id);
  phase_.ops.push_back(AddLike(program_, start, TraitsOf(kind).partner, {value}).id);
  return value;
}

ValueId Cutter::SeenIn(ValueId root, ValueId id) {
  Op& view = NewOp("view");
  view.args.push_back(Arg::Of(root));
  const ValueId seen = AddView(view, root, geometry_[id]);
  phase_.ops.push_back(view.id);
  Apply(seen);
  return seen;
}

ValueId Cutter::AddResult(Op& op, const Geometry& geometry, Placement placement) {
  const ValueId id = program_.AddResult(op, sizes_.TypeOf(geometry));
  Know(id, geometry);
  placement_[id] = placement;
  Apply(id);
  return id;
}

ValueId Cutter::AddView(Op& op, ValueId root, const Geometry& geometry) {
  const ValueId id = program_.AddView(op, sizes_.TypeOf(geometry), root, sizes_.Written(geometry.offset));
  Know(id, geometry);
  return id;
}

Op& Cutter::NewOp(std::string name) {
  Op& op = program_.AddOp(std::move(name));
  if (current_ != nullptr) CopyTags(*current_, op);
  op.part = part_;
  return op;
}

ValueId Cutter::Emit(std::string name, std::vector<Arg> args, const Geometry& geometry, Placement placement,
                     std::vector<NamedArg> named) {
  Op& op = NewOp(std::move(name));
  op.args = std::move(args);
  op.named = std::move(named);
  const ValueId id = AddResult(op, geometry, placement);
  phase_.ops.push_back(op.id);
  return id;
}

void Cutter::Know(ValueId id, Geometry geometry) {
  const auto size = static_cast<size_t>(id) + 1;
  if (placement_.size() < size) {
    placement_.resize(size);
    unseen_.resize(size);
  }
  geometry_.Add(id, std::move(geometry));
}

}  // namespace interlace::tensor
