#include "passes/stages/buffers.h"

#include <algorithm>
#include <map>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"

namespace interlace::stages {
namespace {

class Changes {
 public:
  Changes(Program& program, Phase& phase) : program_(program), edit_(program, phase), facts_(program, phase) {
    first_backward_ = edit_.size();
    for (int32_t i = edit_.size(); i-- > 0;) {
      if (edit_.op(i).part == Part::kBackward) first_backward_ = i;
    }
  }

  void Run() {
    std::map<ValueId, std::vector<int32_t>> changes;  // by buffer
    for (int32_t i = first_backward_; i < edit_.size(); ++i) {
      const Op& op = edit_.op(i);
      if (op.kind == OpKind::kAssign && program_.value(op.args[0].value).kind == ValueKind::kBuffer)
        changes[op.args[0].value].push_back(i);
    }
    std::erase_if(changes, [&](const auto& each) { return Made(each.first, each.second) < 0; });
    for (const auto& [buffer, assigns] : changes) {
      const int32_t front = std::min(facts_.uses[buffer].front(), Made(buffer, facts_.writes[buffer]));
      Keep(buffer, front, [&](OpId clone) { edit_.Before(front, clone); });
    }
    for (const Buffer& buffer : program_.buffers) {
      const std::vector<int32_t>& writes = facts_.writes[buffer.value];
      if (writes.empty() || writes.back() >= first_backward_) continue;
      Keep(buffer.value, writes.back(), [&](OpId clone) { edit_.After(writes.back(), clone); });
    }
    for (const auto& [buffer, assigns] : changes) {
      const int32_t made = Made(buffer, assigns);
      for (int32_t i : assigns) {
        CopyTags(Op(edit_.op(made)), edit_.op(i));
        edit_.Remove(i);
        edit_.After(made, edit_.op(i).id);
      }
    }
    edit_.Finish();
  }

 private:
  // The op behind which the buffer can change; -1: none in the forward part.
  int32_t Made(ValueId buffer, const std::vector<int32_t>& assigns) {
    if (facts_.writes[buffer] != assigns) return -1;
    int32_t last = -1;
    for (int32_t i : facts_.uses[buffer]) {
      if (i < first_backward_) last = std::max(last, i);
    }
    for (int32_t i : assigns) {
      const ValueId root = program_.RootOf(edit_.op(i).args[1].value);
      const std::vector<int32_t>& writes = facts_.writes[root];
      if (facts_.def[root] >= first_backward_ || (!writes.empty() && writes.back() >= first_backward_)) return -1;
      last = std::max({last, facts_.def[root], writes.empty() ? -1 : writes.back()});
    }
    return last;
  }

  // What the backward part reads of it is a copy, made beside the op at `place`.
  template <typename Put>
  void Keep(ValueId buffer, int32_t place, const Put& put) {
    std::vector<int32_t> late;
    for (int32_t i : facts_.uses[buffer]) {
      if (i >= first_backward_ &&
          facts_.writes[buffer].end() == std::find(facts_.writes[buffer].begin(), facts_.writes[buffer].end(), i))
        late.push_back(i);
    }
    if (late.empty()) return;
    const Type type = program_.value(buffer).type;
    Op& clone = AddLike(program_, Op(edit_.op(place)), "aten.clone", {buffer});
    put(clone.id);
    const ValueId copy = program_.AddResult(clone, type);
    for (int32_t i : late) ReadCopy(i, buffer, copy);
  }

  void ReadCopy(int32_t index, ValueId buffer, ValueId copy) {
    std::vector<ValueId> views;
    ForEachOperand(edit_.op(index), [&](ValueId id) {
      if (program_.RootOf(id) == buffer && id != buffer) views.push_back(id);
    });
    std::map<ValueId, ValueId> instead{{buffer, copy}};
    for (ValueId id : views) {
      if (instead.contains(id)) continue;
      const Value of = program_.value(id);
      Op& view = AddLike(program_, Op(edit_.op(index)), OpKind::kView, {copy});
      edit_.Before(index, view.id);
      instead[id] = program_.AddView(view, of.type, copy, of.offset);
    }
    ForEachOperand(edit_.op(index), [&](ValueId& id) {
      if (const auto found = instead.find(id); found != instead.end()) id = found->second;
    });
    for (ValueId id : edit_.op(index).results) {
      if (id != kNone && program_.RootOf(id) == buffer) program_.value(id).root = copy;
    }
  }

  Program& program_;
  PhaseEditor edit_;
  const PhaseFacts facts_;
  int32_t first_backward_ = 0;
};

}  // namespace

void ChangeBuffersForward(Program& program, Phase& phase) {
  Changes(program, phase).Run();
}

}  // namespace interlace::stages
