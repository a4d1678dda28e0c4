#include "passes/trips.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "passes/phase_editor.h"

namespace interlace {

namespace {

std::vector<Trip> Gaps(const StepLine& line, bool blank) {
  std::vector<Trip> gaps;
  for (size_t m = 0; m < line.movables.size(); ++m) {
    const Movable& movable = line.movables[m];
    const std::vector<Use>& uses = movable.uses;
    for (size_t i = 0; i < uses.size(); ++i) {
      Trip trip;
      trip.movable = static_cast<int32_t>(m);
      trip.wraps = i + 1 == uses.size();
      const Use& next = uses[trip.wraps ? 0 : i + 1];
      trip.blank = blank;
      if (blank ? !movable.ends || !next.fills : trip.wraps && (!movable.state || movable.comes)) continue;
      trip.after = uses[i].end;
      trip.before = next.begin;
      // In a phase that runs several times both ends must be in it, or neither.
      const StepLine::Place &from = line.ops[trip.after], &to = line.ops[trip.before];
      const bool same = from.phase == to.phase && !trip.wraps;
      if ((from.repeated || to.repeated) && !same) continue;
      if (!trip.wraps && trip.before - trip.after < 2) continue;
      gaps.push_back(trip);
    }
  }
  return gaps;
}

}  // namespace

std::vector<Trip> GapsOf(const StepLine& line) {
  return Gaps(line, /*blank=*/false);
}

std::vector<Trip> BlankTrips(const StepLine& line) {
  std::vector<Trip> trips = Gaps(line, /*blank=*/true);
  for (Trip& trip : trips) {
    trip.clean = true;
    trip.leave = trip.free = trip.after + 1;
    trip.back = trip.need = trip.before;
  }
  return trips;
}

bool IsOutAt(const Trip& trip, int32_t place) {
  if (!trip.wraps || trip.next_step) return trip.free <= place && place < trip.back;
  return place >= trip.free || place < trip.back;
}

bool StaysIn(const Trip& trip) {
  return trip.free > trip.back || (trip.free == trip.back && trip.order[1] >= trip.order[2]);
}

std::vector<int64_t> BytesWith(const StepLine& line, const std::vector<Trip>& trips) {
  std::vector<int64_t> change(line.bytes.size() + 1, 0);
  const int32_t end = line.size();
  for (const Trip& trip : trips) {
    const int64_t bytes = line.movables[trip.movable].bytes;
    auto out = [&](int32_t from, int32_t to) {
      if (from >= to) return;
      change[from] -= bytes;
      change[to] += bytes;
    };
    if (!trip.wraps || trip.next_step) {
      out(trip.free, trip.back);
    } else {
      out(trip.free, end);
      out(0, trip.back);
    }
  }
  std::vector<int64_t> bytes = line.bytes;
  int64_t sum = 0;
  for (int32_t i = 0; i < end; ++i) bytes[i] += sum += change[i];
  return bytes;
}

void FindClean(const StepLine& line, std::vector<Trip>& trips) {
  // A trip is clean when the one that ends at or before its first unwritten use of the same stretch is chosen too.
  std::unordered_map<int32_t, std::vector<Trip*>> by_movable;
  for (Trip& trip : trips) by_movable[trip.movable].push_back(&trip);
  for (auto& [m, list] : by_movable) {
    const std::vector<Use>& uses = line.movables[m].uses;
    const size_t count = uses.size();
    for (Trip* trip : list) {
      trip->clean = trip->blank;
      if (trip->blank) continue;
      // Back from the gap, over uses that only read, to the gap before: a trip there brought the same bytes in.
      size_t use = 0;
      while (uses[use].end != trip->after) ++use;
      for (size_t back = 0; back < count && !uses[use].writes; ++back) {
        const int32_t begin = uses[use].begin;
        auto found =
            std::find_if(list.begin(), list.end(), [&](const Trip* t) { return t->before == begin && !t->blank; });
        if (found != list.end()) {
          trip->clean = !(*found == trip && trip->next_step);  // else it would leave before it has come back once
          break;
        }
        trip->clean = use == 0 && line.movables[m].comes;  // the program's own reload
        if (use == 0) break;
        --use;
      }
    }
  }
}

Traffic TrafficOf(const StepLine& line, const std::vector<Trip>& trips) {
  Traffic traffic;
  for (const Trip& trip : trips) {
    const int64_t bytes = line.movables[trip.movable].bytes;
    if (!trip.blank) traffic.in += bytes;
    if (!trip.clean) traffic.out += bytes;
  }
  return traffic;
}

void WriteTrips(Program& program, const StepLine& line, const std::vector<Trip>& trips) {
  if (trips.empty()) return;
  enum Kind { kLeave, kFree, kBack, kNeed };
  std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> events;  // place, order, kind, trip
  for (size_t i = 0; i < trips.size(); ++i) {
    const Trip& trip = trips[i];
    const int32_t places[] = {trip.leave, trip.free, trip.back, trip.need};
    for (int32_t kind = kLeave; kind <= kNeed; ++kind)
      events.emplace_back(places[kind], trip.order[kind], kind, static_cast<int32_t>(i));
  }
  std::sort(events.begin(), events.end());
  constexpr OpKind kKinds[] = {OpKind::kOffloadStart, OpKind::kOffloadWait, OpKind::kReloadStart, OpKind::kReloadWait};
  std::map<Phase*, PhaseEditor> editors;
  Phase* last = nullptr;
  for (const auto& [phase, count] : program.RunOrder()) {
    last = program.FindPhase(phase->name);
    editors.try_emplace(last, program, *last);
  }
  for (const auto& [place, unused, kind, index] : events) {
    const Trip& trip = trips[index];
    const Movable& movable = line.movables[trip.movable];
    Op& op = program.AddOp(kKinds[kind]);
    op.args = {Arg::Of(movable.root)};
    if (movable.unit != kNone) op.units = {movable.unit};
    if (kind == kLeave && trip.clean) op.SetAttr("clean", Arg::Bool(true));
    if (kind == kBack && trip.blank) op.SetAttr("fresh", Arg::Bool(true));
    // Leaving goes right after the use, which may be the last op of its phase; the rest before the op that comes next.
    const bool after_use = kind == kLeave && place == trip.after + 1;
    const bool at_end = place >= line.size();
    const StepLine::Place& at = line.ops[after_use ? place - 1 : at_end ? line.size() - 1 : place];
    op.part = program.op(at.phase->ops[at.index]).part;
    // Before a phase that runs several times is the end of the one before it.
    const bool before_phase = !after_use && !at_end && at.repeated && at.index == 0 && place > 0;
    if (before_phase) {
      editors.at(line.ops[place - 1].phase).AtEnd(op.id);
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
  for (const Trip& trip : trips) {
    if (!trip.wraps || trip.next_step) continue;
    for (State& state : program.states) {
      if (state.value == line.movables[trip.movable].root) state.out = true;
    }
  }
}

}  // namespace interlace
