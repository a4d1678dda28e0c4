#include "passes/offload.h"

#include <algorithm>
#include <array>
#include <limits>

#include "base/scan.h"
#include "base/suggest.h"
#include "passes/host_update.h"
#include "passes/offload_plan.h"
#include "passes/predict.h"

namespace interlace {

constexpr std::array<std::string_view, 4> kKindNames = {"states", "master", "gradients",
                                                        "activations"};  // by OffloadKind

Result<std::vector<OffloadKind>> ReadOffloadKinds(const PassOptions& options) {
  std::vector<OffloadKind> kinds;
  const std::string text = options.Text("kinds", "states+gradients+master");
  for (std::string_view name : Split(text, '+')) {
    const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
    if (found == kKindNames.end()) {
      return MakeError("nothing called '", name, "' can leave memory",
                       DidYouMean(name, {kKindNames.begin(), kKindNames.end()}),
                       "; kinds are joined by +: states, gradients, master, activations");
    }
    kinds.push_back(static_cast<OffloadKind>(found - kKindNames.begin()));
  }
  return kinds;
}

Status CheckNothingMoves(const Program& program) {
  const bool on_host = program.Meta("host_update") != nullptr;
  bool moves = on_host && program.Meta("offload") != nullptr;
  ForEachOp(program, [&](const Op& op) { moves = moves || (op.kind == OpKind::kOffloadStart && !on_host); });
  if (moves) return MakeError("storages leave memory in this program already; one offload pass is enough");
  return Ok{};
}

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
      Result<std::vector<Interval>> intervals = PlanOffload(next, line, model, choice_);
      if (!intervals.ok()) {
        if (!failure_) failure_ = intervals.error();
        continue;
      }
      fits = true;
      std::erase_if(*intervals, [](const Interval& t) { return (!t.wraps || t.next_step) && IsEmpty(t); });
      FindClean(line, *intervals);
      WriteIntervals(next, line, *intervals, ", at least " + std::to_string(least_ps / 1000000) + " us a step");
      INTERLACE_ASSIGN(const Prediction prediction, Predict(next, costs_));
      // More traffic for less than a hundredth of the time is worth nothing where copies are slower than planned.
      if (best_ && prediction.time_ps >= best_ps_ - best_ps_ / 100) continue;
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
  INTERLACE_TRY(CheckNothingMoves(program));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  OffloadChoice choice;
  choice.limit = costs.limit;
  INTERLACE_ASSIGN(choice.kinds, ReadOffloadKinds(options));
  INTERLACE_ASSIGN(choice.slack, options.Number("slack", 1.2));
  INTERLACE_ASSIGN(const std::string host, options.Choice("host", {"never", "auto", "always"}));
  const bool freed = FreeGradients(program);
  if (costs.limit == std::numeric_limits<int64_t>::max()) return freed;
  if (program.stage)
    return MakeError(
        "what leaves a stage of a pipeline is not planned yet; offload_sync(kinds=states) moves all "
        "optimizer states out, and strategy shard or recompute needs less");
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

}  // namespace interlace
