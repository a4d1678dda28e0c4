// Two parts. Choose: at the op that is furthest above the limit, intervals that cover it, evenly over the step (so that
// copies come at an even rate), until every op fits if whatever leaves were gone for its whole interval. Place: a walk
// over the step (offload_walk.h).
#include "passes/offload_plan.h"

#include <algorithm>
#include <set>

#include "ir/text.h"
#include "passes/offload_walk.h"

namespace interlace {
namespace {

bool MayLeave(const OffloadChoice& choice, const StepLine& line, const Interval& interval) {
  const OffloadKind kind = line.movables[interval.movable].kind;
  return std::find(choice.kinds.begin(), choice.kinds.end(), kind) != choice.kinds.end();
}

// They cost nothing, so all of them are made.
std::vector<Interval> FreshOf(const StepLine& line, const OffloadChoice& choice) {
  std::vector<Interval> intervals = FreshIntervals(line);
  std::erase_if(intervals, [&](const Interval& interval) { return !MayLeave(choice, line, interval); });
  return intervals;
}

class Planner {
 public:
  Planner(const Program& program, const StepLine& line, CostModel& model, const OffloadChoice& choice)
      : program_(program), line_(line), model_(model), choice_(choice), end_(line.size()) {}

  Result<std::vector<Interval>> Run() {
    for (const Interval& interval : IntervalsOf(line_)) {
      if (MayLeave(choice_, line_, interval)) candidates_.push_back(interval);
    }
    for (const Interval& fresh : FreshOf(line_, choice_)) {
      std::erase_if(candidates_, [&](const Interval& interval) {
        return interval.movable == fresh.movable && interval.after == fresh.after;
      });
      intervals_.push_back(fresh);
    }
    taken_.assign(candidates_.size(), false);
    ideal_ = BytesWith(line_, intervals_);
    INTERLACE_TRY(Choose(choice_.limit - choice_.window, /*must=*/false));
    INTERLACE_TRY(Choose(choice_.limit, /*must=*/true));
    // An op that copies on their way leave no room for needs more intervals; each round adds some, so it ends.
    for (;;) {
      INTERLACE_ASSIGN(const int32_t over, Place());
      if (over < 0) break;
      const size_t before = intervals_.size();
      INTERLACE_TRY(ChooseAt(over, over_bytes_ - choice_.limit));
      if (intervals_.size() == before) return Infeasible(over, over_bytes_);
    }
    return std::move(intervals_);
  }

 private:
  static bool Covers(const Interval& interval, int32_t index) {
    return interval.wraps ? index > interval.after || index < interval.before
                          : interval.after < index && index < interval.before;
  }

  Error Infeasible(int32_t index, int64_t least) const {
    const StepLine::Entry& at = line_.ops[index];
    const Op& op = program_.op(at.phase->ops[at.index]);
    return Error{"the limit of " + std::to_string(choice_.limit) +
                     " bytes cannot be met with everything out that may leave: this op needs " + std::to_string(least) +
                     " bytes; raise the limit to " + std::to_string((least + 1048575) / 1048576) +
                     "MiB, let more kinds leave, or recompute activations",
                 PrintOp(program_, op)};
  }

  // Takes intervals until the ideal fits. `must`: when none is left, that is an error; it tells the largest need there
  // is.
  Status Choose(int64_t limit, bool must) {
    for (;;) {
      const auto worst = std::max_element(ideal_.begin(), ideal_.end());
      if (worst == ideal_.end() || *worst <= limit) return Ok{};
      const size_t before = intervals_.size();
      const auto index = static_cast<int32_t>(worst - ideal_.begin());
      INTERLACE_TRY(ChooseAt(index, *worst - limit));
      if (intervals_.size() > before) continue;
      if (!must) return Ok{};
      return Infeasible(index, *worst);
    }
  }

  Status ChooseAt(int32_t index, int64_t needed) {
    for (const OffloadKind kind : choice_.kinds) {
      std::vector<size_t> candidates;
      int64_t total = 0;
      std::set<int32_t> moved;
      for (const Interval& interval : intervals_) {
        if (!interval.fresh) moved.insert(interval.movable);
      }
      for (size_t g = 0; g < candidates_.size(); ++g) {
        if (taken_[g] || line_.movables[candidates_[g].movable].kind != kind || !Covers(candidates_[g], index))
          continue;
        candidates.push_back(g);
        total += line_.movables[candidates_[g].movable].bytes;
      }
      // First intervals of what leaves already (its bytes may still be in the tier), then evenly by the time of need.
      std::vector<size_t> rest;
      for (size_t g : candidates) {
        const int64_t bytes = line_.movables[candidates_[g].movable].bytes;
        if (needed > 0 && moved.contains(candidates_[g].movable)) {
          needed -= bytes;
          total -= bytes;
          Take(g);
        } else {
          rest.push_back(g);
        }
      }
      std::stable_sort(rest.begin(), rest.end(),
                       [&](size_t a, size_t b) { return candidates_[a].before < candidates_[b].before; });
      const double share = total > 0 ? std::min(1.0, static_cast<double>(needed) / static_cast<double>(total)) : 0;
      double owed = 0;
      for (size_t g : rest) {
        if (needed <= 0) break;
        const int64_t bytes = line_.movables[candidates_[g].movable].bytes;
        owed += share * static_cast<double>(bytes);
        if (owed < 0.5 * static_cast<double>(bytes)) continue;
        owed -= static_cast<double>(bytes);
        needed -= bytes;
        Take(g);
      }
      for (size_t i = rest.size(); i-- > 0 && needed > 0;) {  // what rounding left open
        if (taken_[rest[i]]) continue;
        needed -= line_.movables[candidates_[rest[i]].movable].bytes;
        Take(rest[i]);
      }
      if (needed <= 0) break;
    }
    return Ok{};
  }

  void Take(size_t candidate) {
    taken_[candidate] = true;
    const Interval& interval = candidates_[candidate];
    intervals_.push_back(interval);
    const int64_t bytes = line_.movables[interval.movable].bytes;
    for (int32_t i = 0; i < end_; ++i) {
      if (Covers(interval, i)) ideal_[i] -= bytes;
    }
  }

  // Copies out that do not end with the step may begin with the next one: which, is what walks find that start where
  // the one before ended. The index of an op that does not fit, or -1.
  Result<int32_t> Place() {
    FindClean(line_, intervals_);
    std::vector<WalkCosts> out, in;
    for (const Interval& interval : intervals_) {
      const auto bytes = static_cast<double>(line_.movables[interval.movable].bytes);
      INTERLACE_ASSIGN(const OpCost there, model_.CopyCost(Lane::kD2H, /*to_device=*/false, bytes));
      INTERLACE_ASSIGN(const OpCost back, model_.CopyCost(Lane::kH2D, /*to_device=*/true, bytes));
      out.push_back({there.latency_ps, there.work_ps});
      in.push_back({back.latency_ps, back.work_ps});
    }
    WalkOptions options{.limit = choice_.limit, .slack = choice_.slack, .overlap = model_.cluster().cpu};
    for (Interval& interval : intervals_) interval.next_step = false;
    std::vector<Interval> begin = intervals_, best;
    WalkResult found{}, first{};
    for (int round = 0; round < 3; ++round) {
      std::vector<Interval> intervals = begin;
      options.next_step = true;
      const WalkResult walked = WalkStep(line_, out, in, options, intervals);
      if (round == 0) first = walked;
      if (walked.over < 0 && (best.empty() || walked.time_ps < found.time_ps)) {
        found = walked;
        best = std::move(intervals);
      }
      options.next_step = false;
      if (WalkStep(line_, out, in, options, begin).over >= 0) break;
    }
    if (best.empty()) {
      over_bytes_ = first.bytes;
      return first.over;
    }
    intervals_ = std::move(best);
    return -1;
  }

  const Program& program_;
  const StepLine& line_;
  CostModel& model_;
  const OffloadChoice& choice_;
  const int32_t end_;
  std::vector<Interval> candidates_, intervals_;
  std::vector<bool> taken_;
  int64_t over_bytes_ = 0;      // of the op that did not fit
  std::vector<int64_t> ideal_;  // bytes at each op if what leaves were gone for its whole interval
};

}  // namespace

Result<std::vector<Interval>> PlanOffload(const Program& program, const StepLine& line, CostModel& model,
                                          const OffloadChoice& choice) {
  return Planner(program, line, model, choice).Run();
}

Result<int64_t> LeastStepPs(const StepLine& line, CostModel& model, const OffloadChoice& choice) {
  const int32_t end = line.size();
  // Bytes at each op of intervals that go over the step's end: what is out there may come back in the next step.
  std::vector<int64_t> comes_next(end + 1, 0);
  for (const Interval& interval : IntervalsOf(line)) {
    if (interval.wraps && MayLeave(choice, line, interval))
      comes_next[interval.after + 1] += line.movables[interval.movable].bytes;
  }
  auto copy_ps = [&](int64_t bytes) -> Result<int64_t> {
    if (bytes <= 0) return int64_t{0};
    INTERLACE_ASSIGN(const OpCost cost, model.CopyCost(Lane::kH2D, /*to_device=*/true, static_cast<double>(bytes)));
    return cost.work_ps;
  };
  const std::vector<int64_t> bytes = BytesWith(line, FreshOf(line, choice));
  int64_t least = line.begin_ps[end], next = 0;
  for (int32_t p = 0; p < end; ++p) {
    next += comes_next[p];
    const int64_t excess = bytes[p] - choice.limit;
    if (excess <= 0) continue;
    INTERLACE_ASSIGN(const int64_t here_ps, copy_ps(excess - next));
    INTERLACE_ASSIGN(const int64_t all_ps, copy_ps(excess));
    least = std::max({least, line.begin_ps[p] + here_ps, all_ps});
  }
  return least;
}

}  // namespace interlace
