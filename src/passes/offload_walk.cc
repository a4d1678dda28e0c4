#include "passes/offload_walk.h"

#include <algorithm>
#include <deque>
#include <set>

namespace interlace {
namespace {

class Walker {
 public:
  Walker(const StepLine& line, const std::vector<WalkCosts>& out, const std::vector<WalkCosts>& in,
         const WalkOptions& options, std::vector<Interval>& intervals)
      : line_(line), out_costs_(out), in_costs_(in), options_(options), intervals_(intervals), end_(line.size()) {}

  WalkResult Run() {
    Begin();
    for (int32_t p = 0; p < end_; ++p) {
      now_ = p;
      Advance(clock_ps_);
      // What the op uses must be here.
      for (int32_t t : needed_[p]) {
        if (at_[t] == At::kLeaving) Cancel(t);
      }
      if (!MakeRoom()) return {clock_ps_, p, bytes_[p]};
      int64_t until_ps = clock_ps_;
      for (int32_t t : needed_[p]) {
        if (at_[t] == At::kOut) StartIn(t);
        if (at_[t] == At::kComing) until_ps = std::max(until_ps, done_ps_[t]);
      }
      Advance(until_ps);
      for (int32_t t : needed_[p]) {
        if (at_[t] != At::kComing) continue;
        intervals_[t].need = p;
        intervals_[t].order[3] = ++order_;
        at_[t] = At::kIn;
      }
      clock_ps_ += line_.begin_ps[p + 1] - line_.begin_ps[p];
      for (int32_t t : used_[p]) {
        if (intervals_[t].wraps && options_.next_step && intervals_[t].next_step) continue;
        StartOut(t, p + 1);
      }
    }
    return End();
  }

 private:
  enum class At : uint8_t { kIn, kLeaving, kOut, kComing };

  void Begin() {
    bytes_ = line_.bytes;
    at_.assign(intervals_.size(), At::kIn);
    done_ps_.assign(intervals_.size(), 0);
    ended_ps_.assign(intervals_.size(), 0);
    start_ps_.assign(intervals_.size(), 0);
    later_.assign(intervals_.size(), false);
    freed_.assign(intervals_.size(), 0);
    tail_.assign(intervals_.size(), false);
    needed_.resize(end_), used_.resize(end_);
    std::vector<int32_t> head;
    for (size_t i = 0; i < intervals_.size(); ++i) {
      Interval& interval = intervals_[i];
      const auto t = static_cast<int32_t>(i);
      needed_[interval.before].push_back(t);
      used_[interval.after].push_back(t);
      if (!interval.wraps) continue;
      if (interval.next_step) {
        head.push_back(t);
      } else {
        at_[t] = At::kOut;
        Change(0, interval.before, -Bytes(t));
        if (!interval.fresh) waiting_.insert({interval.before, t});
      }
    }
    std::stable_sort(head.begin(), head.end(),
                     [&](int32_t a, int32_t b) { return intervals_[a].after < intervals_[b].after; });
    for (int32_t t : head) StartOut(t, 0);
  }

  int64_t Bytes(int32_t t) const { return line_.movables[intervals_[t].movable].bytes; }

  void Change(int32_t from, int32_t to, int64_t by) {
    for (int32_t i = from; i < to; ++i) bytes_[i] += by;
    blocked_ = -1;
  }

  // Intervals over phases do not stop over in one that runs several times; what goes before its first op goes to the
  // end of the phase before.
  bool MayMove(int32_t t, int32_t index) const {
    if (index >= end_ || !line_.ops[index].repeated) return true;
    return line_.ops[intervals_[t].after].phase == line_.ops[index].phase || line_.ops[index].index == 0;
  }

  int64_t Run(int64_t& lane_ps, const WalkCosts& cost) {
    const int64_t start = std::max(lane_ps, clock_ps_);
    const int64_t latency =
        options_.overlap ? std::max<int64_t>(cost.latency_ps - (start - clock_ps_), 0) : cost.latency_ps;
    lane_ps = start + latency + cost.work_ps;
    return start;
  }

  void StartOut(int32_t t, int32_t index) {
    Interval& interval = intervals_[t];
    interval.leave = index;
    interval.order[0] = ++order_;
    tail_[t] = interval.wraps && index > 0;
    if (interval.clean) {
      interval.free = index;
      interval.order[1] = ++order_;
      Gone(t);
      return Change(index, IntervalEnd(t), -Bytes(t));
    }
    at_[t] = At::kLeaving;
    start_ps_[t] = Run(out_ps_, out_costs_[t]);
    done_ps_[t] = out_ps_;
    ended_ps_[t] = last_ended_ps_ =
        std::max(last_ended_ps_,
                 out_ps_ + static_cast<int64_t>((options_.slack - 1) * static_cast<double>(out_costs_[t].work_ps)));
    // Where it will be gone if the compute lane is not held from here on: later holds only make that earlier.
    const int64_t shift = clock_ps_ - line_.begin_ps[index];
    const auto begin = line_.begin_ps.begin();
    freed_[t] = static_cast<int32_t>(std::lower_bound(begin + index, begin + end_, ended_ps_[t] - shift) - begin);
    while (!MayMove(t, freed_[t])) ++freed_[t];
    if (!tail_[t]) freed_[t] = std::min(freed_[t], interval.before);
    Change(freed_[t], IntervalEnd(t), -Bytes(t));
    leaving_.push_back(t);
  }

  int32_t IntervalEnd(int32_t t) const { return tail_[t] ? end_ : intervals_[t].before; }

  void Gone(int32_t t) {
    at_[t] = At::kOut;
    if (!tail_[t] && !intervals_[t].fresh) waiting_.insert({intervals_[t].before, t});
  }

  // The copy out has ended: its memory is free from `now_` on.
  void Free(int32_t t) {
    Interval& interval = intervals_[t];
    interval.free = now_;
    interval.order[1] = ++order_;
    if (freed_[t] > now_) Change(now_, freed_[t], -Bytes(t));
    leaving_.erase(std::find(leaving_.begin(), leaving_.end(), t));
    Gone(t);
  }

  // It is used again before it has gone: the interval is none.
  void Cancel(int32_t t) {
    Interval& interval = intervals_[t];
    interval.free = interval.back = interval.need = now_;
    interval.order[1] = interval.order[2] = interval.order[3] = order_;
    at_[t] = At::kIn;
    leaving_.erase(std::find(leaving_.begin(), leaving_.end(), t));
  }

  void StartIn(int32_t t) {
    Interval& interval = intervals_[t];
    interval.back = now_;
    interval.order[2] = ++order_;
    at_[t] = At::kComing;
    if (!interval.fresh) Run(in_ps_, in_costs_[t]);
    done_ps_[t] = interval.fresh ? clock_ps_ : in_ps_;  // memory alone is there at once
    waiting_.erase({interval.before, t});
    Change(now_, interval.before, Bytes(t));
  }

  // The copy out that ends next, of those that may be waited for here.
  int32_t NextOut() const {
    for (int32_t t : leaving_) {
      if (MayMove(t, now_)) return t;
    }
    return -1;
  }

  // Time passes with the compute lane at `now_`; what ends makes room for what comes.
  void Advance(int64_t until_ps) {
    for (;;) {
      int32_t next = NextOut();
      // All that has ended is free before anything comes: bytes_ counts on it.
      while (next >= 0 && ended_ps_[next] <= clock_ps_) {
        Free(next);
        next = NextOut();
      }
      Fetch();
      if (next < 0 || ended_ps_[next] > until_ps) break;
      clock_ps_ = ended_ps_[next];
    }
    clock_ps_ = std::max(clock_ps_, until_ps);
  }

  // Starts copies in, in the order of need, as long as there is room for the next one until it is used.
  void Fetch() {
    while (!waiting_.empty()) {
      const auto [before, t] = *waiting_.begin();
      if (before <= now_ || !MayMove(t, now_)) return;
      if (blocked_ >= now_) return;  // as before
      for (int32_t q = now_; q < before; ++q) {
        if (bytes_[q] + Bytes(t) <= options_.limit) continue;
        blocked_ = q;
        return;
      }
      StartIn(t);
    }
  }

  // Until the op fits: copies out are waited for.
  bool MakeRoom() {
    while (bytes_[now_] > options_.limit) {
      const int32_t next = NextOut();
      if (next < 0) return false;
      clock_ps_ = std::max(clock_ps_, done_ps_[next]);
      Free(next);
    }
    return true;
  }

  // The step ends with nothing on its way: copies that would have to be waited for longer than they have run, and those
  // behind them, go at the head of the next step instead.
  WalkResult End() {
    now_ = end_;
    const int64_t end_ps = clock_ps_;
    bool later = false;
    while (!leaving_.empty()) {
      const int32_t t = leaving_.front();
      later = later || (!options_.next_step && done_ps_[t] - end_ps > end_ps - start_ps_[t]);
      if (later) {
        later_[t] = true;
        leaving_.pop_front();
        continue;
      }
      clock_ps_ = std::max(clock_ps_, done_ps_[t]);
      Free(t);
    }
    if (!options_.next_step) {
      for (size_t t = 0; t < intervals_.size(); ++t) intervals_[t].next_step = later_[t];
    }
    return {clock_ps_, -1, 0};
  }

  const StepLine& line_;
  const std::vector<WalkCosts>&out_costs_, &in_costs_;
  const WalkOptions& options_;
  std::vector<Interval>& intervals_;
  const int32_t end_;
  std::vector<int64_t> bytes_;  // at each op, if what is out now stays out until it is needed and nothing else leaves
  std::vector<At> at_;
  std::vector<int64_t> start_ps_, done_ps_;  // of the last copy
  std::vector<int64_t> ended_ps_;  // from when a copy out counts as ended where nothing waits for it; in their order
  std::vector<int32_t> freed_;     // index from which bytes_ counts it as gone
  std::vector<bool> tail_;         // it left after this step's use
  std::vector<bool> later_;        // it leaves in the next step
  std::vector<std::vector<int32_t>> needed_, used_;
  std::set<std::pair<int32_t, int32_t>> waiting_;  // out and needed in this step: index, interval
  std::deque<int32_t> leaving_;
  int64_t clock_ps_ = 0, out_ps_ = 0, in_ps_ = 0, last_ended_ps_ = 0;
  int32_t now_ = 0, order_ = 0;
  int32_t blocked_ = -1;  // index that has no room for the next copy in; -1: not known
};

}  // namespace

WalkResult WalkStep(const StepLine& line, const std::vector<WalkCosts>& out, const std::vector<WalkCosts>& in,
                    const WalkOptions& options, std::vector<Interval>& intervals) {
  return Walker(line, out, in, options, intervals).Run();
}

}  // namespace interlace
