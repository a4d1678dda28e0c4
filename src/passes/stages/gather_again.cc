#include "passes/stages/gather_again.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"
#include "passes/stages/flow.h"

namespace interlace::stages {
namespace {

class Again {
 public:
  Again(Program& program, Phase& phase) : program_(program), phase_(phase), before_(phase), flow_(program, before_) {}

  int64_t Run(const std::vector<Turn>& turns) {
    int64_t count = 0;
    for (int32_t i = 0; i < flow_.size(); ++i) {
      const int32_t wait = flow_.op(i).kind == OpKind::kAllGatherStart ? flow_.WaitOf(i) : -1;
      if (wait < 0 || flow_.LastWrite(program_.RootOf(flow_.op(i).args[0].value)) > i) continue;
      const ValueId root = flow_.op(i).results[0];
      std::vector<int32_t> late;
      bool soon = false;
      for (int32_t reader : flow_.Readers(root)) {
        if (reader == wait) continue;
        turns[reader] == Turn::kWeights ? late.push_back(reader) : void(soon = true);
      }
      if (!soon || late.empty()) continue;
      std::sort(late.begin(), late.end());
      Repeat(i, wait, late);
      ++count;
    }
    if (count == 0) return 0;
    phase_.ops.clear();
    for (int32_t i = 0; i < flow_.size(); ++i) {
      const auto in_front = in_front_.find(i);
      if (in_front != in_front_.end())
        phase_.ops.insert(phase_.ops.end(), in_front->second.begin(), in_front->second.end());
      phase_.ops.push_back(before_.ops[static_cast<size_t>(i)]);
    }
    return count;
  }

 private:
  OpId Copy(int32_t index, int32_t like) {
    const Op of = flow_.op(index);
    const Op tags = flow_.op(like);
    Op& op = program_.AddOp(of.kind);
    CopyTags(tags, op);
    op.lane = of.lane;
    op.attrs = of.attrs;
    op.args = of.args;
    return op.id;
  }

  // In front of the first that reads it late.
  void Repeat(int32_t start, int32_t wait, const std::vector<int32_t>& readers) {
    std::vector<OpId>& ops = in_front_[readers[0]];
    const ValueId root = flow_.op(start).results[0];
    const Type type = program_.value(root).type;
    ops.push_back(Copy(start, readers[0]));
    const ValueId again = program_.AddResult(program_.op(ops.back()), type);
    ops.push_back(Copy(wait, readers[0]));
    program_.op(ops.back()).args = {Arg::Of(again)};
    std::map<ValueId, ValueId> views;
    for (int32_t reader : readers) {
      std::vector<ValueId> seen;
      ForEachOperand(flow_.op(reader), [&](ValueId id) {
        if (program_.RootOf(id) == root && id != root) seen.push_back(id);
      });
      for (ValueId id : seen) {
        auto [view, fresh] = views.try_emplace(id, kNone);
        if (!fresh) continue;
        const Value of = program_.value(id);
        Op& op = program_.AddOp(OpKind::kView);
        CopyTags(Op(flow_.op(readers[0])), op);
        op.args = {Arg::Of(again)};
        view->second = program_.AddView(op, of.type, again, of.offset);
        ops.push_back(op.id);
      }
      ForEachOperand(program_.op(before_.ops[static_cast<size_t>(reader)]), [&](ValueId& id) {
        if (id == root) {
          id = again;
        } else if (const auto view = views.find(id); view != views.end()) {
          id = view->second;
        }
      });
    }
  }

  Program& program_;
  Phase& phase_;
  const Phase before_;
  const Flow flow_;
  std::map<int32_t, std::vector<OpId>> in_front_;  // by index in the phase
};

}  // namespace

int64_t GatherAgain(Program& program, Phase& phase, const std::vector<Turn>& turns) {
  return Again(program, phase).Run(turns);
}

void StartAhead(const Program& program, Phase& phase) {
  std::map<ValueId, size_t> made;  // by value: the place of the op that gives it
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    for (ValueId id : program.op(phase.ops[i]).results) {
      if (id != kNone) made[id] = i;
    }
  }
  std::map<size_t, std::vector<OpId>> in_front;  // by place
  std::vector<char> moved(phase.ops.size(), 0);
  size_t wait = phase.ops.size();  // the last one of a gather
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    const Op& op = program.op(phase.ops[i]);
    if (op.kind == OpKind::kAllGatherWait) wait = i;
    if (op.kind != OpKind::kAllGatherStart || wait == phase.ops.size()) continue;
    std::vector<size_t> with;
    bool here = true;  // all that it needs is there from the begin, or a view of that
    ForEachOperand(op, [&](ValueId id) {
      const auto at = made.find(id);
      if (at == made.end() || at->second < wait) return;
      const Op& view = program.op(phase.ops[at->second]);
      here = here && view.kind == OpKind::kView && !made.contains(view.args[0].value);
      with.push_back(at->second);
    });
    if (!here) continue;
    with.push_back(i);
    for (size_t each : with) in_front[wait].push_back(phase.ops[each]), moved[each] = 1;
  }
  std::vector<OpId> ops;
  for (size_t i = 0; i < phase.ops.size(); ++i) {
    if (const auto found = in_front.find(i); found != in_front.end())
      ops.insert(ops.end(), found->second.begin(), found->second.end());
    if (moved[i] == 0) ops.push_back(phase.ops[i]);
  }
  phase.ops = std::move(ops);
}

}  // namespace interlace::stages
