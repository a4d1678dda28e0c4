// baselines/offload.cc — two published ways of sending storages out of memory, to compare offload.h with.
//
//   offload_deepcompile(...)   DeepCompile, Algorithm 2: optimizer states in fragments, out from the head of forward
//   offload_sync(...)          everything out after each use and back before the next, waited for at once
//
// Error: a limit that cannot be met, with the least that can (the loop in the paper does not end then).
#include "passes/offload.h"

#include <algorithm>

#include "passes/cost_options.h"
#include "passes/offload_intervals.h"
#include "passes/passes.h"

namespace interlace {

Result<bool> OffloadSync(Program& program, const PassOptions& options) {
  INTERLACE_TRY(CheckNothingMoves(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(const std::vector<OffloadKind> kinds, ReadOffloadKinds(options));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(StepLine line, ReadStepLine(program, model));
  std::vector<Interval> intervals;
  for (Interval interval : IntervalsOf(line)) {
    if (std::find(kinds.begin(), kinds.end(), line.movables[interval.movable].kind) == kinds.end()) continue;
    interval.leave = interval.free = interval.after + 1;
    interval.back = interval.need = interval.before;
    intervals.push_back(interval);
  }
  FindClean(line, intervals);
  WriteIntervals(program, line, intervals);
  return !intervals.empty();
}

// Algorithm 2. P is the memory without optimizer states, M_opt all of them; fragments are states in their order, closed
// when they reach the fragment's size.
Result<bool> OffloadDeepCompile(Program& program, const PassOptions& options) {
  INTERLACE_TRY(CheckNothingMoves(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  const int64_t limit = costs.limit;
  INTERLACE_ASSIGN(std::optional<int64_t> fragment, options.Bytes("fragment"));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(StepLine line, ReadStepLine(program, model));
  const int32_t end = line.size();

  struct Fragment {
    std::vector<Interval> intervals;
    int64_t bytes = 0;
  };
  std::vector<Fragment> fragments;
  int64_t all = 0;
  int32_t update = end;  // where the states are first used: all are back by then
  for (const Interval& interval : IntervalsOf(line)) {
    const Movable& movable = line.movables[interval.movable];
    if (movable.kind != OffloadKind::kStates || !interval.wraps) continue;
    if (fragments.empty() || fragments.back().bytes >= fragment.value_or(64 << 20)) fragments.emplace_back();
    fragments.back().intervals.push_back(interval);
    fragments.back().bytes += movable.bytes;
    all += movable.bytes;
    update = std::min(update, interval.before);
  }
  std::vector<int64_t> without(end);  // P(o)
  for (int32_t o = 0; o < end; ++o) without[o] = line.bytes[o] - all;
  const auto largest = [&](int32_t from, int32_t to) {
    return from < to ? *std::max_element(without.begin() + from, without.begin() + to) : 0;
  };
  const auto refuse = [&](int64_t least) {
    return MakeError("the limit of ", limit, " bytes cannot be met with all optimizer states out: the step needs ",
                     least, " bytes; raise the limit to ", (least + 1048575) / 1048576,
                     "MiB, or use `offload`, which also streams the update");
  };
  if (largest(update, end) + all > limit) return refuse(std::max(largest(0, update), largest(update, end) + all));

  size_t chosen = 0;
  int64_t away = 0;
  for (; largest(0, update) + all - away > limit; ++chosen) {
    if (chosen == fragments.size()) return refuse(std::max(largest(0, update), largest(update, end) + all));
    away += fragments[chosen].bytes;
  }
  if (chosen == 0) return false;
  // Forward: copies go out from its head; memory is free when a copy was waited for.
  std::vector<int32_t> free_at(chosen, -1), back_at(chosen, update);
  size_t freed = 0;
  int64_t out = 0;
  for (int32_t o = 0; o < update; ++o) {
    while (freed < chosen && without[o] + all - out > limit) {
      free_at[freed] = o;
      out += fragments[freed++].bytes;
    }
  }
  // Back from where the rest of the step has room for it, the last one that went first.
  int32_t o = free_at[chosen - 1] + 1;
  for (size_t k = chosen; k-- > 0;) {
    while (o < update && largest(o, update) + all - out + fragments[k].bytes > limit) ++o;
    back_at[k] = o;
    out -= fragments[k].bytes;
  }
  std::vector<Interval> intervals;
  for (size_t k = 0; k < chosen; ++k) {
    for (Interval interval : fragments[k].intervals) {
      interval.next_step = true;
      interval.leave = 0;
      interval.free = free_at[k];
      interval.back = back_at[k];
      interval.need = update;
      intervals.push_back(interval);
    }
  }
  WriteIntervals(program, line, intervals);
  return true;
}

}  // namespace interlace
