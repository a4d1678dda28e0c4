// transfers.h — the collectives of one phase as things a pass moves and merges; every other op keeps its place.
//
// Ops that stay are the skeleton. What moves sits in the gaps before its ops (gap i: before skeleton op i; gap size():
// the end), within one gap by `order`:
//
//   phase                          skeleton                 moves
//   %1 = gather.start(%s)                                   gather at 0, need 0
//   gather.wait(%1)                0  gather.wait(%1)
//   %2 = aten.mm(%x, %1)           1  aten.mm
//   release(%1)                    2  release(%1)
//   %3 into %g = aten.mm(..)       3  aten.mm
//   %4 = reduce.start(%g)                                   reduce at 4, ready 4
//   %5 = aten.mm(..)               4  aten.mm
//   reduce.wait(%4)  release(%g)                            its tail, wait 5
//
//   INTERLACE_ASSIGN(Transfers t, Transfers::Read(program, phase));
//   t.gathers[1].at = t.gathers[0].at;    t.Merge(t.gathers[0], t.gathers[1]);
//   INTERLACE_TRY(t.Write());
#pragma once

#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

// One gather.start of parameters. (The gather of a reduced gradient belongs to its reduction.)
struct Gather {
  std::vector<UnitId> units;  // with their full buffers, in operand order; empty: it was merged into another
  std::vector<ValueId> fulls;
  std::vector<OpId> lead;  // what makes its operands from states (casts, one buffer of several): moves with it
  OpId start = kNone;
  Part part = Part::kNone;
  int64_t bytes = 0;        // that the full buffers take
  int64_t shard_bytes = 0;  // of this rank's operands
  int32_t at = 0;           // issued in this gap
  int64_t order = 0;
  int32_t need = 0;  // skeleton op that waits for it first; size(): another phase does
  int32_t end = 0;   // its last release; size(): another phase's
};

// One reduce.start of gradients, and its tail: the wait, what takes the sum (aten.add_ under accumulation), the
// release.
struct Reduce {
  std::vector<UnitId> units;  // empty: it was merged into another
  std::vector<ValueId> flats, parts;
  OpId start = kNone;
  std::vector<OpId> tail;
  Part part = Part::kNone;
  int64_t bytes = 0;  // of the flat buffers
  int32_t at = 0;     // issued in this gap
  int64_t order = 0;
  int32_t ready = 0;  // the first gap it can be issued in
  int32_t wait = 0;   // gap of the tail
  int64_t wait_order = 0;
  int32_t latest = 0;  // the last gap the tail can be in
  // What comes later than the tail, never before it: releases of flat buffers that something reads longer, and the
  // gather of the sums that every rank takes whole (replicate).
  struct Late {
    OpId op = kNone;
    int32_t at = 0;
    int64_t order = 0;
  };
  std::vector<Late> late;
};

class Transfers {
 public:
  static constexpr int64_t kSpacing = 1 << 20;  // between the orders of ops that were neighbours

  // The program and the phase must outlive it. Merge changes ops, Write the order of the phase. Error: a symbolic size.
  static Result<Transfers> Read(Program& program, Phase& phase);

  std::vector<Gather> gathers;  // by need, then as issued
  std::vector<Reduce> reduces;  // as issued

  int32_t size() const { return static_cast<int32_t>(skeleton_.size()); }
  const Op& op(int32_t index) const { return std::as_const(*program_).op(skeleton_[index]); }
  OpId op_id(int32_t index) const { return skeleton_[index]; }
  const Phase& phase() const { return *phase_; }
  // The gap in which the backward part begins; size() without one.
  int32_t backward_begin() const { return backward_begin_; }

  // `from` joins `into` as one coalesced call, issued where `into` is; needed where the first of both is. `from` is
  // empty then. They must be of one axis and one part of the phase.
  void Merge(Gather& into, Gather& from);
  // The same for reductions: issued where the later of both is, waited for where the later is; their sums are gathered
  // in one call just behind that.
  void Merge(Reduce& into, Reduce& from);

  // The gather of the sums, if there is one, goes just behind the tail, wherever that is put.
  static void GatherBehindTail(const Program& program, Reduce& reduce);

  // Puts everything into the phase. Error: something was moved to where it cannot be (named).
  Status Write();

 private:
  Transfers(Program& program, Phase& phase) : program_(&program), phase_(&phase) {}
  Status Check() const;

  Program* program_;
  Phase* phase_;
  std::vector<OpId> skeleton_;
  int32_t backward_begin_ = 0;
};

// Whether two transfers may be one call: one axis.
bool MayMerge(const Program& program, const std::vector<UnitId>& a, const std::vector<UnitId>& b);
// Phases that a micro-batch runs: micro_batch, or its variants, in text order.
std::vector<Phase*> MicroBatches(Program& program);
// "u0+u3"
std::string UnitNames(const std::vector<UnitId>& units);

}  // namespace interlace
