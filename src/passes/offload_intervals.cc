#include "passes/offload_intervals.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "passes/phase_editor.h"

namespace interlace {

namespace {

std::vector<Interval> FindIntervals(const StepLine& line, bool fresh) {
  std::vector<Interval> intervals;
  for (size_t m = 0; m < line.movables.size(); ++m) {
    const Movable& movable = line.movables[m];
    const std::vector<Use>& uses = movable.uses;
    for (size_t i = 0; i < uses.size(); ++i) {
      Interval interval;
      interval.movable = static_cast<int32_t>(m);
      interval.wraps = i + 1 == uses.size();
      const Use& next = uses[interval.wraps ? 0 : i + 1];
      interval.fresh = fresh;
      if (fresh ? !movable.ends || !next.fills : interval.wraps && (!movable.state || movable.comes)) continue;
      interval.after = uses[i].end;
      interval.before = next.begin;
      // In a phase that runs several times both ends must be in it, or neither.
      const StepLine::Entry &from = line.ops[interval.after], &to = line.ops[interval.before];
      const bool same = from.phase == to.phase && !interval.wraps;
      if ((from.repeated || to.repeated) && !same) continue;
      if (!interval.wraps && interval.before - interval.after < 2) continue;
      intervals.push_back(interval);
    }
  }
  return intervals;
}

}  // namespace

std::vector<Interval> IntervalsOf(const StepLine& line) {
  return FindIntervals(line, /*fresh=*/false);
}

std::vector<Interval> FreshIntervals(const StepLine& line) {
  std::vector<Interval> intervals = FindIntervals(line, /*fresh=*/true);
  for (Interval& interval : intervals) {
    interval.clean = true;
    interval.leave = interval.free = interval.after + 1;
    interval.back = interval.need = interval.before;
  }
  return intervals;
}

bool IsEmpty(const Interval& interval) {
  return interval.free > interval.back || (interval.free == interval.back && interval.order[1] >= interval.order[2]);
}

std::vector<int64_t> BytesWith(const StepLine& line, const std::vector<Interval>& intervals) {
  std::vector<int64_t> change(line.bytes.size() + 1, 0);
  const int32_t end = line.size();
  for (const Interval& interval : intervals) {
    const int64_t bytes = line.movables[interval.movable].bytes;
    auto out = [&](int32_t from, int32_t to) {
      if (from >= to) return;
      change[from] -= bytes;
      change[to] += bytes;
    };
    if (!interval.wraps || interval.next_step) {
      out(interval.free, interval.back);
    } else {
      out(interval.free, end);
      out(0, interval.back);
    }
  }
  std::vector<int64_t> bytes = line.bytes;
  int64_t sum = 0;
  for (int32_t i = 0; i < end; ++i) bytes[i] += sum += change[i];
  return bytes;
}

void FindClean(const StepLine& line, std::vector<Interval>& intervals) {
  // One is clean when the one that ends at or before its first unwritten use of the same stretch is chosen too.
  std::unordered_map<int32_t, std::vector<Interval*>> by_movable;
  for (Interval& interval : intervals) by_movable[interval.movable].push_back(&interval);
  for (auto& [m, list] : by_movable) {
    const std::vector<Use>& uses = line.movables[m].uses;
    const size_t count = uses.size();
    for (Interval* interval : list) {
      interval->clean = interval->fresh;
      if (interval->fresh) continue;
      // Back from the interval, over uses that only read, to the one before it, which brought the same bytes in.
      size_t use = 0;
      while (uses[use].end != interval->after) ++use;
      for (size_t back = 0; back < count && !uses[use].writes; ++back) {
        const int32_t begin = uses[use].begin;
        auto found =
            std::find_if(list.begin(), list.end(), [&](const Interval* t) { return t->before == begin && !t->fresh; });
        if (found != list.end()) {
          interval->clean =
              !(*found == interval && interval->next_step);  // else it would leave before it has come back once
          break;
        }
        interval->clean = use == 0 && line.movables[m].comes;  // the program's own reload
        if (use == 0) break;
        --use;
      }
    }
  }
}

void WriteIntervals(Program& program, const StepLine& line, const std::vector<Interval>& intervals,
                    const std::string& more) {
  int64_t out_bytes = 0, in_bytes = 0;
  for (const Interval& interval : intervals) {
    const int64_t bytes = line.movables[interval.movable].bytes;
    if (!interval.fresh) in_bytes += bytes;
    if (!interval.clean) out_bytes += bytes;
  }
  program.SetMeta("offload",
                  std::to_string(out_bytes) + " bytes out, " + std::to_string(in_bytes) + " bytes in" + more);
  if (intervals.empty()) return;
  enum Kind { kLeave, kFree, kBack, kNeed };
  std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> events;  // index in the line, order, kind, interval
  for (size_t i = 0; i < intervals.size(); ++i) {
    const Interval& interval = intervals[i];
    const int32_t indices[] = {interval.leave, interval.free, interval.back, interval.need};
    for (int32_t kind = kLeave; kind <= kNeed; ++kind)
      events.emplace_back(indices[kind], interval.order[kind], kind, static_cast<int32_t>(i));
  }
  std::sort(events.begin(), events.end());
  constexpr OpKind kKinds[] = {OpKind::kOffloadStart, OpKind::kOffloadWait, OpKind::kReloadStart, OpKind::kReloadWait};
  std::map<Phase*, PhaseEditor> editors;
  Phase* last = nullptr;
  for (const auto& [phase, count] : program.RunOrder()) {
    last = program.FindPhase(phase->name);
    editors.try_emplace(last, program, *last);
  }
  for (const auto& [index, unused, kind, of] : events) {
    const Interval& interval = intervals[of];
    const Movable& movable = line.movables[interval.movable];
    Op& op = program.AddOp(kKinds[kind]);
    op.args = {Arg::Of(movable.root)};
    if (movable.unit != kNone) op.units = {movable.unit};
    if (kind == kLeave && interval.clean) op.SetAttr("clean", Arg::Bool(true));
    if (kind == kBack && interval.fresh) op.SetAttr("fresh", Arg::Bool(true));
    // Leaving goes right after the use, which may be the last op of its phase; the rest before the op that comes next.
    const bool after_use = kind == kLeave && index == interval.after + 1;
    const bool at_end = index >= line.size();
    const StepLine::Entry& at = line.ops[after_use ? index - 1 : at_end ? line.size() - 1 : index];
    op.part = program.op(at.phase->ops[at.index]).part;
    // Before a phase that runs several times is the end of the one before it.
    const bool before_phase = !after_use && !at_end && at.repeated && at.index == 0 && index > 0;
    if (before_phase) {
      editors.at(line.ops[index - 1].phase).AtEnd(op.id);
    } else if (after_use) {
      editors.at(at.phase).After(at.index, op.id);
    } else if (at_end) {
      op.part = last->kind == PhaseKind::kStep ? Part::kUpdate : op.part;
      editors.at(last).AtEnd(op.id);
    } else {
      editors.at(at.phase).Before(at.index, op.id);
    }
  }
  for (auto& [phase, editor] : editors) editor.Finish();
  for (const Interval& interval : intervals) {
    if (!interval.wraps || interval.next_step) continue;
    for (State& state : program.states) {
      if (state.value == line.movables[interval.movable].root) state.out = true;
    }
  }
}

}  // namespace interlace
