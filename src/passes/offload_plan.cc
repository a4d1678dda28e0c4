// Three parts. Choose: at the op that is furthest above the limit, gaps that cover it, evenly over the step (so that
// copies come at an even rate), until every op fits if whatever leaves were gone for its whole gap. Place: on two lanes,
// copies out as soon as the use before ends, copies in as late as the use after allows. Tighten: where a copy on its
// way still takes memory that an op needs, it is waited for earlier, or starts later, whichever holds the step least.
#include "passes/offload_plan.h"

#include <algorithm>
#include <set>

#include "ir/text.h"

namespace interlace {
namespace {

class Planner {
 public:
  Planner(const Program& program, const StepLine& line, CostModel& model, const OffloadChoice& choice)
      : program_(program), line_(line), model_(model), choice_(choice), end_(line.size()) {}

  Result<std::vector<Trip>> Run() {
    for (const Trip& gap : GapsOf(line_)) {
      const OffloadKind kind = line_.movables[gap.movable].kind;
      if (std::find(choice_.kinds.begin(), choice_.kinds.end(), kind) != choice_.kinds.end()) gaps_.push_back(gap);
    }
    taken_.assign(gaps_.size(), false);
    ideal_ = line_.bytes;
    INTERLACE_TRY(Choose(choice_.limit - choice_.window, /*must=*/false));
    INTERLACE_TRY(Choose(choice_.limit, /*must=*/true));
    FindClean(line_, trips_);
    INTERLACE_TRY(PlaceAll());
    // What tightening cannot reach needs more trips; each round adds some, so it ends.
    for (;;) {
      const int32_t over = Tighten();
      if (over < 0) break;
      const size_t before = trips_.size();
      INTERLACE_TRY(ChooseAt(over, BytesWith(line_, trips_)[over] - choice_.limit));
      if (trips_.size() == before) return Infeasible(over, BytesWith(line_, trips_)[over]);
      FindClean(line_, trips_);
      INTERLACE_TRY(PlaceAll());
    }
    return std::move(trips_);
  }

 private:
  static bool Covers(const Trip& gap, int32_t place) {
    return gap.wraps ? place > gap.after || place < gap.before : gap.after < place && place < gap.before;
  }

  Error Infeasible(int32_t place, int64_t least) const {
    const StepLine::Place& at = line_.ops[place];
    const Op& op = program_.op(at.phase->ops[at.index]);
    return Error{"the limit of " + std::to_string(choice_.limit) + " bytes cannot be met with everything out that may leave: this op needs " +
                     std::to_string(least) + " bytes; raise the limit to " + std::to_string((least + 1048575) / 1048576) +
                     "MiB, let more kinds leave, or recompute activations",
                 PrintOp(program_, op)};
  }

  // Takes gaps until the ideal fits. `must`: when none is left, that is an error; it tells the largest need there is.
  Status Choose(int64_t limit, bool must) {
    for (;;) {
      const auto worst = std::max_element(ideal_.begin(), ideal_.end());
      if (worst == ideal_.end() || *worst <= limit) return Ok{};
      const size_t before = trips_.size();
      const auto place = static_cast<int32_t>(worst - ideal_.begin());
      INTERLACE_TRY(ChooseAt(place, *worst - limit));
      if (trips_.size() > before) continue;
      if (!must) return Ok{};
      return Infeasible(place, *worst);
    }
  }

  Status ChooseAt(int32_t place, int64_t needed) {
    for (const OffloadKind kind : choice_.kinds) {
      std::vector<size_t> candidates;
      int64_t total = 0;
      std::set<int32_t> moved;
      for (const Trip& trip : trips_) moved.insert(trip.movable);
      for (size_t g = 0; g < gaps_.size(); ++g) {
        if (taken_[g] || line_.movables[gaps_[g].movable].kind != kind || !Covers(gaps_[g], place)) continue;
        candidates.push_back(g);
        total += line_.movables[gaps_[g].movable].bytes;
      }
      // First gaps of what leaves already (its bytes may still be in the tier), then evenly by the time of need.
      std::vector<size_t> rest;
      for (size_t g : candidates) {
        const int64_t bytes = line_.movables[gaps_[g].movable].bytes;
        if (needed > 0 && moved.contains(gaps_[g].movable)) {
          needed -= bytes;
          total -= bytes;
          Take(g);
        } else {
          rest.push_back(g);
        }
      }
      std::stable_sort(rest.begin(), rest.end(), [&](size_t a, size_t b) { return gaps_[a].before < gaps_[b].before; });
      const double share = total > 0 ? std::min(1.0, static_cast<double>(needed) / static_cast<double>(total)) : 0;
      double owed = 0;
      for (size_t g : rest) {
        if (needed <= 0) break;
        const int64_t bytes = line_.movables[gaps_[g].movable].bytes;
        owed += share * static_cast<double>(bytes);
        if (owed < 0.5 * static_cast<double>(bytes)) continue;
        owed -= static_cast<double>(bytes);
        needed -= bytes;
        Take(g);
      }
      for (size_t i = rest.size(); i-- > 0 && needed > 0;) {  // what rounding left open
        if (taken_[rest[i]]) continue;
        needed -= line_.movables[gaps_[rest[i]].movable].bytes;
        Take(rest[i]);
      }
      if (needed <= 0) break;
    }
    return Ok{};
  }

  void Take(size_t gap) {
    taken_[gap] = true;
    const Trip& trip = gaps_[gap];
    trips_.push_back(trip);
    const int64_t bytes = line_.movables[trip.movable].bytes;
    for (int32_t i = 0; i < end_; ++i) {
      if (Covers(trip, i)) ideal_[i] -= bytes;
    }
  }

  Result<int64_t> CopyPs(const Trip& trip, bool in) {
    if (!in && trip.clean) return 0;
    const Lane lane = in ? Lane::kH2D : Lane::kD2H;
    INTERLACE_ASSIGN(OpCost cost, model_.CopyCost(lane, in, static_cast<double>(line_.movables[trip.movable].bytes)));
    return static_cast<int64_t>(static_cast<double>(cost.latency_ps + cost.work_ps) * choice_.slack);
  }

  int32_t FirstAt(int64_t time_ps, int32_t from, int32_t to) const {
    const auto begin = line_.begin_ps.begin();
    return static_cast<int32_t>(std::lower_bound(begin + from, begin + to, time_ps) - begin);
  }

  Status PlaceAll() {
    const int64_t step_ps = line_.begin_ps[end_];
    std::vector<Trip*> by_leave, by_need;
    for (Trip& trip : trips_) by_leave.push_back(&trip), by_need.push_back(&trip);
    std::stable_sort(by_leave.begin(), by_leave.end(), [](const Trip* a, const Trip* b) { return a->after < b->after; });
    std::stable_sort(by_need.begin(), by_need.end(), [](const Trip* a, const Trip* b) { return a->before > b->before; });
    // Copies that would still run when the step ends begin at the head of the next one.
    int64_t lane_ps = 0, head_ps = 0;
    for (Trip* trip : by_leave) {
      INTERLACE_ASSIGN(const int64_t copy_ps, CopyPs(*trip, false));
      lane_ps = std::max(lane_ps, line_.begin_ps[trip->after + 1]) + copy_ps;
      trip->next_step = trip->wraps && lane_ps > step_ps && !trip->clean;
      if (trip->next_step) lane_ps -= copy_ps;
    }
    lane_ps = 0;
    for (Trip* trip : by_leave) {
      INTERLACE_ASSIGN(const int64_t copy_ps, CopyPs(*trip, false));
      if (!trip->next_step) continue;
      trip->leave = 0;
      head_ps += copy_ps;
      trip->free = std::min(FirstAt(head_ps, 0, end_), trip->before);
    }
    lane_ps = head_ps;
    for (Trip* trip : by_leave) {
      if (trip->next_step) continue;
      INTERLACE_ASSIGN(const int64_t copy_ps, CopyPs(*trip, false));
      lane_ps = std::max(lane_ps, line_.begin_ps[trip->after + 1]) + copy_ps;
      trip->leave = trip->after + 1;
      trip->free = copy_ps == 0 ? trip->leave : FirstAt(lane_ps, trip->leave, trip->wraps ? end_ : trip->before);
    }
    int64_t cursor_ps = step_ps;
    for (Trip* trip : by_need) {
      INTERLACE_ASSIGN(const int64_t copy_ps, CopyPs(*trip, true));
      cursor_ps = std::min(cursor_ps, line_.begin_ps[trip->before]) - copy_ps;
      const int32_t least = trip->wraps && !trip->next_step ? 0 : trip->free;
      trip->need = trip->before;
      // The last op that begins no later.
      const auto begin = line_.begin_ps.begin();
      const auto at = static_cast<int32_t>(std::upper_bound(begin, begin + trip->before, cursor_ps) - begin) - 1;
      trip->back = std::clamp(at, std::min(least, trip->before), trip->before);
    }
    return Ok{};
  }

  // Until every op fits; the place of one that does not, or -1.
  int32_t Tighten() {
    std::vector<int64_t> bytes = BytesWith(line_, trips_);
    for (int32_t place = 0; place < end_; ++place) {
      while (bytes[place] > choice_.limit) {
        Trip* best = nullptr;
        Trip changed;
        int64_t best_cost = 0;
        for (Trip& trip : trips_) {
          Trip next = trip;
          int64_t cost = 0;
          if (!Covers(trip, place) || IsOutAt(trip, place) || !Squeeze(trip, place, next, cost)) continue;
          if (best != nullptr && cost >= best_cost) continue;
          best = &trip;
          best_cost = cost;
          changed = next;
        }
        if (best == nullptr) return place;
        *best = changed;
        bytes = BytesWith(line_, trips_);
      }
    }
    return -1;
  }

  // The trip so that its storage is out at `place`; the cost is what the compute lane may have to wait for, and, small
  // beside that, how soon the storage is needed.
  bool Squeeze(const Trip& trip, int32_t place, Trip& next, int64_t& cost) {
    Result<int64_t> copy = CopyPs(trip, true);
    Result<int64_t> out = CopyPs(trip, false);
    if (!copy.ok() || !out.ok()) return false;
    const bool this_step = trip.wraps && place > trip.after;  // before the step's end
    if (this_step || (place < trip.free && (!trip.wraps || trip.next_step))) {
      // Still on its way out.
      next.next_step = trip.next_step && !this_step;
      if (!next.next_step) next.leave = trip.after + 1;
      next.free = place;
      if (trip.next_step && this_step) next.back = trip.back;
      if (next.free < next.leave) return false;
      const int64_t since = line_.begin_ps[place] - line_.begin_ps[std::min(next.leave, end_)];
      cost = std::max<int64_t>(*out - since, 0) * 1024 + *out;
      return true;
    }
    next.back = place + 1;
    if (next.back > trip.before) return false;
    const int64_t until = line_.begin_ps[trip.before] - line_.begin_ps[next.back];
    cost = std::max<int64_t>(*copy - until, 0) * 1024 - until / 1024;
    return true;
  }

  const Program& program_;
  const StepLine& line_;
  CostModel& model_;
  const OffloadChoice& choice_;
  const int32_t end_;
  std::vector<Trip> gaps_, trips_;
  std::vector<bool> taken_;
  std::vector<int64_t> ideal_;  // bytes at each op if what leaves were gone for its whole gap
};

}  // namespace

Result<std::vector<Trip>> PlanTrips(const Program& program, const StepLine& line, CostModel& model, const OffloadChoice& choice) {
  return Planner(program, line, model, choice).Run();
}

}  // namespace interlace
