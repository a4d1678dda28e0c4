#include "passes/phase_editor.h"

#include "ir/op_table.h"

namespace interlace {

PhaseEditor::PhaseEditor(Program& program, Phase& phase)
    : program_(program),
      phase_(phase),
      old_(phase.ops),
      before_(phase.ops.size()),
      after_(phase.ops.size()),
      removed_(phase.ops.size(), false) {}

void PhaseEditor::Finish() {
  std::vector<OpId> ops;
  ops.reserve(old_.size() * 2);
  for (size_t i = 0; i < old_.size(); ++i) {
    ops.insert(ops.end(), before_[i].begin(), before_[i].end());
    if (!removed_[i]) ops.push_back(old_[i]);
    ops.insert(ops.end(), after_[i].begin(), after_[i].end());
  }
  ops.insert(ops.end(), end_.begin(), end_.end());
  phase_.ops = std::move(ops);
}

PhaseFacts::PhaseFacts(const Program& program, const Phase& phase)
    : def(program.num_values(), -1),
      uses(program.num_values()),
      writes(program.num_values()),
      leaves(program.num_values(), 0) {
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    const Op& op = program.op(phase.ops[i]);
    auto index = static_cast<int32_t>(i);
    auto add = [index](std::vector<int32_t>& list) {
      if (list.empty() || list.back() != index) list.push_back(index);
    };
    ForEachOperand(op, [&](ValueId id) {
      add(uses[program.RootOf(id)]);
      if (op.kind == OpKind::kOutput) leaves[program.RootOf(id)] = 1;
    });
    if (IsWait(op) && op.units.empty()) {  // activations travel: their source is read until here
      ForEachOperand(op, [&](ValueId id) {
        const OpId start = program.value(id).def;
        if (start != kNone)
          ForEachOperand(program.op(start), [&](ValueId source) { add(uses[program.RootOf(source)]); });
      });
    }
    for (ValueId id : WrittenOperands(program, op)) add(writes[program.RootOf(id)]);
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      def[id] = index;
      if (program.value(id).placed) add(writes[program.RootOf(id)]);
    }
  }
  for (ValueId id : phase.Outgoing()) leaves[program.RootOf(id)] = 1;
}

Type FlatType(DType dtype, int64_t count) {
  return Type{dtype, {Dim(count)}, {Dim(1)}};
}

int64_t OffsetIn(int64_t offset, DType from, DType to) {
  return offset * DTypeBytes(from) / DTypeBytes(to);
}

void CopyTags(const Op& from, Op& to) {
  to.part = from.part;
  to.module = from.module;
  to.source = from.source;
  if (const Arg* stage = from.Attr("stage")) to.SetAttr("stage", *stage);  // pass `borders`
}

bool IsPureView(const Program& program, const Op& op) {
  if (op.results.empty() || op.rng || HasEffect(program, op) || (IsOwn(op) && op.kind != OpKind::kView)) return false;
  for (ValueId id : op.results) {
    if (id != kNone && program.RootOf(id) == id) return false;
  }
  return true;
}

bool IsProduct(const Op& op) {
  return op.name == "aten.mm" && op.args.size() == 2 && op.args[0].kind == Arg::Kind::kValue &&
         op.args[1].kind == Arg::Kind::kValue && op.named.empty();
}

std::vector<int32_t> ParamIndex(const Program& program) {
  std::vector<int32_t> index(program.num_values(), -1);
  for (size_t i = 0; i < program.params.size(); ++i) index[program.params[i].value] = static_cast<int32_t>(i);
  return index;
}

}  // namespace interlace
