#include "plan/cut_values.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <utility>

namespace interlace::plan {
namespace {

// Sizes at which strides are compared: primes that no width of a model is made of.
const Binding kSample = {{"b", 1009}, {"s", 65537}, {"tp", 1}};

}  // namespace

CutValues::CutValues(Program& program) : program_(program), tp_(program.dims.Symbol("tp")) {
  const ValueId count = program.num_values();
  for (ValueId id = 0; id < count; ++id) {
    types_.push_back(program.HasValue(id) ? program.value(id).type : Type{});
    offsets_.push_back(program.HasValue(id) ? program.value(id).offset : Dim());
  }
  cuts_.resize(count);
}

void CutValues::Add(ValueId id, Type type, Dim offset, Cut cut) {
  const auto size = static_cast<size_t>(id) + 1;
  types_.resize(size);
  offsets_.resize(size);
  cuts_.resize(size);
  types_[id] = std::move(type);
  offsets_[id] = offset;
  cuts_[id] = cut;
}

int64_t CutValues::Number(Dim dim) const {
  Result<int64_t> number = program_.dims.Evaluate(dim, kSample);
  return number.ok() ? *number : 0;
}

void CutValues::CutAlong(ValueId root, size_t dim, int64_t period) {
  int64_t stride = Number(types_[root].strides[dim]);
  cuts_[root] = {Cut::Kind::kParallel, stride, stride * period};
  Apply(root);
}

int64_t CutValues::Period(ValueId id, int32_t dim) const {
  const int64_t steps = cuts_[program_.RootOf(id)].extent / std::max<int64_t>(Number(types_[id].strides[dim]), 1);
  return std::min(steps, Number(types_[id].sizes[dim]));
}

int32_t CutValues::CutDim(ValueId id) const {
  const Cut& cut = cuts_[program_.RootOf(id)];
  if (cut.kind != Cut::Kind::kParallel) return -1;
  const Type& type = types_[id];
  int32_t found = -1;
  int64_t largest = 0;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    int64_t stride = Number(type.strides[i]);
    if (stride < cut.extent && stride * Number(type.sizes[i]) > cut.stride && stride > largest) {
      largest = stride;
      found = static_cast<int32_t>(i);
    }
  }
  return found;
}

void CutValues::Set(ValueId root, Cut::Kind kind) {
  cuts_[root].kind = kind;
  Apply(root);
}

Dim CutValues::PerRank(Dim size) {
  return size == Dim(0) ? size : program_.dims.FloorDiv(size, tp_);
}

Dim CutValues::Shorter(Dim dim) {
  if (dim.is_const()) return dim;
  std::string text = program_.dims.ToString(dim), out;
  auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (size_t i = 0; i < text.size();) {
    size_t end = i;
    while (end < text.size() && is_word(text[end])) ++end;
    if (end == i) ++end;
    std::string_view word(text.data() + i, end - i);
    out += word == "s" ? "(s//tp)" : std::string(word);
    i = end;
  }
  Result<Dim> parsed = program_.dims.Parse(out);
  return parsed.ok() ? *parsed : dim;
}

void CutValues::Apply(ValueId id) {
  const Cut& cut = cuts_[program_.RootOf(id)];
  Value& value = program_.value(id);
  if (cut.kind == Cut::Kind::kSequence) {
    for (Dim& size : value.type.sizes) size = Shorter(size);
    for (Dim& stride : value.type.strides) stride = Shorter(stride);
    value.offset = Shorter(value.offset);
  } else if (cut.kind == Cut::Kind::kParallel) {
    const Type& type = types_[id];
    int32_t dim = CutDim(id);
    for (size_t i = 0; i < type.sizes.size(); ++i) {
      if (Number(type.strides[i]) >= cut.extent) value.type.strides[i] = PerRank(type.strides[i]);
    }
    if (dim < 0) return;
    value.type.sizes[dim] = PerRank(type.sizes[dim]);
    // Whole steps of the cut dimension shrink with it, what lies within a step stays.
    if (offsets_[id].is_const() && type.strides[dim].is_const() && type.strides[dim].value > 0) {
      int64_t rest = offsets_[id].value % type.strides[dim].value;
      value.offset = program_.dims.Add(PerRank(offsets_[id].value - rest), rest);
    }
  }
}

Result<ProductCut> CutValues::CutOfProduct(ValueId a, ValueId b, ValueId result) const {
  const auto rank = [&](ValueId v) { return static_cast<int32_t>(types_[v].sizes.size()); };
  const int32_t cut_a = CutDim(a), cut_b = CutDim(b);
  const bool inner_a = cut_a >= 0 && cut_a == rank(a) - 1, inner_b = cut_b >= 0 && cut_b == rank(b) - 2;
  ProductCut out;
  if (inner_a != inner_b) return MakeError("the inner dimension of the product is cut for one operand only");
  if (inner_a) {
    out.partial = true;
    return out;
  }
  if (cut_a < 0 && cut_b < 0) {
    if (KindOf(a) == Cut::Kind::kSequence || KindOf(b) == Cut::Kind::kSequence) out.kind = Cut::Kind::kSequence;
    return out;
  }
  const bool outer = (cut_a >= 0 && cut_a < rank(a) - 2) || (cut_b >= 0 && cut_b < rank(b) - 2);
  if (outer && cut_a != cut_b) return MakeError("the batch of the product is cut for one operand only");
  if (!outer && cut_a >= 0 && cut_b >= 0) return MakeError("both outer dimensions of the product are cut");
  out.kind = Cut::Kind::kParallel;
  out.dim = static_cast<size_t>(outer ? cut_a : rank(result) - (cut_a >= 0 ? 2 : 1));
  out.period = cut_a >= 0 ? Period(a, cut_a) : Period(b, cut_b);
  return out;
}

std::pair<int32_t, int64_t> CutValues::CutOfOperands(const std::vector<ValueId>& operands, ValueId result) const {
  const std::vector<Dim>& sizes = types_[result].sizes;
  std::pair<int32_t, int64_t> found{-1, 0};
  bool exact = false;
  for (ValueId v : operands) {
    const int32_t dim = CutDim(v);
    if (dim < 0) continue;
    const std::vector<Dim>& from = types_[v].sizes;
    const auto count = static_cast<int32_t>(sizes.size());
    for (int32_t at : {dim, dim + count - static_cast<int32_t>(from.size())}) {
      if (at < 0 || at >= count || exact) continue;
      int64_t now = Number(sizes[at]), before = Number(from[dim]);
      exact = now == before;
      // Else joined from several (cat).
      if (exact || (now > 1 && now % before == 0 && found.first < 0)) found = {at, Period(v, dim) * (now / before)};
    }
  }
  return found;
}

}  // namespace interlace::plan
