#include "plan/tensor_parallel.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "ir/text.h"

namespace interlace::plan {
namespace {

// Sizes at which strides are compared: primes that no width of a model is made of.
const Binding kSample = {{"b", 1009}, {"s", 65537}, {"tp", 1}};

struct Cut {
  enum class Kind : uint8_t { kWhole, kSequence, kParallel };
  Kind kind = Kind::kWhole;
  // kParallel: the cut dimension's stride and extent in elements of the storage at kSample.
  int64_t stride = 0, extent = 0;
};
using Kind = Cut::Kind;

bool IsProduct(std::string_view name) {
  return name == "aten.mm" || name == "aten.addmm" || name == "aten.bmm" || name == "aten.baddbmm" || name == "aten._grouped_mm";
}

class Cutter {
 public:
  Cutter(Program& program, const std::vector<ParallelParameter>& plan)
      : program_(program), phase_(*program.FindPhase("micro_batch")), plan_(plan), tp_(program.dims.Symbol("tp")) {}

  Status Run() {
    const ValueId count = program_.num_values();
    for (ValueId id = 0; id < count; ++id) {
      types_.push_back(program_.HasValue(id) ? program_.value(id).type : Type{});
      offsets_.push_back(program_.HasValue(id) ? program_.value(id).offset : Dim());
    }
    cuts_.resize(count);
    gathered_.assign(count, kNone);
    sum_.assign(count, kNone);
    partial_.assign(count, false);
    gradient_of_.assign(count, kNone);
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      if (op.name == "grad") gradient_of_[program_.RootOf(op.args[1].value)] = op.args[0].value;
    }
    INTERLACE_TRY(Declared());
    std::vector<OpId> old = std::move(phase_.ops);
    phase_.ops.clear();
    for (OpId id : old) {
      if (program_.op(id).part == Part::kBackward && part_ != Part::kBackward) {
        part_ = Part::kBackward;
        std::fill(gathered_.begin(), gathered_.end(), kNone);
      }
      Status done = Visit(id);
      if (!done.ok()) {
        Error error = done.error();
        error.where = PrintOp(program_, program_.op(id));
        return error;
      }
    }
    program_.symbols.push_back({"tp", 1, int64_t{1} << 20});
    INTERLACE_TRY(CheckGradients());
    program_.Compact();  // values that nobody uses kept their old geometry
    return Ok{};
  }

 private:
  // ---- what is cut ----

  Status Declared() {
    for (const Param& param : program_.params) {
      auto cut = std::find_if(plan_.begin(), plan_.end(), [&](const ParallelParameter& p) { return p.name == param.name; });
      if (cut == plan_.end()) continue;
      const Type& type = types_[param.value];
      if (cut->dim >= static_cast<int32_t>(type.sizes.size())) {
        return MakeError("the plan cuts dimension ", cut->dim, " of '", param.name, "', which is ", PrintType(program_, type));
      }
      CutAlong(param.value, cut->dim, Number(type.sizes[cut->dim]));
    }
    for (const Input& input : program_.inputs) {
      if (input.name == "hidden" || input.name == "hidden.grad") {
        cuts_[input.value].kind = Kind::kSequence;
        Apply(input.value);
      }
    }
    return Ok{};
  }

  int64_t Number(Dim dim) const {
    Result<int64_t> number = program_.dims.Evaluate(dim, kSample);
    return number.ok() ? *number : 0;
  }

  // `period`: what is cut repeats after so many steps of the dimension (heads of every sample, where both are one dimension).
  void CutAlong(ValueId root, size_t dim, int64_t period) {
    int64_t stride = Number(types_[root].strides[dim]);
    cuts_[root] = {Kind::kParallel, stride, stride * period};
    Apply(root);
  }

  // Of the cut dimension `dim` of a value; a part of the storage (a split) may be shorter.
  int64_t Period(ValueId id, int32_t dim) const {
    const int64_t steps = cuts_[program_.RootOf(id)].extent / std::max<int64_t>(Number(types_[id].strides[dim]), 1);
    return std::min(steps, Number(types_[id].sizes[dim]));
  }

  // The dimension of a value (by its type before the rewrite) that is cut, or -1: the outermost one that steps through the
  // cut dimension of its storage, alone or joined with what lies within it.
  int32_t CutDim(ValueId id) const {
    const Cut& cut = cuts_[program_.RootOf(id)];
    if (cut.kind != Kind::kParallel) return -1;
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

  Dim PerRank(Dim size) { return size == Dim(0) ? size : program_.dims.FloorDiv(size, tp_); }

  // The expression with s//tp in place of s.
  Dim Shorter(Dim dim) {
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

  // Gives a value the geometry that its storage's cut says.
  void Apply(ValueId id) {
    const Cut& cut = cuts_[program_.RootOf(id)];
    Value& value = program_.value(id);
    if (cut.kind == Kind::kSequence) {
      for (Dim& size : value.type.sizes) size = Shorter(size);
      for (Dim& stride : value.type.strides) stride = Shorter(stride);
      value.offset = Shorter(value.offset);
    } else if (cut.kind == Kind::kParallel) {
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

  // ---- ops ----

  Status Visit(OpId id) {
    Op& op = program_.op(id);
    bool views = !op.results.empty() && std::all_of(op.results.begin(), op.results.end(), [&](ValueId r) {
      return r == kNone || program_.RootOf(r) != r;
    });
    if (views) {
      for (ValueId result : op.results) {
        if (result != kNone) Apply(result);
      }
      phase_.ops.push_back(id);
      return Ok{};
    }
    if (op.name == "aten.add.Tensor" && op.named.empty() && op.args.size() == 2 && IsPartial(op.args[0]) && IsPartial(op.args[1])) {
      partial_[op.results[0]] = true;  // one sum over ranks for both
      phase_.ops.push_back(id);
      return Ok{};
    }
    ForEachOperand(op, [&](ValueId& operand) { operand = Summed(operand); });
    if (op.results.empty()) {
      phase_.ops.push_back(id);
      return Ok{};
    }
    if (IsProduct(Base(op.name))) return Product(id);
    if (Base(op.name) == "aten.embedding" && CutDim(op.args[0].value) == 0) {
      phase_.ops.push_back(id);
      partial_[op.results[0]] = true;
      return Ok{};
    }
    return Other(id);
  }

  bool IsPartial(const Arg& arg) const { return arg.kind == Arg::Kind::kValue && partial_[program_.RootOf(arg.value)]; }

  static std::string_view Base(std::string_view name) {
    size_t first = name.find('.');
    return name.substr(0, first == std::string_view::npos ? first : name.find('.', first + 1));
  }

  Cut::Kind KindOf(ValueId id) const { return cuts_[program_.RootOf(id)].kind; }

  // A whole copy of a storage that is cut along the sequence, seen as `id` sees it.
  ValueId Gather(ValueId id) {
    const ValueId root = program_.RootOf(id);
    if (gathered_[root] == kNone) {
      Op& gather = program_.AddOp("tp.all_gather");
      gather.part = part_;
      gather.args.push_back(Arg::Of(root));
      gathered_[root] = AddedResult(gather, types_[root], {});
      phase_.ops.push_back(gather.id);
    }
    return SeenIn(gathered_[root], id);
  }

  // What `id` is of its root, of another storage of the same sizes.
  ValueId SeenIn(ValueId root, ValueId id) {
    if (program_.RootOf(id) == id) return root;
    Op& view = program_.AddOp("view");
    view.part = part_;
    view.args.push_back(Arg::Of(root));
    ValueId seen = program_.AddView(view, types_[id], root, offsets_[id]);
    Known(seen, types_[id], offsets_[id], {});
    Apply(seen);
    phase_.ops.push_back(view.id);
    return seen;
  }

  void GatherOperands(OpId id) {
    std::vector<ValueId> operands;
    ForEachOperand(std::as_const(program_).op(id), [&](ValueId v) { operands.push_back(v); });
    for (ValueId operand : operands) {
      if (KindOf(operand) != Kind::kSequence) continue;
      ValueId whole = Gather(operand);
      ForEachOperand(program_.op(id), [&](ValueId& v) { v = v == operand ? whole : v; });
    }
  }

  ValueId AddedResult(Op& op, Type type, Cut cut) {
    ValueId id = program_.AddResult(op, type);
    Known(id, std::move(type), {}, cut);
    return id;
  }

  void Known(ValueId id, Type type, Dim offset, Cut cut) {
    const auto size = static_cast<size_t>(id) + 1;
    types_.resize(size);
    offsets_.resize(size);
    cuts_.resize(size);
    gathered_.resize(size, kNone);
    sum_.resize(size, kNone);
    partial_.resize(size, false);
    gradient_of_.resize(size, kNone);
    types_[id] = std::move(type);
    offsets_[id] = offset;
    cuts_[id] = cut;
  }

  Status Product(OpId id) {
    const bool biased = Base(program_.op(id).name) == "aten.addmm" || Base(program_.op(id).name) == "aten.baddbmm";
    const size_t first = biased ? 1 : 0;
    auto operand = [&](size_t i) { return program_.op(id).args[first + i].value; };
    if (KindOf(operand(0)) == Kind::kParallel || KindOf(operand(1)) == Kind::kParallel) GatherOperands(id);
    const ValueId a = operand(0), b = operand(1), result = program_.op(id).results[0];
    const auto rank = [&](ValueId v) { return static_cast<int32_t>(types_[v].sizes.size()); };
    const int32_t cut_a = CutDim(a), cut_b = CutDim(b);
    const bool inner_a = cut_a >= 0 && cut_a == rank(a) - 1, inner_b = cut_b >= 0 && cut_b == rank(b) - 2;
    phase_.ops.push_back(id);
    if (inner_a != inner_b) return MakeError("the inner dimension of the product is cut for one operand only");
    if (inner_a) {
      partial_[result] = true;
      return Ok{};
    }
    if (cut_a < 0 && cut_b < 0) {
      bool sequence = KindOf(a) == Kind::kSequence || KindOf(b) == Kind::kSequence;
      cuts_[result].kind = sequence ? Kind::kSequence : Kind::kWhole;
      Apply(result);
      return Ok{};
    }
    const bool outer = (cut_a >= 0 && cut_a < rank(a) - 2) || (cut_b >= 0 && cut_b < rank(b) - 2);
    if (outer && cut_a != cut_b) return MakeError("the batch of the product is cut for one operand only");
    if (!outer && cut_a >= 0 && cut_b >= 0) return MakeError("both outer dimensions of the product are cut");
    CutAlong(result, outer ? cut_a : rank(result) - (cut_a >= 0 ? 2 : 1), cut_a >= 0 ? Period(a, cut_a) : Period(b, cut_b));
    return Ok{};
  }

  // The sum over ranks of a value that is a part of one, cut along the sequence (or whole, where there is none).
  ValueId Summed(ValueId id) {
    const ValueId partial = program_.RootOf(id);
    if (!partial_[partial]) return id;
    if (sum_[partial] == kNone) {
      bool scatters = false;
      for (Dim size : types_[partial].sizes) scatters = scatters || Shorter(size) != size;
      Op& sum = program_.AddOp(scatters ? "tp.reduce_scatter" : "tp.all_reduce");
      sum.part = part_;
      sum.args.push_back(Arg::Of(partial));
      ValueId whole = AddedResult(sum, types_[partial], {scatters ? Kind::kSequence : Kind::kWhole, 0, 0});
      Apply(whole);
      sum_[partial] = whole;
      phase_.ops.push_back(sum.id);
    }
    return SeenIn(sum_[partial], id);
  }

  // Elementwise and the like: results are cut as the operands are.
  Status Other(OpId id) {
    bool parallel = false, sequence = false;
    ForEachOperand(std::as_const(program_).op(id), [&](ValueId v) {
      parallel = parallel || KindOf(v) == Kind::kParallel;
      sequence = sequence || KindOf(v) == Kind::kSequence;
    });
    // The gradient of a cut parameter is cut as it is, whatever it is made of.
    const std::vector<ValueId> results = program_.op(id).results;
    for (ValueId result : results) {
      parallel = parallel || (result != kNone && GradientCut(result) >= 0);
    }
    if (parallel && sequence) GatherOperands(id);
    SumsOfSoftmax(id);
    phase_.ops.push_back(id);
    for (ValueId result : results) {
      if (result == kNone) continue;
      if (program_.RootOf(result) != result) {
        Apply(result);
      } else if (!parallel) {
        cuts_[result].kind = sequence ? Kind::kSequence : Kind::kWhole;
        Apply(result);
      } else if (auto [dim, period] = ResultCut(id, result); dim >= 0) {
        CutAlong(result, dim, period);
      }
    }
    return Ok{};
  }

  int32_t GradientCut(ValueId result) const {
    ValueId param = gradient_of_[result];
    bool alike = param != kNone && types_[param].sizes == types_[result].sizes;
    return alike ? CutDim(param) : -1;
  }

  // The dimension of a result at the place of a cut operand's, counted from the front where sizes agree, else from the back,
  // and its period; -1 where the cut dimension was reduced.
  std::pair<int32_t, int64_t> ResultCut(OpId id, ValueId result) const {
    const std::vector<Dim>& sizes = types_[result].sizes;
    if (int32_t dim = GradientCut(result); dim >= 0) return {dim, Number(sizes[dim])};
    std::pair<int32_t, int64_t> found{-1, 0};
    bool exact = false;
    ForEachOperand(program_.op(id), [&](ValueId v) {
      const int32_t dim = CutDim(v);
      if (dim < 0) return;
      const std::vector<Dim>& from = types_[v].sizes;
      const auto count = static_cast<int32_t>(sizes.size());
      for (int32_t at : {dim, dim + count - static_cast<int32_t>(from.size())}) {
        if (at < 0 || at >= count || exact) continue;
        int64_t now = Number(sizes[at]), before = Number(from[dim]);
        exact = now == before;
        // Else joined from several (cat).
        if (exact || (now > 1 && now % before == 0 && found.first < 0)) found = {at, Period(v, dim) * (now / before)};
      }
    });
    return found;
  }

  // A softmax over a cut dimension needs the largest and the sum of every row from all ranks.
  void SumsOfSoftmax(OpId id) {
    const Op& op = program_.op(id);
    if (!op.name.starts_with("aten._log_softmax") && !op.name.starts_with("aten._softmax")) return;
    const bool backward = op.name.find("_backward") != std::string::npos;
    const size_t at = backward ? 2 : 1;
    if (op.args.size() <= at || op.args[0].kind != Arg::Kind::kValue || op.args[at].kind != Arg::Kind::kInt) return;
    const ValueId x = op.args[0].value;
    const auto rank = static_cast<int64_t>(types_[x].sizes.size());
    int64_t dim = op.args[at].integer.value;
    if (dim < 0) dim += rank;
    if (dim != CutDim(x)) return;
    Type rows{DType::kF32, types_[x].sizes, {}};
    rows.sizes[dim] = backward ? 1 : 2;
    rows.strides = program_.ContiguousStrides(rows.sizes);
    Op& sum = program_.AddOp("tp.all_reduce");
    sum.part = part_;
    sum.args.push_back(Arg::Of(x));
    AddedResult(sum, rows, {});
    phase_.ops.push_back(sum.id);
  }

  // A cut parameter's gradient has as many elements as its part of the parameter.
  Status CheckGradients() {
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      if (op.name != "grad") continue;
      Result<int64_t> want = program_.dims.Evaluate(program_.NumElements(program_.value(op.args[0].value).type), kCheck);
      Result<int64_t> got = program_.dims.Evaluate(program_.NumElements(program_.value(op.args[1].value).type), kCheck);
      if (!want.ok() || !got.ok() || *want != *got) {
        const Param* param = program_.ParamOf(op.args[0].value);
        return Error{"the gradient of '" + (param == nullptr ? std::string("?") : param->name) +
                         "' is not cut as the parameter is: the model's plan for tensor parallelism does not fit it",
                     PrintOp(program_, op)};
      }
    }
    return Ok{};
  }

  inline static const Binding kCheck = {{"b", 2}, {"s", 64}, {"tp", 2}};
  Program& program_;
  Phase& phase_;
  const std::vector<ParallelParameter>& plan_;
  const Dim tp_;
  Part part_ = Part::kForward;
  std::vector<Type> types_;      // before the rewrite, by value
  std::vector<Dim> offsets_;     // likewise
  std::vector<Cut> cuts_;        // by root
  std::vector<ValueId> gathered_;  // by root: its whole copy in this part
  std::vector<bool> partial_;    // by root: a part of a sum over ranks
  std::vector<ValueId> sum_;     // by root: that sum
  std::vector<ValueId> gradient_of_;  // by root: the parameter
};

}  // namespace

int32_t LargestTensorParallel(const ModelText& model) {
  bool cuts = false;
  int64_t largest = std::gcd(model.heads, model.kv_heads);
  const Program& block = model.programs[static_cast<int>(Role::kBlock)];
  for (const Param& param : block.params) {
    for (const ParallelParameter& cut : model.parallel) {
      const std::vector<Dim>& sizes = block.value(param.value).type.sizes;
      if (cut.name != param.name || cut.dim >= static_cast<int32_t>(sizes.size())) continue;
      cuts = true;
      largest = std::gcd(largest, sizes[cut.dim].value);
    }
  }
  return cuts ? static_cast<int32_t>(std::min<int64_t>(largest, 1 << 20)) : 1;
}

Status CutForTensorParallel(Program& program, const std::vector<ParallelParameter>& plan) {
  if (program.FindPhase("micro_batch") == nullptr) return MakeError("the layer's program has no phase micro_batch");
  return Cutter(program, plan).Run();
}

}  // namespace interlace::plan
