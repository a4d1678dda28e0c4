// Sums over the ranks: what stays one, and when those of gradients are made.
#include <algorithm>
#include <map>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"
#include "passes/tensor/cutter.h"

namespace interlace::tensor {

using Kind = Placement::Kind;

// Whether what an op makes of parts of a sum, in operands in which it is linear, are parts of the sum of what it makes.
// Where sums cost, it is left to WaysOf when other operands are there, too.
bool Cutter::StaysSum(const std::vector<ValueId>& operands, const std::vector<bool>& linear) const {
  bool any = false;
  for (size_t i = 0; i < operands.size(); ++i) {
    const ValueId root = program_.RootOf(operands[i]);
    const Placement& placement = placement_[root];
    if (!linear[i]) {
      if (options_.sums_cost || !placement.is_whole()) return false;
    } else if (placement.is_sum()) {
      if (copies_.count({root, RowPeriod(root)}) != 0) return false;
      any = true;
    } else if (!placement.is_whole() || !IsZero(root)) {
      return false;
    }
  }
  return any;
}

bool Cutter::IsZero(ValueId root) const {
  const OpId def = std::as_const(program_).value(root).def;
  if (def == kNone) return false;
  const Op& op = Read(def);
  const std::string_view name = BaseName(op.name);
  if (name == "aten.zeros" || name == "aten.zeros_like" || name == "aten.new_zeros") return true;
  const size_t at = name == "aten.scalar_tensor" ? 0 : name == "aten.full" || name == "aten.full_like" ? 1 : 2;
  return at < 2 && op.args.size() > at && tensor::IsZero(op.args[at]);
}

// A gradient is placed as its parameter is.
void Cutter::Grad(OpId id) {
  const ValueId param = Read(id).args[0].value, value = Read(id).args[1].value;
  if (std::optional<DimCut> cut = CutOf(param)) {
    const ValueId part = AsPart(value, *cut);
    if (part != value) program_.op(id).args[1].value = part;
  } else if (PlacementOf(value).is_sum() && geometry_[value].bytes() < options_.bucket &&
             copies_.count({program_.RootOf(value), 0}) == 0) {
    sums_behind_.emplace_back(id, value);
    return;
  } else {
    const ValueId whole = AsWhole(value);
    if (whole != value) program_.op(id).args[1].value = whole;
  }
  phase_.ops.push_back(id);
}

void Cutter::SumGradients(const Op& op) {
  const std::vector<ValueId> results = op.results;
  for (ValueId result : results) {
    const bool gradient = result != kNone && static_cast<size_t>(result) < gradients_.size() && gradients_[result];
    if (gradient && placement_[result].is_sum()) Storage(result, {});
  }
}

// Small gradients of whole parameters (norms, biases) are many: one transfer for all of a dtype.
Status Cutter::End() {
  std::map<DType, std::vector<ValueId>> roots;
  for (const auto& [grad, value] : sums_behind_) {
    std::vector<ValueId>& of_type = roots[geometry_[value].dtype];
    const ValueId root = program_.RootOf(value);
    if (std::find(of_type.begin(), of_type.end(), root) == of_type.end()) of_type.push_back(root);
  }
  for (const auto& [dtype, values] : roots) {
    Op& start = program_.AddOp(OpKind::kAllReduceStart);
    start.part = Part::kBackward;
    start.SetAttr("axis", Arg::Word(options_.axis));
    Op& wait = program_.AddOp(OpKind::kAllReduceWait);
    wait.part = Part::kBackward;
    std::vector<OpId> views;
    for (ValueId root : values) {
      const Geometry& own = geometry_[root];
      if (!IsDense(own)) return MakeError("a sum over ranks with gaps between its elements");
      Geometry flat{own.dtype, {own.numel()}, {1}, 0};
      Op& view = program_.AddOp(OpKind::kView);
      view.part = Part::kBackward;
      view.args.push_back(Arg::Of(root));
      start.args.push_back(Arg::Of(AddView(view, root, flat)));
      views.push_back(view.id);
      const ValueId sum = AddResult(start, flat, {});
      wait.args.push_back(Arg::Of(sum));
      copies_[{root, 0}] = sum;
    }
    phase_.ops.insert(phase_.ops.end(), views.begin(), views.end());
    phase_.ops.push_back(start.id);
    phase_.ops.push_back(wait.id);
  }
  for (const auto& [grad, value] : sums_behind_) {
    current_ = &program_.op(grad);
    const ValueId whole = AsWhole(value);
    program_.op(grad).args[1].value = whole;
    phase_.ops.push_back(grad);
  }
  return Ok{};
}

}  // namespace interlace::tensor
