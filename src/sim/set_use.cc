#include "sim/set_use.h"

#include <algorithm>

namespace interlace {
namespace {

// Walks the ops of one rank and gives every moment of the step a cause.
class Dividing {
 public:
  Dividing(const EngineInput& input, const EngineOutput& output, const std::vector<int32_t>& stage_of, int32_t rank)
      : lowered_(*input.programs[static_cast<size_t>(rank)]),
        output_(output),
        record_(output.ranks[static_cast<size_t>(rank)]),
        stage_of_(stage_of),
        rank_(rank) {}

  StageUse Run() {
    FindMicroBatches();
    int64_t now = 0;
    for (size_t run = 0; run < lowered_.run.size(); ++run) {
      once_ = lowered_.micro_batch[run] == kNone;
      const std::vector<LoweredOp>& ops = lowered_.ops[lowered_.run[run]];
      for (size_t i = 0; i < ops.size(); ++i) {
        const auto at = static_cast<size_t>(lowered_.first[run]) + i;
        const int64_t start = record_.start_ps[at], end = record_.end_ps[at];
        if (end == now) continue;
        Idle(&StageUse::launch_ps, now, start);
        if (ops[i].kind == LoweredOp::Kind::kWait) {
          Wait(ops[i], record_.waited_for[at], start, end);
        } else {
          Busy(ops[i], start, end);
        }
        now = end;
      }
    }
    Idle(&StageUse::drain_ps, now, output_.makespan_ps);
    return use_;
  }

 private:
  // From the first work on a micro-batch to the end of the last run for one.
  void FindMicroBatches() {
    first_ps_ = output_.makespan_ps, last_ps_ = 0;
    for (size_t run = 0; run < lowered_.run.size(); ++run) {
      if (lowered_.micro_batch[run] == kNone || lowered_.first[run] == lowered_.first[run + 1]) continue;
      last_ps_ = record_.end_ps[static_cast<size_t>(lowered_.first[run + 1]) - 1];
      if (first_ps_ < output_.makespan_ps) continue;
      const std::vector<LoweredOp>& ops = lowered_.ops[lowered_.run[run]];
      for (size_t i = 0; i < ops.size(); ++i) {
        const auto at = static_cast<size_t>(lowered_.first[run]) + i;
        if (ops[i].kind != LoweredOp::Kind::kCompute || record_.start_ps[at] == record_.end_ps[at]) continue;
        first_ps_ = record_.start_ps[at];
        break;
      }
    }
  }

  Part PartOf(const LoweredOp& op) const { return lowered_.program->op(op.op).part; }
  bool OfOptimizer(const LoweredOp& op) const { return once_ || PartOf(op) == Part::kUpdate; }

  void Busy(const LoweredOp& op, int64_t start, int64_t end) {
    (OfOptimizer(op) ? use_.optimizer_ps : use_.compute_ps) += end - start;
  }

  // What is idle before the first work fills the pipeline, what waits for other stages after the last drains it.
  void Idle(int64_t StageUse::*cause, int64_t start, int64_t end) {
    const bool stages = cause == &StageUse::before_ps || cause == &StageUse::behind_ps;
    const auto add = [&](int64_t StageUse::*to, int64_t from, int64_t until) {
      use_.*to += std::max<int64_t>(until - from, 0);
    };
    const int64_t filled = std::clamp(first_ps_, start, end), emptied = std::clamp(last_ps_, filled, end);
    add(&StageUse::fill_ps, start, filled);
    add(cause, filled, emptied);
    add(stages ? &StageUse::drain_ps : cause, emptied, end);
  }

  void Wait(const LoweredOp& op, int32_t transfer, int64_t start, int64_t end) {
    if (transfer < 0) return Busy(op, start, end);  // the sum of what had come
    const TransferRecord& t = output_.transfers[static_cast<size_t>(transfer)];
    const int64_t came = std::clamp(t.end_ps, start, end), begun = std::clamp(t.issued_ps, start, came);
    int64_t StageUse::*const moving = OfOptimizer(op) ? &StageUse::optimizer_ps : &StageUse::transfers_ps;
    int64_t StageUse::*const other = OtherOf(op, t);
    Idle(other != nullptr ? other : moving, start, begun);
    Idle(moving, begun, came);
    Busy(op, came, end);
  }

  // Of a wait for what another stage has not begun: which side it is on, as activations flow; nullptr: this one.
  int64_t StageUse::*OtherOf(const LoweredOp& wait, const TransferRecord& t) const {
    const int32_t own = stage_of_[static_cast<size_t>(rank_)];
    bool receives = true;
    int32_t other = stage_of_[static_cast<size_t>(t.cause_rank)];
    if (t.op->IsMessage() && t.members.size() == 2) {
      receives = t.op->receives == (t.rank == rank_);
      other = stage_of_[static_cast<size_t>(t.members[t.members[0] == rank_ ? 1 : 0])];
      const Part part = PartOf(wait);
      if (part == Part::kForward) return receives ? &StageUse::before_ps : &StageUse::behind_ps;
      if (part == Part::kBackward) return receives ? &StageUse::behind_ps : &StageUse::before_ps;
    }
    if (other == own) return nullptr;
    return other < own ? &StageUse::before_ps : &StageUse::behind_ps;
  }

  const Lowered& lowered_;
  const EngineOutput& output_;
  const RankRecord& record_;
  const std::vector<int32_t>& stage_of_;
  const int32_t rank_;
  int64_t first_ps_ = 0, last_ps_ = 0;
  bool once_ = false;  // the run at hand is of a step
  StageUse use_;
};

}  // namespace

StageUse UseOfStage(const EngineInput& input, const EngineOutput& output, const std::vector<int32_t>& stage_of,
                    int32_t rank) {
  return Dividing(input, output, stage_of, rank).Run();
}

}  // namespace interlace
