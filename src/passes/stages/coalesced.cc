#include "passes/stages/coalesced.h"

#include <utility>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"

namespace interlace::stages {
namespace {

bool OfActivations(const Op& op) {
  return TraitsOf(op).family == OpFamily::kCollective && (IsStart(op) || IsWait(op));
}

// Whether the second can ride along with the first.
bool Alike(const Op& a, const Op& b) {
  return a.kind == b.kind && a.attrs == b.attrs && a.lane == b.lane && a.part == b.part;
}

}  // namespace

void TakeApart(Program& program, Phase& phase) {
  std::vector<OpId> ops;
  for (OpId id : phase.ops) {
    const Op op = std::as_const(program).op(id);
    if (!OfActivations(op) || op.args.size() < 2) {
      ops.push_back(id);
      continue;
    }
    for (size_t i = 0; i < op.args.size(); ++i) {
      Op& single = program.AddOp(op.kind);
      CopyTags(op, single);
      single.lane = op.lane;
      single.attrs = op.attrs;
      single.args = {op.args[i]};
      if (IsStart(op)) {
        single.results = {op.results[i]};
        program.value(op.results[i]).def = single.id;
        program.value(op.results[i]).result_index = 0;
      }
      ops.push_back(single.id);
    }
  }
  phase.ops = std::move(ops);
}

void PutTogether(Program& program, Phase& phase) {
  std::vector<OpId> ops;
  for (OpId id : phase.ops) {
    const Op& op = std::as_const(program).op(id);
    const bool joins = !ops.empty() && OfActivations(op) && Alike(std::as_const(program).op(ops.back()), op);
    if (!joins) {
      ops.push_back(id);
      continue;
    }
    Op& first = program.op(ops.back());
    for (size_t i = 0; i < op.args.size(); ++i) {
      first.args.push_back(op.args[i]);
      if (!IsStart(op)) continue;
      Value& value = program.value(op.results[i]);
      value.def = first.id;
      value.result_index = static_cast<int32_t>(first.results.size());
      first.results.push_back(op.results[i]);
    }
  }
  phase.ops = std::move(ops);
}

}  // namespace interlace::stages
