// phase_editor.h — inserts ops between the ops of a phase and removes some, with positions that stay those of the old
// list.
//
//   PhaseEditor edit(program, phase);      ops: a b c
//   edit.Before(1, x); edit.After(1, y);   Finish(): a x b y c
//   edit.Remove(2);                        Finish(): a x b y
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "ir/program.h"

namespace interlace {

class PhaseEditor {
 public:
  PhaseEditor(Program& program, Phase& phase);

  int32_t size() const { return static_cast<int32_t>(old_.size()); }
  Op& op(int32_t index) { return program_.op(old_[index]); }
  // What is inserted at one place keeps the order of the calls.
  void Before(int32_t index, OpId op) { before_[index].push_back(op); }
  void After(int32_t index, OpId op) { after_[index].push_back(op); }
  void AtEnd(OpId op) { end_.push_back(op); }
  void Remove(int32_t index) { removed_[index] = true; }
  // Writes the new list into the phase.
  void Finish();

 private:
  Program& program_;
  Phase& phase_;
  std::vector<OpId> old_, end_;
  std::vector<std::vector<OpId>> before_, after_;
  std::vector<bool> removed_;
};

// Where the storages of a phase are defined, read and written, as indices into its op list, ascending.
struct PhaseFacts {
  PhaseFacts(const Program& program, const Phase& phase);
  std::vector<int32_t> def;                  // by value; -1: not defined in this phase
  std::vector<std::vector<int32_t>> uses;    // by root: ops with an operand in the storage
  std::vector<std::vector<int32_t>> writes;  // by root: ops that write it after its definition
  std::vector<char> leaves;                  // by root: given to the next phase, or an output of the step
};

// A flat type of `count` elements.
Type FlatType(DType dtype, int64_t count);
// An offset counted in elements of `from`, in elements of `to`; exact for multiples of kUnitAlignment.
int64_t OffsetIn(int64_t offset, DType from, DType to);
// Part, module and source line of an op go to one made for it.
void CopyTags(const Op& from, Op& to);
// A new op, by kind or name, made for `like`: with its tags and these operands. It is in no phase yet.
template <typename KindOrName>
Op& AddLike(Program& program, const Op& like, KindOrName what, std::initializer_list<ValueId> operands = {}) {
  Op& op = program.AddOp(std::move(what));
  CopyTags(like, op);
  for (ValueId operand : operands) op.args.push_back(Arg::Of(operand));
  return op;
}
// Whether all the op does is to give other geometries of storages of its operands.
bool IsPureView(const Program& program, const Op& op);
// aten.mm of two values: aten.addmm_ adds its result to something in place.
bool IsProduct(const Op& op);
// The index of every value that is a parameter in Program::params, else -1.
std::vector<int32_t> ParamIndex(const Program& program);

}  // namespace interlace
