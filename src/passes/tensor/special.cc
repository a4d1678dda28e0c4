#include "passes/tensor/special.h"

#include <algorithm>
#include <string_view>

#include "passes/tensor/cutter.h"

namespace interlace::tensor {
namespace {

using Kind = Placement::Kind;

bool IsValue(const Op& op, size_t index) {
  return op.args.size() > index && op.args[index].kind == Arg::Kind::kValue;
}

// One number for each row along a dimension.
Geometry OnePerRow(DType dtype, std::vector<int64_t> sizes, int64_t dim, int64_t count = 1) {
  sizes[dim] = count;
  return Contiguous(dtype, std::move(sizes));
}

std::vector<Arg> AlongOf(ValueId value, int64_t dim) {
  return {Arg::Of(value), Arg::List({Arg::Int(dim)}), Arg::Bool(true)};
}

NamedArg ToDtype(DType dtype) {
  return {"dtype", Arg::Word(std::string(DTypeName(dtype)))};
}

}  // namespace

Result<bool> Special::Visit(OpId id) {
  const std::string_view name = BaseName(c_.Read(id).name);
  if (name == "aten.embedding") return Embedding(id);
  if (name == "aten.embedding_dense_backward") return EmbeddingBackward(id);
  if (name == "aten._log_softmax") return LogSoftmax(id);
  if (name == "aten._log_softmax_backward_data") return LogSoftmaxBackward(id);
  if (name == "aten.nll_loss_forward") return NllLoss(id);
  if (name == "aten.nll_loss_backward") return NllLossBackward(id);
  if (name == "aten.native_dropout") return Dropout(id);
  if (name == "aten.as_strided_scatter") return Overwrite(id) ? false : Scatter(id);
  if (c_.Read(id).rng) return Draw(id);
  return false;
}

bool Special::Remembers(const Op& op) {
  const std::string_view name = BaseName(op.name);
  for (std::string_view one : {"aten.embedding", "aten.embedding_dense_backward", "aten._log_softmax_backward_data",
                               "aten.nll_loss_forward", "aten.nll_loss_backward"}) {
    if (name == one) return true;
  }
  return false;
}

void Cutter::AppendRemembered(std::vector<int64_t>& out) const {
  const auto add = [&](const Arg& arg) {
    out.push_back(static_cast<int64_t>(arg.kind));
    out.push_back(arg.integer.value);
  };
  for (const LocalIndex& known : local_indices_) {
    out.insert(out.end(), {known.of, known.rows});
    add(known.other);
    add(known.ignored);
  }
  out.push_back(kNone);
  for (const Counted& known : counted_) {
    out.push_back(known.target);
    add(known.ignored);
  }
  out.push_back(kNone);
  for (const auto& [result, loss] : loss_gradients_) out.insert(out.end(), {result, loss.target, loss.mean});
}

const Cutter::LocalIndex& Special::LocalIndex(ValueId index, int64_t rows, const Arg& other, const Arg* ignored) {
  const Arg left = ignored == nullptr ? Arg::None() : *ignored;
  for (const Cutter::LocalIndex& known : c_.local_indices_) {
    if (known.of == index && known.rows == rows && known.other == other && known.ignored == left) return known;
  }
  const ValueId whole = c_.AsWhole(index);
  const Geometry ints = Contiguous(c_.geometry_[whole].dtype, c_.geometry_[whole].sizes);
  const Geometry bools = Contiguous(DType::kB8, ints.sizes);
  const ValueId local = c_.Emit("aten.sub.Tensor", {Arg::Of(whole), Arg::Int(c_.sizes_.RankTimesPart(rows))}, ints);
  const ValueId below = c_.Emit("aten.lt.Scalar", {Arg::Of(local), Arg::Int(0)}, bools);
  const ValueId above = c_.Emit("aten.ge.Scalar", {Arg::Of(local), Arg::Int(c_.sizes_.Part(rows))}, bools);
  ValueId outside = c_.Emit("aten.logical_or", {Arg::Of(below), Arg::Of(above)}, bools);
  if (ignored != nullptr) {
    const ValueId skipped = c_.Emit("aten.eq.Scalar", {Arg::Of(whole), left}, bools);
    outside = c_.Emit("aten.logical_or", {Arg::Of(outside), Arg::Of(skipped)}, bools);
  }
  const ValueId mine = c_.Emit("aten.masked_fill.Scalar", {Arg::Of(local), Arg::Of(outside), other}, ints);
  c_.local_indices_.push_back({index, rows, other, left, mine, outside});
  return c_.local_indices_.back();
}

// A value seen by a view that has a dimension of length 1 more, the last.
ValueId Special::Column(ValueId id) {
  Geometry column = c_.geometry_[id];
  column.sizes.push_back(1);
  column.strides.push_back(1);
  return SeenAs(id, column);
}

ValueId Special::SeenAs(ValueId id, const Geometry& geometry) {
  Op& view = c_.NewOp("view");
  view.args.push_back(Arg::Of(id));
  const ValueId seen = c_.AddView(view, id, geometry);
  c_.phase_.ops.push_back(view.id);
  return seen;
}

// The next op of the phase is this one, with its results placed so.
void Special::Take(OpId id, Placement placement) {
  for (ValueId result : c_.program_.op(id).results) {
    if (result == kNone) continue;
    c_.placement_[result] = placement;
    c_.Apply(result);
  }
  c_.phase_.ops.push_back(id);
}

// An op that makes what another one made.
void Special::Instead(std::string name, std::vector<Arg> args, ValueId result, Placement placement,
                      std::vector<NamedArg> named) {
  Op& op = c_.NewOp(std::move(name));
  op.args = std::move(args);
  op.named = std::move(named);
  op.results = {result};
  c_.program_.value(result).def = op.id;
  c_.program_.value(result).result_index = 0;
  Take(op.id, placement);
}

// (w, ids, ...), w cut along its rows.
bool Special::Embedding(OpId id) {
  const Op& op = c_.program_.op(id);
  const std::optional<DimCut> cut = IsValue(op, 0) ? c_.CutOf(op.args[0].value) : std::nullopt;
  if (!cut || cut->dim != 0 || cut->blocks != 1) return false;
  const ValueId result = op.results[0], table = op.args[0].value;
  const Cutter::LocalIndex local = LocalIndex(op.args[1].value, c_.geometry_[table].sizes[0], Arg::Int(0), nullptr);
  const Geometry rows = c_.geometry_[result];
  const ValueId found = c_.Emit("aten.embedding", {Arg::Of(table), Arg::Of(local.mine)}, rows);
  const ValueId outside = Column(local.outside);
  Op& sum = c_.program_.op(id);
  sum.SetName("aten.masked_fill.Scalar");
  sum.args = {Arg::Of(found), Arg::Of(outside), Arg::Int(0)};
  sum.named.clear();
  Take(id, {Kind::kSum, 0});
  return true;
}

// (g, ids, rows, padding, scale): where the table is cut by rows, which the gradient of its result says.
bool Special::EmbeddingBackward(OpId id) {
  const Op& op = c_.program_.op(id);
  const ValueId result = op.results[0];
  const Geometry table = c_.geometry_[result];
  if (!IsValue(op, 0) || !IsValue(op, 1) || op.args.size() < 5 || !c_.IsGradientOfRows(result)) return false;
  if (table.sizes[0] % c_.ranks_ != 0 || !(op.args[4] == Arg::Bool(false))) return false;
  const bool pads =
      op.args[3].kind == Arg::Kind::kInt && op.args[3].integer.is_const() && op.args[3].integer.value >= 0;
  const Arg padding = op.args[3];
  const ValueId gradient = c_.AsWhole(op.args[0].value);
  const Cutter::LocalIndex local = LocalIndex(op.args[1].value, table.sizes[0], Arg::Int(0), pads ? &padding : nullptr);
  const ValueId outside = Column(local.outside);
  const Geometry rows = Contiguous(c_.geometry_[gradient].dtype, c_.geometry_[gradient].sizes);
  const ValueId mine = c_.Emit("aten.masked_fill.Scalar", {Arg::Of(gradient), Arg::Of(outside), Arg::Int(0)}, rows);
  Op& sum = c_.program_.op(id);
  sum.args[0] = Arg::Of(mine);
  sum.args[1] = Arg::Of(local.mine);
  sum.args[2] = Arg::Int(c_.sizes_.Part(table.sizes[0]));
  sum.args[3] = Arg::Int(-1);
  Take(id, {Kind::kCut, table.numel()});
  return true;
}

// (x, dim, to f32): y = x - log(sum(exp(x))); of the sum each rank makes its part.
bool Special::LogSoftmax(OpId id) {
  const Op& op = c_.program_.op(id);
  const std::optional<DimCut> cut = IsValue(op, 0) ? c_.CutOf(op.args[0].value) : std::nullopt;
  const ValueId result = op.results[0];
  const Geometry out = c_.geometry_[result];
  const int64_t dim = DimArgument(op, 1, out.sizes.size());
  if (!cut || cut->dim != dim || dim != static_cast<int64_t>(out.sizes.size()) - 1) return false;
  const std::optional<int64_t> period = PeriodOf(out, *cut, c_.ranks_);
  if (!period || !IsDense(out)) return false;
  ValueId x = op.args[0].value;
  if (c_.geometry_[x].dtype != out.dtype)
    x = c_.Emit("aten._to_copy", {Arg::Of(x)}, out, {Kind::kCut, *period}, {ToDtype(out.dtype)});
  const Geometry row = OnePerRow(out.dtype, out.sizes, dim);
  const ValueId part = c_.Emit("aten.logsumexp", AlongOf(x, dim), row);
  const Geometry gathered = OnePerRow(out.dtype, out.sizes, dim, c_.ranks_);
  const ValueId parts = c_.Exchange(OpKind::kAllGatherStart, part, gathered, dim, {});
  Type& type = c_.program_.value(parts).type;
  type.sizes[dim] = c_.sizes_.written_ranks();
  type.strides = c_.program_.ContiguousStrides(type.sizes);
  const ValueId sum = c_.Emit("aten.logsumexp", AlongOf(parts, dim), row);
  Op& difference = c_.program_.op(id);
  difference.SetName("aten.sub.Tensor");
  difference.args = {Arg::Of(x), Arg::Of(sum)};
  difference.named.clear();
  Take(id, {Kind::kCut, *period});
  return true;
}

// (g, y, dim, dtype): g - exp(y) sum(g).
bool Special::LogSoftmaxBackward(OpId id) {
  const Op& op = c_.program_.op(id);
  const ValueId result = op.results[0];
  const Geometry out = c_.geometry_[result];
  const std::optional<DimCut> cut = IsValue(op, 1) ? c_.CutOf(op.args[1].value) : std::nullopt;
  const int64_t dim = DimArgument(op, 2, out.sizes.size());
  if (!cut || cut->dim != dim) return false;
  const std::optional<int64_t> period = PeriodOf(out, *cut, c_.ranks_);
  if (!period || !IsDense(out)) return false;
  const ValueId y = op.args[1].value, g = c_.AsPart(op.args[0].value, *cut);
  const Geometry wide = Contiguous(c_.geometry_[y].dtype, out.sizes);
  const Geometry row = OnePerRow(wide.dtype, out.sizes, dim);
  ValueId sum = kNone;
  if (auto loss = c_.loss_gradients_.find(op.args[0].value); loss != c_.loss_gradients_.end()) {
    sum = RowSums(loss->second, row);
  } else {
    const ValueId part = c_.Emit("aten.sum.dim_IntList", AlongOf(g, dim), row);
    sum = c_.Exchange(OpKind::kAllReduceStart, part, row, -1, {});
  }
  const Placement placed{Kind::kCut, *PeriodOf(wide, *cut, c_.ranks_)};
  const ValueId e = c_.Emit("aten.exp", {Arg::Of(y)}, wide, placed);
  const std::vector<Arg> terms = {Arg::Of(g), Arg::Of(e), Arg::Of(sum)};
  const std::vector<NamedArg> minus = {{"value", Arg::Float(-1.0)}};
  const bool narrows = out.dtype != wide.dtype;
  const ValueId x = narrows ? c_.Emit("aten.addcmul", terms, wide, placed, minus) : kNone;
  Op& last = c_.program_.op(id);
  last.SetName(narrows ? "aten._to_copy" : "aten.addcmul");
  last.args = narrows ? std::vector<Arg>{Arg::Of(x)} : terms;
  last.named = narrows ? std::vector<NamedArg>{ToDtype(out.dtype)} : minus;
  Take(id, {Kind::kCut, *period});
  return true;
}

// Which targets count.
ValueId Special::Counted(ValueId target, const Arg& ignored) {
  for (const Cutter::Counted& known : c_.counted_) {
    if (known.target == target && known.ignored == ignored) return known.which;
  }
  const ValueId whole = c_.AsWhole(target);
  const ValueId which =
      c_.Emit("aten.ne.Scalar", {Arg::Of(whole), ignored}, Contiguous(DType::kB8, c_.geometry_[whole].sizes));
  c_.counted_.push_back({target, ignored, which});
  return which;
}

// The sums over the vocabulary of what nll_loss gives back: it has one number in each row that counts.
ValueId Special::RowSums(const Cutter::LossGradient& of, const Geometry& row) {
  const Geometry scalar = Contiguous(row.dtype, {});
  ValueId one = c_.Emit("aten.neg", {Arg::Of(of.gradient)}, scalar);
  if (of.mean) one = c_.Emit("aten.div.Tensor", {Arg::Of(one), Arg::Of(of.weight)}, scalar);
  const ValueId counted = Counted(of.target, of.ignored);
  const Geometry flat = Contiguous(row.dtype, c_.geometry_[counted].sizes);
  const ValueId ones = c_.Emit("aten._to_copy", {Arg::Of(counted)}, flat, {}, {ToDtype(row.dtype)});
  return SeenAs(c_.Emit("aten.mul.Tensor", {Arg::Of(ones), Arg::Of(one)}, flat), row);
}

// (y, target, no weights, reduction, ignored) → loss, weight: 0 none, 1 mean, 2 sum.
bool Special::NllLoss(OpId id) {
  const Op& op = c_.program_.op(id);
  const std::optional<DimCut> cut = IsValue(op, 0) ? c_.CutOf(op.args[0].value) : std::nullopt;
  const bool plain = op.args.size() == 5 && op.args[2].kind == Arg::Kind::kNone && op.args[3].kind == Arg::Kind::kInt;
  if (!cut || c_.geometry_[op.args[0].value].sizes.size() != 2 || !plain) return false;
  const DimCut of = cut.value_or(DimCut{});
  if (of.dim == 1 && of.blocks != 1) return false;
  const ValueId y = op.args[0].value, loss = op.results[0], weight = op.results[1];
  const int64_t reduction = op.args[3].integer.value;
  if (reduction < 1 || reduction > 2 || loss == kNone || weight == kNone) return false;
  const Arg ignored = op.args[4];
  // Of the rows, each rank sums up its own.
  const ValueId local = of.dim == 0
                            ? c_.AsPart(op.args[1].value, {0, of.blocks})
                            : LocalIndex(op.args[1].value, c_.geometry_[y].sizes[1], Arg::Int(-100), &ignored).mine;
  const Arg skipped = of.dim == 0 ? ignored : Arg::Int(-100);
  const Geometry scalar = Contiguous(c_.geometry_[loss].dtype, {});
  Op& part = c_.NewOp("aten.nll_loss_forward");
  part.args = {Arg::Of(y), Arg::Of(local), Arg::None(), Arg::Int(2), skipped};
  const ValueId sum = c_.AddResult(part, scalar, {});
  c_.AddResult(part, scalar, {});  // the count of this rank's own
  c_.phase_.ops.push_back(part.id);
  const ValueId sums = c_.Exchange(OpKind::kAllReduceStart, sum, scalar, -1, {});
  // The count of all is a matter of the targets, which every rank has: it waits for nobody.
  const ValueId counts =
      c_.Emit("aten.sum", {Arg::Of(Counted(c_.program_.op(id).args[1].value, ignored))}, Contiguous(DType::kI64, {}));
  Instead("aten._to_copy", {Arg::Of(counts)}, weight, {}, {ToDtype(scalar.dtype)});
  Op& mean = c_.program_.op(id);
  mean.SetName(reduction == 1 ? "aten.div.Tensor" : "copy");
  mean.args = {Arg::Of(sums)};
  if (reduction == 1) mean.args.push_back(Arg::Of(weight));
  mean.results = {loss};
  c_.phase_.ops.push_back(id);
  return true;
}

// (g, y, target, no weights, reduction, ignored, weight)
bool Special::NllLossBackward(OpId id) {
  const Op& op = c_.program_.op(id);
  const std::optional<DimCut> cut = IsValue(op, 1) ? c_.CutOf(op.args[1].value) : std::nullopt;
  const bool plain = op.args.size() == 7 && op.args[3].kind == Arg::Kind::kNone && IsValue(op, 0) && IsValue(op, 6);
  const ValueId result = op.results[0];
  if (!cut || *cut != DimCut{1, 1} || !plain || c_.geometry_[result].sizes.size() != 2) return false;
  const std::optional<int64_t> period = PeriodOf(c_.geometry_[result], *cut, c_.ranks_);
  if (!period) return false;
  const ValueId g = c_.AsWhole(op.args[0].value), weight = c_.AsWhole(op.args[6].value);
  const Arg ignored = op.args[5];
  const ValueId target = op.args[2].value;
  if (op.args[4] == Arg::Int(1) || op.args[4] == Arg::Int(2))
    c_.loss_gradients_.emplace(result, Cutter::LossGradient{target, g, weight, ignored, op.args[4] == Arg::Int(1)});
  const ValueId local = LocalIndex(target, c_.geometry_[result].sizes[1], Arg::Int(-100), &ignored).mine;
  Op& mine = c_.program_.op(id);
  mine.args[0] = Arg::Of(g);
  mine.args[2] = Arg::Of(local);
  mine.args[5] = Arg::Int(-100);
  mine.args[6] = Arg::Of(weight);
  Take(id, {Kind::kCut, *period});
  return true;
}

// (x, src, sizes, strides, offset) that leaves nothing of x, as in-place additions are traced: a copy of src.
bool Special::Overwrite(OpId id) {
  const Op& op = c_.program_.op(id);
  if (op.args.size() != 5 || !IsValue(op, 1) || !(op.args[4] == Arg::Int(0))) return false;
  const ValueId src = op.args[1].value, root = c_.program_.RootOf(src);
  const Geometry &from = c_.geometry_[src], out = c_.geometry_[op.results[0]];
  const Type& type = c_.program_.value(src).type;
  auto are = [](const Arg& list, const std::vector<Dim>& dims) {
    return std::equal(list.list.begin(), list.list.end(), dims.begin(), dims.end(),
                      [](const Arg& arg, Dim dim) { return arg == Arg::Int(dim); });
  };
  const bool all = from.numel() == out.numel() && c_.geometry_[root].numel() == from.numel() && from.offset == 0 &&
                   from.strides == Contiguous(from.dtype, from.sizes).strides &&
                   out.strides == Contiguous(out.dtype, out.sizes).strides && are(op.args[2], type.sizes) &&
                   are(op.args[3], type.strides);
  if (!all) return false;
  const ValueId seen = SeenAs(root, out);
  c_.Apply(seen);
  Op& copy = c_.program_.op(id);
  copy.SetName("aten.clone");
  copy.args = {Arg::Of(seen)};
  copy.named = {{"memory_format", Arg::Word("contiguous")}};
  return true;
}

// (x, src, sizes, strides, offset): x but for a view of it, which is src. Where x's cut is one of the view's
// dimensions, as with tokens shifted by one, each rank writes its own part.
bool Special::Scatter(OpId id) {
  const Op& op = c_.program_.op(id);
  if (op.args.size() != 5 || !IsValue(op, 0) || !IsValue(op, 1)) return false;
  const ValueId x = op.args[0].value, src = op.args[1].value, result = op.results[0];
  const Geometry &from = c_.geometry_[src], &out = c_.geometry_[result];
  if (c_.program_.RootOf(x) != x || !IsDense(out) || c_.geometry_[x].strides != out.strides) return false;
  Geometry view{out.dtype, {}, {}, c_.sizes_.Number(op.args[4].integer)};
  for (const Arg& size : op.args[2].list) view.sizes.push_back(c_.sizes_.Number(size.integer));
  for (const Arg& stride : op.args[3].list) view.strides.push_back(c_.sizes_.Number(stride.integer));
  if (view.sizes != from.sizes || view.strides.size() != view.sizes.size()) return false;
  const Placement of_x = c_.placement_[x], of_src = c_.PlacementOf(src);
  DimCut cut{-1, 1};  // of src
  if (!of_src.is_whole()) cut = c_.CutOf(src).value_or(cut);
  int64_t period = of_x.is_cut() ? of_x.period : 0;
  if (cut.dim >= 0 && !of_x.is_cut()) period = cut.blocks == 1 ? view.sizes[cut.dim] * view.strides[cut.dim] : 0;
  if (of_x.is_sum() || of_src.is_sum() || period == 0 || !CutOfView(out, period, c_.ranks_)) return false;
  const std::optional<DimCut> seen = CutOfView(view, period, c_.ranks_);
  if (!seen || (cut.dim >= 0 && !(cut == *seen))) return false;
  const ValueId mine = c_.AsPart(src, *seen);
  Value part;
  c_.sizes_.WritePart(view, *seen, period, part);
  auto list = [](const std::vector<Dim>& dims) {
    std::vector<Arg> items;
    for (const Dim& dim : dims) items.push_back(Arg::Int(dim));
    return Arg::List(std::move(items));
  };
  const ValueId base = of_x.is_cut() ? x : c_.SeenIn(c_.Storage(x, {Kind::kCut, period}), x);
  c_.program_.op(id).args = {Arg::Of(base), Arg::Of(mine), list(part.type.sizes), list(part.type.strides),
                             Arg::Int(part.offset)};
  Take(id, {Kind::kCut, period});
  return true;
}

// A whole value of one number that takes no memory.
ValueId Special::Filled(std::string fill, Geometry whole) {
  const ValueId number =
      c_.Emit(std::move(fill), {Arg::List({})}, Contiguous(whole.dtype, {}), {}, {ToDtype(whole.dtype)});
  whole.strides.assign(whole.strides.size(), 0);
  whole.offset = 0;
  return SeenAs(number, whole);
}

// (x, p, train) → x mask / (1 - p), mask: drawn whole of ones, of which a rank takes its part. The mask, which waits
// for the backward part, is a copy, so that the whole one does not.
bool Special::Dropout(OpId id) {
  const Op& op = c_.program_.op(id);
  if (!IsValue(op, 0) || op.results.size() != 2 || op.results[0] == kNone || op.results[1] == kNone) return false;
  const ValueId x = op.args[0].value, y = op.results[0], mask = op.results[1], root = c_.program_.RootOf(x);
  std::optional<DimCut> cut = c_.CutOf(x);
  if (c_.placement_[root].is_sum()) {
    const int64_t rows = c_.RowPeriod(root);
    if (rows > 0) cut = CutOfView(c_.geometry_[x], rows, c_.ranks_);
  }
  const Geometry out = c_.geometry_[y], bits = c_.geometry_[mask];
  const std::optional<int64_t> period = cut ? PeriodOf(out, *cut, c_.ranks_) : std::nullopt;
  if (!period || !IsDense(out) || out.strides != bits.strides) return false;
  const ValueId part = c_.AsPart(x, *cut);
  Op& draw = c_.program_.op(id);
  draw.args[0] = Arg::Of(Filled("aten.ones", out));
  const ValueId factor = c_.AddResult(draw, out, {}), drawn = c_.AddResult(draw, bits, {});
  draw.results = {factor, drawn};
  c_.phase_.ops.push_back(id);
  const Placement placed{Kind::kCut, *period};
  Instead("aten.mul.Tensor", {Arg::Of(part), Arg::Of(c_.AsPart(factor, *cut))}, y, placed);
  Instead("copy", {Arg::Of(c_.AsPart(drawn, *cut))}, mask, placed);
  return true;
}

// A draw reads no more than the sizes of its operand: zeros stand for it.
bool Special::Draw(OpId id) {
  const Op& op = c_.program_.op(id);
  const std::string_view name = BaseName(op.name);
  if (name != "aten.bernoulli" && name != "aten.rand_like" && name != "aten.randn_like") return false;
  if (name == "aten.bernoulli" && op.args.size() != 2) return false;
  if (!IsValue(op, 0) || c_.PlacementOf(op.args[0].value).is_whole()) return false;
  c_.program_.op(id).args[0] = Arg::Of(Filled("aten.zeros", c_.geometry_[op.args[0].value]));
  c_.phase_.ops.push_back(id);
  return true;
}

}  // namespace interlace::tensor
