// update_ops.h — ops of the optimizer step (update.cc, and of whole parameters update_matrices.h, update_factors.h),
// one behind the other at the end of its phase.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ir/op_table.h"
#include "ir/program.h"
#include "passes/phase_editor.h"

namespace interlace {

class UpdateOps {
 protected:
  UpdateOps(Program& program, Phase& phase) : program_(program), phase_(phase) {}

  Op& Add(OpKind kind) { return Append(program_.AddOp(kind)); }
  ValueId Aten(std::string name, std::vector<Arg> args, Type type, std::vector<NamedArg> named = {}) {
    Op& op = Append(program_.AddOp("aten." + std::move(name)));
    op.args = std::move(args);
    op.named = std::move(named);
    return program_.AddResult(op, std::move(type));
  }
  // `offset`: in elements, from where the value begins.
  ValueId View(ValueId value, Type type, Dim offset = Dim(0)) {
    Op& op = Add(OpKind::kView);
    op.args = {Arg::Of(value)};
    const ValueId root = program_.RootOf(value);
    return program_.AddView(op, std::move(type), root, program_.dims.Add(program_.value(value).offset, offset));
  }
  // What the ranks along an axis have of a value, added up.
  ValueId SumOver(std::string_view axis, ValueId value) {
    Op& start = Add(OpKind::kAllReduceStart);
    start.args = {Arg::Of(value)};
    start.SetAttr("axis", Arg::Word(std::string(axis)));
    const Type type = program_.value(value).type;
    const ValueId sum = program_.AddResult(start, type);
    Add(OpKind::kAllReduceWait).args = {Arg::Of(sum)};
    return sum;
  }
  // A step of a group's rule on a unit's elements [begin, end).
  void Rule(UnitId unit, int64_t begin, int64_t end, int32_t group, std::vector<Arg> args, double scale) {
    const UpdateRule& rule = program_.rules[program_.groups[group].rule];
    std::vector<Arg> names;
    for (const std::string& state : rule.states) names.push_back(Arg::Word(state));
    Op& op = Add(OpKind::kUpdateRule);
    op.units = {unit};
    op.args = std::move(args);
    op.SetAttr("rule", Arg::String(rule.name));
    op.SetAttr("states", Arg::List(std::move(names)));
    op.SetAttr("scale", Arg::Float(scale));
    op.SetAttr("ranges", Arg::List({Arg::Int(Dim(begin)), Arg::Int(Dim(end)), Arg::Int(Dim(group))}));
  }
  // Whether there is such a group with a rule.
  bool HasRule(int32_t group) const {
    return group >= 0 && group < static_cast<int32_t>(program_.groups.size()) && program_.groups[group].rule != kNone;
  }

  Program& program_;
  Phase& phase_;

 private:
  Op& Append(Op& op) {
    op.part = Part::kUpdate;
    phase_.ops.push_back(op.id);
    return op;
  }
};

}  // namespace interlace
