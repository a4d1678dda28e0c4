// flow.h — what a cut of a captured program into an upper and a lower part of its model makes of every op.
//
// The forward part is cut by position. A backward op goes as far up as what it reads is there: gradients from above,
// and values and parameters of the forward part where a forward op has used them. So a layer's backward ops end up
// beside its forward ops whatever their order, without a look at modules; what then only serves the lower part (the
// gradient of an embedding) moves down where that sends less.
//
//   forward  f0 f1 | f2 f3          cut between f1 and f2
//   backward b3 b2 | b1 b0          b2 reads the gradient of b3 and what f2 read; b1 reads what f1 read
//
// Not cut are ops that any rank can repeat: what comes of inputs, buffers and constants alone (masks, positions), views
// of declared values, and casts of parameters that are made on shards. They belong to no side.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "ir/program.h"

namespace interlace::stages {

class Flow {
 public:
  // Of the micro-batch phase of a captured program; both must outlive this.
  Flow(const Program& program, const Phase& phase);

  int32_t size() const { return static_cast<int32_t>(phase_.ops.size()); }
  int32_t first_backward() const { return first_backward_; }
  const Op& op(int32_t index) const { return program_.op(phase_.ops[static_cast<size_t>(index)]); }
  // Whether any rank may make the op's results again.
  bool Repeats(int32_t index) const { return repeats_[static_cast<size_t>(index)] != 0; }
  // Index of the op that makes a storage; -1: it is declared.
  int32_t DefOf(ValueId root) const { return def_[static_cast<size_t>(root)]; }
  // The storage that a read of `id` needs: of a cast made on shards the parameter; kNone: there for every rank.
  ValueId NeedOf(ValueId id) const;
  // Of a forward op: where it counts as standing. What comes of parameters alone (a cast) stands where it is first
  // read.
  int32_t PositionOf(int32_t index) const { return position_[static_cast<size_t>(index)]; }
  // The last op that changes a storage, its definition included.
  int32_t LastWrite(ValueId root) const { return last_write_[static_cast<size_t>(root)]; }
  // Of a start that gives one storage: the op that waits for nothing else; -1: there is none.
  int32_t WaitOf(int32_t start) const;
  // Storages that an op needs, each once.
  const std::vector<ValueId>& Needs(int32_t index) const { return needs_[static_cast<size_t>(index)]; }

  // Ops that need a storage.
  const std::vector<int32_t>& Readers(ValueId root) const { return readers_[static_cast<size_t>(root)]; }

  // Of a sum that makes the gradient of a parameter out of parts, and of the op `grad`: the parameter; else kNone.
  ValueId SumsFor(int32_t index) const { return sums_for_[static_cast<size_t>(index)]; }

  // By op: whether it belongs above a border in front of forward op `border`.
  std::vector<char> Above(int32_t border) const;
  // Whether no gradient above is made below, as it is where recomputation goes on from the lower part into the upper,
  // and no buffer that the model changes is used in both.
  bool Fits(const std::vector<char>& above) const;
  // Bytes of gradients that come from above and are read below.
  double Back(const std::vector<char>& above) const;
  // Bytes of storages that come from below each position of the forward part and are read at or behind it; symbols at
  // their largest.
  const std::vector<double>& Crossing() const { return crossing_; }
  double Bytes(ValueId root) const;

 private:
  void FindRepeated();
  void FindPositions();
  void FindCrossing();
  void FindSums(int32_t index, ValueId param);
  bool MoveDown(std::vector<char>& above, const std::vector<char>& there, const std::vector<char>& below) const;

  const Program& program_;
  const Phase& phase_;
  int32_t first_backward_ = 0;
  std::vector<char> repeats_;                  // by op
  std::vector<int32_t> def_, last_write_;      // by root: index of op, or -1
  std::vector<ValueId> param_of_;              // by root: the parameter that it is, or is a cast of
  std::vector<std::vector<ValueId>> needs_;    // by op
  std::vector<std::vector<int32_t>> readers_;  // by root: ops that need it
  std::vector<ValueId> sums_for_;              // by op
  std::vector<int32_t> position_;              // by op
  std::vector<double> crossing_;               // by position
  std::set<ValueId> known_;                    // crosses in the program for more rows, and so here; or empty
  Binding largest_;
};

}  // namespace interlace::stages
