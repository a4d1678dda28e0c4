#include "passes/stages/buffers.h"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"

namespace interlace::stages {
namespace {

// A phase under way, and where its backward part begins.
class Edit {
 public:
  Edit(Program& program, Phase& phase) : program_(program), edit_(program, phase), facts_(program, phase) {
    while (first_backward_ < edit_.size() && edit_.op(first_backward_).part != Part::kBackward) ++first_backward_;
  }

 protected:
  Program& program_;
  PhaseEditor edit_;
  const PhaseFacts facts_;
  int32_t first_backward_ = 0;
};

// What stands beside an assignment at the end of a micro-batch only because that reads it (the gather of a value that
// `tensor` cut) goes to where its operands are there, if that is in the forward part.
//   before: %v = add(%w, ..) ..   backward ..   %g = all_gather.start(%v)  all_gather.wait(%g)  assign(%b, %g)
//   after:  %v = add(%w, ..)  %g = all_gather.start(%v)  all_gather.wait(%g) ..   backward ..   assign(%b, %g)
class Values : Edit {
 public:
  using Edit::Edit;

  void Run() {
    for (int32_t i = first_backward_; i < edit_.size(); ++i) {
      const Op& op = edit_.op(i);
      if (op.kind != OpKind::kAssign || program_.value(op.args[0].value).kind != ValueKind::kBuffer) continue;
      std::set<int32_t> ops;
      int32_t there = -1;  // the last op that they need
      if (!Collect(op.args[1].value, i, ops, there) || ops.empty() || there < 0 || !Alone(ops, i)) continue;
      for (int32_t moved : ops) {
        edit_.op(moved).part = Part::kForward;
        edit_.Remove(moved);
        edit_.After(there, edit_.op(moved).id);
      }
    }
    edit_.Finish();
  }

 private:
  // Views and exchanges of the backward part that make `id`. False: it is made of other ops there.
  bool Collect(ValueId id, int32_t assign, std::set<int32_t>& ops, int32_t& there) {
    for (ValueId value : {id, program_.RootOf(id)}) {
      const int32_t def = facts_.def[value];
      if (def < first_backward_ || ops.contains(def)) continue;
      const Op& op = edit_.op(def);
      if (op.kind != OpKind::kView && !(IsStart(op) && op.units.empty())) return false;
      ops.insert(def);
      bool views = true;
      ForEachOperand(op, [&](ValueId operand) { views = views && Collect(operand, assign, ops, there); });
      if (!views) return false;
    }
    const ValueId root = program_.RootOf(id);
    there = std::max(there, facts_.def[root] < first_backward_ ? facts_.def[root] : -1);
    for (int32_t use : facts_.uses[root]) {
      if (use >= first_backward_ && use < assign && IsWait(edit_.op(use)) && facts_.def[root] >= first_backward_)
        ops.insert(use);
    }
    for (int32_t write : facts_.writes[root]) {
      if (write >= first_backward_ && !ops.contains(write)) return false;
      if (write < first_backward_) there = std::max(there, write);
    }
    return true;
  }

  // Whether nothing else reads what these ops make.
  bool Alone(const std::set<int32_t>& ops, int32_t assign) {
    return std::all_of(ops.begin(), ops.end(), [&](int32_t i) {
      const std::vector<ValueId>& results = edit_.op(i).results;
      return std::all_of(results.begin(), results.end(), [&](ValueId id) {
        if (id == kNone || facts_.def[program_.RootOf(id)] < first_backward_) return true;  // a view of what is there
        const std::vector<int32_t>& uses = facts_.uses[program_.RootOf(id)];
        return std::all_of(uses.begin(), uses.end(), [&](int32_t use) { return use == assign || ops.contains(use); });
      });
    });
  }
};

class Changes : Edit {
 public:
  using Edit::Edit;

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
      const ValueId value = edit_.op(i).args[1].value, root = program_.RootOf(value);
      const std::vector<int32_t>& writes = facts_.writes[root];
      if (std::max(facts_.def[root], facts_.def[value]) >= first_backward_ ||
          (!writes.empty() && writes.back() >= first_backward_))
        return -1;
      last = std::max({last, facts_.def[value], facts_.def[root], writes.empty() ? -1 : writes.back()});
      for (int32_t use : facts_.uses[root]) {
        if (use < i && IsWait(edit_.op(use))) last = std::max(last, use);
      }
    }
    return last;
  }

  // What the backward part reads of it is a copy, made beside the op at `place`.
  template <typename Put>
  void Keep(ValueId buffer, int32_t place, const Put& put) {
    std::vector<int32_t> late;
    for (int32_t i : facts_.uses[buffer]) {
      if (i >= first_backward_ && std::ranges::count(facts_.writes[buffer], i) == 0) late.push_back(i);
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
};

}  // namespace

void ChangeBuffersForward(Program& program, Phase& phase) {
  Values(program, phase).Run();
  Changes(program, phase).Run();
}

}  // namespace interlace::stages
