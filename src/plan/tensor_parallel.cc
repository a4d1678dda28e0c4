#include "plan/tensor_parallel.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "ir/op_table.h"
#include "ir/text.h"
#include "plan/cut_values.h"

namespace interlace::plan {
namespace {

using Kind = Cut::Kind;

bool IsProduct(std::string_view name) {
  return name == "aten.mm" || name == "aten.addmm" || name == "aten.bmm" || name == "aten.baddbmm" ||
         name == "aten._grouped_mm";
}

class ShardingPropagation {
 public:
  ShardingPropagation(Program& program, const std::vector<ParallelParameter>& plan)
      : program_(program), phase_(*program.MicroBatchPhase()), plan_(plan), values_(program) {}

  Status Run() {
    const ValueId count = program_.num_values();
    gathered_.assign(count, kNone);
    sum_.assign(count, kNone);
    partial_.assign(count, false);
    gradient_of_.assign(count, kNone);
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      if (op.kind == OpKind::kGrad) gradient_of_[program_.RootOf(op.args[1].value)] = op.args[0].value;
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
  Status Declared() {
    for (const Param& param : program_.params) {
      auto cut =
          std::find_if(plan_.begin(), plan_.end(), [&](const ParallelParameter& p) { return p.name == param.name; });
      if (cut == plan_.end()) continue;
      const Type& type = values_.type(param.value);
      if (cut->dim >= static_cast<int32_t>(type.sizes.size())) {
        return MakeError("the plan cuts dimension ", cut->dim, " of '", param.name, "', which is ",
                         PrintType(program_, type));
      }
      values_.CutAlong(param.value, cut->dim, values_.Number(type.sizes[cut->dim]));
    }
    for (const Input& input : program_.inputs) {
      if (input.name == "hidden" || input.name == "hidden.grad") values_.Set(input.value, Kind::kSequence);
    }
    return Ok{};
  }

  // ---- ops ----

  Status Visit(OpId id) {
    Op& op = program_.op(id);
    bool views = !op.results.empty() && std::all_of(op.results.begin(), op.results.end(),
                                                    [&](ValueId r) { return r == kNone || program_.RootOf(r) != r; });
    if (views) {
      for (ValueId result : op.results) {
        if (result != kNone) values_.Apply(result);
      }
      phase_.ops.push_back(id);
      return Ok{};
    }
    if (op.name == "aten.add.Tensor" && op.named.empty() && op.args.size() == 2 && IsPartial(op.args[0]) &&
        IsPartial(op.args[1])) {
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
    if (Base(op.name) == "aten.embedding" && values_.CutDim(op.args[0].value) == 0) {
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

  // A whole copy of a storage that is cut along the sequence, seen as `id` sees it.
  ValueId Gather(ValueId id) {
    const ValueId root = program_.RootOf(id);
    if (gathered_[root] == kNone) {
      gathered_[root] = Collective(OpKind::kAllGatherStart, root, values_.type(root), {});
    }
    return SeenIn(gathered_[root], id);
  }

  // What `id` is of its root, of another storage of the same sizes.
  ValueId SeenIn(ValueId root, ValueId id) {
    if (program_.RootOf(id) == id) return root;
    Op& view = program_.AddOp("view");
    view.part = part_;
    view.args.push_back(Arg::Of(root));
    ValueId seen = program_.AddView(view, values_.type(id), root, values_.offset(id));
    Known(seen, values_.type(id), values_.offset(id), {});
    values_.Apply(seen);
    phase_.ops.push_back(view.id);
    return seen;
  }

  void GatherOperands(OpId id) {
    std::vector<ValueId> operands;
    ForEachOperand(std::as_const(program_).op(id), [&](ValueId v) { operands.push_back(v); });
    for (ValueId operand : operands) {
      if (values_.KindOf(operand) != Kind::kSequence) continue;
      ValueId whole = Gather(operand);
      ForEachOperand(program_.op(id), [&](ValueId& v) { v = v == operand ? whole : v; });
    }
  }

  // Among the ranks of tp, waited for at once.
  ValueId Collective(OpKind kind, ValueId operand, Type type, Cut cut) {
    Op& start = program_.AddOp(kind);
    start.part = part_;
    start.args.push_back(Arg::Of(operand));
    const ValueId result = program_.AddResult(start, type);
    Known(result, std::move(type), {}, cut);
    Op& wait = program_.AddOp(TraitsOf(kind).partner);
    wait.part = part_;
    wait.args.push_back(Arg::Of(result));
    phase_.ops.push_back(start.id);
    phase_.ops.push_back(wait.id);
    return result;
  }

  void Known(ValueId id, Type type, Dim offset, Cut cut) {
    const auto size = static_cast<size_t>(id) + 1;
    values_.Add(id, std::move(type), offset, cut);
    gathered_.resize(size, kNone);
    sum_.resize(size, kNone);
    partial_.resize(size, false);
    gradient_of_.resize(size, kNone);
  }

  Status Product(OpId id) {
    const bool biased = Base(program_.op(id).name) == "aten.addmm" || Base(program_.op(id).name) == "aten.baddbmm";
    const size_t first = biased ? 1 : 0;
    auto operand = [&](size_t i) { return program_.op(id).args[first + i].value; };
    if (values_.KindOf(operand(0)) == Kind::kParallel || values_.KindOf(operand(1)) == Kind::kParallel)
      GatherOperands(id);
    const ValueId a = operand(0), b = operand(1), result = program_.op(id).results[0];
    phase_.ops.push_back(id);
    INTERLACE_ASSIGN(ProductCut cut, values_.CutOfProduct(a, b, result));
    if (cut.partial) {
      partial_[result] = true;
    } else if (cut.kind == Kind::kParallel) {
      values_.CutAlong(result, cut.dim, cut.period);
    } else {
      values_.Set(result, cut.kind);
    }
    return Ok{};
  }

  // The sum over ranks of a value that is a part of one, cut along the sequence (or whole, where there is none).
  ValueId Summed(ValueId id) {
    const ValueId partial = program_.RootOf(id);
    if (!partial_[partial]) return id;
    if (sum_[partial] == kNone) {
      bool scatters = false;
      for (Dim size : values_.type(partial).sizes) scatters = scatters || values_.Shorter(size) != size;
      sum_[partial] = Collective(scatters ? OpKind::kReduceScatterStart : OpKind::kAllReduceStart, partial,
                                 values_.type(partial), {scatters ? Kind::kSequence : Kind::kWhole, 0, 0});
      values_.Apply(sum_[partial]);
    }
    return SeenIn(sum_[partial], id);
  }

  // Elementwise and the like: results are cut as the operands are.
  Status Other(OpId id) {
    bool parallel = false, sequence = false;
    ForEachOperand(std::as_const(program_).op(id), [&](ValueId v) {
      parallel = parallel || values_.KindOf(v) == Kind::kParallel;
      sequence = sequence || values_.KindOf(v) == Kind::kSequence;
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
        values_.Apply(result);
      } else if (!parallel) {
        values_.Set(result, sequence ? Kind::kSequence : Kind::kWhole);
      } else if (auto [dim, period] = ResultCut(id, result); dim >= 0) {
        values_.CutAlong(result, dim, period);
      }
    }
    return Ok{};
  }

  int32_t GradientCut(ValueId result) const {
    ValueId param = gradient_of_[result];
    bool alike = param != kNone && values_.type(param).sizes == values_.type(result).sizes;
    return alike ? values_.CutDim(param) : -1;
  }

  // The dimension of a result that is cut, and its period; -1 where the cut dimension was reduced.
  std::pair<int32_t, int64_t> ResultCut(OpId id, ValueId result) const {
    const std::vector<Dim>& sizes = values_.type(result).sizes;
    if (int32_t dim = GradientCut(result); dim >= 0) return {dim, values_.Number(sizes[dim])};
    std::vector<ValueId> operands;
    ForEachOperand(program_.op(id), [&](ValueId v) { operands.push_back(v); });
    return values_.CutOfOperands(operands, result);
  }

  // A softmax over a cut dimension needs the largest and the sum of every row from all ranks.
  void SumsOfSoftmax(OpId id) {
    const Op& op = program_.op(id);
    if (!op.name.starts_with("aten._log_softmax") && !op.name.starts_with("aten._softmax")) return;
    const bool backward = op.name.find("_backward") != std::string::npos;
    const size_t at = backward ? 2 : 1;
    if (op.args.size() <= at || op.args[0].kind != Arg::Kind::kValue || op.args[at].kind != Arg::Kind::kInt) return;
    const ValueId x = op.args[0].value;
    const auto rank = static_cast<int64_t>(values_.type(x).sizes.size());
    int64_t dim = op.args[at].integer.value;
    if (dim < 0) dim += rank;
    if (dim != values_.CutDim(x)) return;
    Type rows{DType::kF32, values_.type(x).sizes, {}};
    rows.sizes[dim] = backward ? 1 : 2;
    rows.strides = program_.ContiguousStrides(rows.sizes);
    Collective(OpKind::kAllReduceStart, x, rows, {});
  }

  // A cut parameter's gradient has as many elements as its part of the parameter.
  Status CheckGradients() {
    for (OpId id : phase_.ops) {
      const Op& op = program_.op(id);
      if (op.kind != OpKind::kGrad) continue;
      Result<int64_t> want =
          program_.dims.Evaluate(program_.NumElements(program_.value(op.args[0].value).type), kCheck);
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
  CutValues values_;
  Part part_ = Part::kForward;
  std::vector<ValueId> gathered_;     // by root: its whole copy in this part
  std::vector<bool> partial_;         // by root: a part of a sum over ranks
  std::vector<ValueId> sum_;          // by root: that sum
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
  if (program.MicroBatchPhase() == nullptr) return MakeError("the layer's program has no single micro-batch phase");
  return ShardingPropagation(program, plan).Run();
}

}  // namespace interlace::plan
