#include "passes/offload.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/suggest.h"
#include "passes/host_update.h"
#include "passes/offload_plan.h"
#include "passes/predict.h"

namespace interlace {
namespace {

constexpr std::array<std::string_view, 4> kKindNames = {"states", "master", "gradients",
                                                        "activations"};  // by OffloadKind

Result<std::vector<OffloadKind>> ReadKinds(const PassOptions& options, const std::string& otherwise) {
  std::vector<OffloadKind> kinds;
  std::string text = options.Text("kinds", otherwise);
  for (size_t at = 0; at <= text.size();) {
    const size_t plus = std::min(text.find('+', at), text.size());
    const std::string name = text.substr(at, plus - at);
    const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
    if (found == kKindNames.end()) {
      return MakeError("nothing called '", name, "' can leave memory",
                       DidYouMean(name, {kKindNames.begin(), kKindNames.end()}),
                       "; kinds are joined by +: states, gradients, master, activations");
    }
    kinds.push_back(static_cast<OffloadKind>(found - kKindNames.begin()));
    at = plus + 1;
  }
  return kinds;
}

bool Moves(const Program& program) {
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      if (program.op(id).kind == OpKind::kOffloadStart) return true;
    }
  }
  return false;
}

Status CheckFresh(const Program& program) {
  const bool moves = program.Meta("host_update") == nullptr ? Moves(program) : program.Meta("offload") != nullptr;
  if (moves) return MakeError("storages leave memory in this program already; one offload pass is enough");
  return Ok{};
}

}  // namespace

namespace {

// Plans of one program with one set of units that step on the host, and the best of all so far.
class Planning {
 public:
  Planning(const Program& program, const PassCosts& costs, OffloadChoice choice)
      : program_(program), costs_(costs), choice_(std::move(choice)) {}

  // A program with these units on the host, for each window; whether one of them fits. `windows`: times the largest
  // state.
  Result<bool> Try(const std::vector<UnitId>& on_host, const std::vector<int64_t>& windows,
                   std::optional<int64_t> window) {
    Program base = program_.Clone();
    if (!on_host.empty()) INTERLACE_TRY(StepOnHost(base, on_host));
    int64_t largest = 0, least_ps = 0;
    {
      INTERLACE_ASSIGN(CostModel model, costs_.Model(base));
      INTERLACE_ASSIGN(StepLine line, ReadStepLine(base, model));
      for (const Movable& movable : line.movables) {
        if (movable.state) largest = std::max(largest, movable.bytes);
      }
      INTERLACE_ASSIGN(least_ps, LeastStepPs(line, model, choice_));
    }
    bool fits = false;
    for (int64_t times : windows) {
      choice_.window = window.value_or(times * largest);
      Program next = base.Clone();
      INTERLACE_ASSIGN(CostModel model, costs_.Model(next));
      INTERLACE_ASSIGN(StepLine line, ReadStepLine(next, model));
      Result<std::vector<Trip>> trips = PlanTrips(next, line, model, choice_);
      if (!trips.ok()) {
        if (!failure_) failure_ = trips.error();
        continue;
      }
      fits = true;
      std::erase_if(*trips, [](const Trip& t) { return (!t.wraps || t.next_step) && StaysIn(t); });
      FindClean(line, *trips);
      WriteTrips(next, line, *trips);
      const Traffic traffic = TrafficOf(line, *trips);
      INTERLACE_ASSIGN(const Prediction prediction, Predict(next, costs_));
      // More traffic for less than a hundredth of the time is worth nothing where copies are slower than planned.
      if (best_ && prediction.time_ps >= best_ps_ - best_ps_ / 100) continue;
      next.SetMeta("offload", std::to_string(traffic.out) + " bytes out, " + std::to_string(traffic.in) +
                                  " bytes in, at least " + std::to_string(least_ps / 1000000) + " us a step");
      best_ = std::move(next);
      best_ps_ = prediction.time_ps;
      best_times_ = times;
    }
    return fits;
  }

  int64_t best_ps() const { return best_ps_; }
  int64_t best_times() const { return best_times_; }
  Result<Program> Take() {
    if (!best_) return *failure_;
    return std::move(*best_);
  }

 private:
  const Program& program_;
  const PassCosts& costs_;
  OffloadChoice choice_;
  std::optional<Program> best_;
  std::optional<Error> failure_;
  int64_t best_ps_ = 0, best_times_ = 0;
};

}  // namespace

Result<bool> Offload(Program& program, const PassOptions& options) {
  INTERLACE_TRY(CheckFresh(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  OffloadChoice choice;
  choice.limit = costs.limit;
  INTERLACE_ASSIGN(choice.kinds, ReadKinds(options, "states+gradients+master"));
  INTERLACE_ASSIGN(choice.slack, options.Number("slack", 1.2));
  INTERLACE_ASSIGN(const std::string host, options.Choice("host", {"never", "auto", "always"}));
  const bool freed = FreeGradients(program);
  if (costs.limit == std::numeric_limits<int64_t>::max()) return freed;
  INTERLACE_ASSIGN(std::optional<int64_t> window, options.Bytes("window"));
  {
    INTERLACE_ASSIGN(CostModel model, costs.Model(program));
    INTERLACE_ASSIGN(StepLine line, ReadStepLine(program, model));
    if (*std::max_element(line.bytes.begin(), line.bytes.end()) <= costs.limit) return freed;
  }
  BeginGradients(program);
  // How much room is left for copies under way decides between traffic and stalls, and how many units step on the host
  // between copies and the host's memory: the simulator judges.
  std::vector<int64_t> windows = {0};
  if (!window) windows = {0, 2, 4, 8, 16};
  Planning planning(program, costs, std::move(choice));
  if (host == "never") {
    INTERLACE_TRY(planning.Try({}, windows, window));
  } else {
    INTERLACE_ASSIGN(const std::vector<HostUnit> able, HostUnits(program));
    if (host == "always") {
      INTERLACE_TRY(planning.Try(LastUnits(able, 1), windows, window));
    } else {
      INTERLACE_TRY(planning.Try({}, windows, window));
      // Shares of eighths: all, then halves of what is left around the best. Windows that won or lose nothing.
      std::vector<UnitId> tried;
      double best = 0;
      const auto at = [&](double share) -> Status {
        const std::vector<UnitId> units = LastUnits(able, share);
        if (share <= 0 || share > 1 || units.empty() || units == tried) return Ok{};
        tried = units;
        std::vector<int64_t> few = {planning.best_times()};
        if (few[0] != 0) few.push_back(0);
        const int64_t before = planning.best_ps();
        INTERLACE_TRY(planning.Try(units, few, window));
        if (before == 0 ? planning.best_ps() > 0 : planning.best_ps() < before) best = share;
        return Ok{};
      };
      for (double share : {1.0, 0.5, 0.25, 0.75}) INTERLACE_TRY(at(share));
      const double middle = best;
      for (double share : {middle - 0.125, middle + 0.125}) INTERLACE_TRY(at(share));
    }
  }
  INTERLACE_ASSIGN(program, planning.Take());
  return true;
}

Result<bool> OffloadSync(Program& program, const PassOptions& options) {
  INTERLACE_TRY(CheckFresh(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(const std::vector<OffloadKind> kinds, ReadKinds(options, "states+gradients+master"));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(StepLine line, ReadStepLine(program, model));
  std::vector<Trip> trips;
  for (Trip trip : GapsOf(line)) {
    if (std::find(kinds.begin(), kinds.end(), line.movables[trip.movable].kind) == kinds.end()) continue;
    trip.leave = trip.free = trip.after + 1;
    trip.back = trip.need = trip.before;
    trips.push_back(trip);
  }
  FindClean(line, trips);
  WriteTrips(program, line, trips);
  const Traffic traffic = TrafficOf(line, trips);
  program.SetMeta("offload", std::to_string(traffic.out) + " bytes out, " + std::to_string(traffic.in) + " bytes in");
  return !trips.empty();
}

// Algorithm 2. P is the memory without optimizer states, M_opt all of them; fragments are states in their order, closed
// when they reach the fragment's size.
Result<bool> OffloadDeepCompile(Program& program, const PassOptions& options) {
  INTERLACE_TRY(CheckFresh(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  const int64_t limit = costs.limit;
  INTERLACE_ASSIGN(std::optional<int64_t> fragment, options.Bytes("fragment"));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(StepLine line, ReadStepLine(program, model));
  const int32_t end = line.size();

  struct Fragment {
    std::vector<Trip> trips;
    int64_t bytes = 0;
  };
  std::vector<Fragment> fragments;
  int64_t all = 0;
  int32_t update = end;  // where the states are first used: all are back by then
  for (const Trip& gap : GapsOf(line)) {
    const Movable& movable = line.movables[gap.movable];
    if (movable.kind != OffloadKind::kStates || !gap.wraps) continue;
    if (fragments.empty() || fragments.back().bytes >= fragment.value_or(64 << 20)) fragments.emplace_back();
    fragments.back().trips.push_back(gap);
    fragments.back().bytes += movable.bytes;
    all += movable.bytes;
    update = std::min(update, gap.before);
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
  std::vector<Trip> trips;
  for (size_t k = 0; k < chosen; ++k) {
    for (Trip trip : fragments[k].trips) {
      trip.next_step = true;
      trip.leave = 0;
      trip.free = free_at[k];
      trip.back = back_at[k];
      trip.need = update;
      trips.push_back(trip);
    }
  }
  WriteTrips(program, line, trips);
  const Traffic traffic = TrafficOf(line, trips);
  program.SetMeta("offload", std::to_string(traffic.out) + " bytes out, " + std::to_string(traffic.in) + " bytes in");
  return true;
}

}  // namespace interlace
