#include "passes/tensor/auto.h"

#include <algorithm>
#include <map>
#include <memory>

#include "base/parallel.h"
#include "passes/predict.h"
#include "passes/runner.h"
#include "passes/tensor/apply.h"
#include "passes/tensor/estimate.h"

namespace interlace::tensor {
namespace {

constexpr int64_t kExact = 2500;   // combinations of a block that are all tried
constexpr int64_t kSweep = 2000;   // of all windows of one walk through a group, an eighth of them of one window;
constexpr int64_t kOps = 2000000;  // fewer where they would propagate through more ops than so many
constexpr int kSweeps = 4;
constexpr size_t kJudged = 3;  // of the search's own

class PlanSearch {
 public:
  PlanSearch(const Program& program, const CutterOptions& options, const PassCosts& costs)
      : folded_(Fold(program)),
        steps_(folded_.program),
        sweep_(std::clamp<int64_t>(kOps / static_cast<int64_t>(folded_.program.MicroBatchPhase()->ops.size() + 1), 250,
                                   kSweep)),
        roles_(RolesOf(program, program.AxisSize(options.axis))) {
    const size_t threads = ThreadsFor(static_cast<size_t>(kSweep));
    for (size_t t = 0; t < threads; ++t) {
      Result<std::unique_ptr<Estimate>> made = Estimate::Create(folded_, roles_, steps_, options, costs);
      if (!made.ok()) {
        failed_ = made.error();
        return;
      }
      workers_.push_back(std::move(*made));
    }
  }

  Status Run(const std::vector<PlanEntry>& own) {
    if (!failed_.ok()) return failed_;
    LeaveOutGathered();
    const Choices whole(roles_.size(), 0);
    Group();
    for (const Choices& start : {whole, ChoicesOf(own)}) {
      Choices at = start;
      double best = CostOf(at);
      for (int sweep = 0; sweep < kSweeps; ++sweep) {
        const double before = best;
        for (const std::vector<size_t>& group : groups_) Walk(group, at, best);
        if (!(best < before)) break;
      }
      for (const std::vector<size_t>& group : groups_) {
        if (Combinations(group) <= kExact) TryAll(group, at, best);
      }
    }
    return Ok{};
  }

  // Cheapest first; then the cheapest of those that leave the fewest bytes on a rank.
  std::vector<Choices> Best() const {
    std::vector<std::pair<double, Choices>> all;
    for (const auto& [choices, cost] : known_) {
      if (cost < kNever) all.emplace_back(cost, choices);
    }
    std::sort(all.begin(), all.end());
    std::vector<Choices> best;
    double least = kNever;
    for (const auto& [cost, choices] : all) least = std::min(least, HeldBytes(choices));
    bool smallest = false;
    for (const auto& [cost, choices] : all) {
      const bool small = HeldBytes(choices) <= 1.1 * least;
      if (best.size() < kJudged || (small && !smallest)) best.push_back(choices);
      smallest = smallest || small;
      if (best.size() >= kJudged && smallest) break;
    }
    return best;
  }

  const std::vector<Role>& roles() const { return roles_; }
  int64_t estimates() const { return static_cast<int64_t>(known_.size()); }
  double CostOf(const Choices& choices) {
    Try({choices});
    return known_.at(choices);
  }
  void Try(const std::vector<Choices>& all) {
    std::vector<Choices> fresh;
    for (const Choices& choices : all) {
      if (known_.emplace(choices, kNever).second) fresh.push_back(choices);
    }
    std::vector<double> costs(fresh.size());
    InParallel(workers_.size(), [&](size_t t) {
      for (size_t i = t; i < fresh.size(); i += workers_.size()) costs[i] = workers_[t]->Of(fresh[i]).ps;
    });
    for (size_t i = 0; i < fresh.size(); ++i) known_[fresh[i]] = costs[i];
  }

 private:
  // A weight that is made whole again for its operator is better whole.
  void LeaveOutGathered() {
    for (size_t r = 0; r < roles_.size(); ++r) {
      std::vector<Held> kept = {roles_[r].choices[0]};
      for (size_t c = 1; c < roles_[r].choices.size(); ++c) {
        Choices alone(roles_.size(), 0);
        alone[r] = static_cast<int32_t>(c);
        const Estimate::Time time = workers_[0]->Of(alone);
        if (time.ps < kNever && !time.gathers_weight) kept.push_back(roles_[r].choices[c]);
      }
      roles_[r].choices = std::move(kept);
    }
  }

  // Roles of one list of blocks, and those of none, in the order of their first use.
  void Group() {
    std::map<std::string, size_t> index;
    for (size_t r = 0; r < roles_.size(); ++r) {
      if (roles_[r].choices.size() < 2) continue;
      const auto [it, fresh] = index.emplace(roles_[r].list, groups_.size());
      if (fresh) groups_.emplace_back();
      groups_[it->second].push_back(r);
    }
  }

  Choices ChoicesOf(const std::vector<PlanEntry>& plan) const {
    Choices out(roles_.size(), 0);
    for (size_t r = 0; r < roles_.size(); ++r) {
      for (const PlanEntry& entry : plan) {
        if (!Matches(entry.pattern, roles_[r].names[0])) continue;
        const auto& choices = roles_[r].choices;
        const auto it = std::find(choices.begin(), choices.end(), Held{static_cast<int32_t>(entry.dim), entry.blocks});
        if (it != choices.end()) out[r] = static_cast<int32_t>(it - choices.begin());
      }
    }
    return out;
  }

  int64_t Combinations(const std::vector<size_t>& group, size_t begin = 0, size_t count = SIZE_MAX) const {
    int64_t product = 1;
    for (size_t i = begin; i < group.size() && i - begin < count && product <= kExact; ++i)
      product *= static_cast<int64_t>(roles_[group[i]].choices.size());
    return product;
  }

  // Windows of neighbours, each half over the one before.
  void Walk(const std::vector<size_t>& group, Choices& at, double& best) {
    size_t width = 1;
    for (size_t w = 2; w <= group.size(); ++w) {
      int64_t all = 0, largest = 0;
      for (size_t begin = 0; begin < group.size(); begin += (w + 1) / 2) {
        const int64_t one = Combinations(group, begin, w);
        all += one;
        largest = std::max(largest, one);
      }
      if (largest <= sweep_ / 8 && all <= sweep_) width = w;
    }
    for (size_t begin = 0; begin < group.size(); begin += (width + 1) / 2) {
      const size_t end = std::min(begin + width, group.size());
      TryAll({group.begin() + static_cast<ptrdiff_t>(begin), group.begin() + static_cast<ptrdiff_t>(end)}, at, best);
      if (end == group.size()) break;
    }
  }

  void TryAll(const std::vector<size_t>& members, Choices& at, double& best) {
    std::vector<Choices> all;
    Choices next = at;
    for (size_t r : members) next[r] = 0;
    for (bool more = true; more;) {
      all.push_back(next);
      more = false;
      for (size_t r : members) {
        if (++next[r] < static_cast<int32_t>(roles_[r].choices.size())) {
          more = true;
          break;
        }
        next[r] = 0;
      }
    }
    Try(all);
    for (const Choices& choices : all) {
      if (known_.at(choices) < best) best = known_.at(choices), at = choices;
    }
  }

  double HeldBytes(const Choices& choices) const {
    double bytes = 0;
    for (size_t r = 0; r < roles_.size(); ++r) {
      if (choices[r] == 0) bytes += static_cast<double>(roles_[r].bytes);
    }
    return bytes;
  }

  Folded folded_;
  Steps steps_;
  const int64_t sweep_;
  std::vector<Role> roles_;
  Status failed_ = Ok{};
  std::vector<std::unique_ptr<Estimate>> workers_;
  std::vector<std::vector<size_t>> groups_;
  std::map<Choices, double> known_;
};

// The whole program cut so, with the optimizer step and shards over the other axes, in the simulator.
Status Judge(const Program& program, const CutterOptions& options, const PassCosts& costs, Judged& plan) {
  Program cut = program.Clone();
  INTERLACE_TRY(ApplyPlan(cut, plan.plan, options, false));
  cut.Compact();
  std::string shards, replicas;
  for (const Axis& axis : program.mesh) {
    if (axis.name == options.axis) continue;
    if (!shards.empty()) replicas += (replicas.empty() ? "" : "+") + shards;
    shards = axis.name;
  }
  if (!shards.empty()) {
    PassOptions strategy = {{"axis", shards}};
    if (!replicas.empty()) strategy.Set("replicas", replicas);
    INTERLACE_TRY(RunUnverified(cut, {MakeCall("shard", strategy), MakeCall("update")}));
  }
  INTERLACE_ASSIGN(const Prediction prediction, Predict(cut, costs));
  plan.time_ps = prediction.time_ps;
  plan.bytes = prediction.bytes;
  return Ok{};
}

// The fastest that fits; where none does, the smallest.
size_t Pick(const std::vector<Judged>& judged, int64_t limit) {
  size_t best = 0;
  for (size_t i = 1; i < judged.size(); ++i) {
    const bool fits = judged[i].bytes <= limit, best_fits = judged[best].bytes <= limit;
    if (fits != best_fits ? fits
        : fits            ? judged[i].time_ps < judged[best].time_ps
                          : judged[i].bytes < judged[best].bytes)
      best = i;
  }
  return best;
}

}  // namespace

Result<FoundPlan> FindPlan(const Program& program, const std::vector<PlanEntry>& own, const CutterOptions& options,
                           const PassCosts& costs) {
  FoundPlan found;
  PlanSearch search(program, options, costs);
  INTERLACE_TRY(search.Run(own));
  const std::vector<Choices> best = search.Best();
  for (const Choices& choices : best) found.judged.push_back({"search", PlanOf(search.roles(), choices), 0, 0});
  if (!own.empty()) found.judged.push_back({"the model's plan", own, 0, 0});
  const bool whole =
      std::any_of(found.judged.begin(), found.judged.end(), [](const Judged& j) { return j.plan.empty(); });
  if (!whole) found.judged.push_back({"whole", {}, 0, 0});
  std::vector<Status> done(found.judged.size(), Ok{});
  InParallel(found.judged.size(), [&](size_t i) { done[i] = Judge(program, options, costs, found.judged[i]); });
  for (const Status& status : done) INTERLACE_TRY(status);
  const size_t chosen = Pick(found.judged, costs.limit);
  if (chosen < best.size()) {
    for (size_t r = 0; r < search.roles().size(); ++r) {
      const Role& role = search.roles()[r];
      FoundPlan::Reason reason{role.pattern,
                               role.choices[static_cast<size_t>(best[chosen][r])],
                               static_cast<int64_t>(search.CostOf(best[chosen])),
                               {}};
      for (size_t c = 0; c < role.choices.size(); ++c) {
        Choices other = best[chosen];
        if (other[r] == static_cast<int32_t>(c)) continue;
        other[r] = static_cast<int32_t>(c);
        const double cost = search.CostOf(other);
        if (cost < kNever) reason.others.emplace_back(role.choices[c], static_cast<int64_t>(cost));
      }
      found.reasons.push_back(std::move(reason));
    }
  }
  std::rotate(found.judged.begin(), found.judged.begin() + static_cast<ptrdiff_t>(chosen),
              found.judged.begin() + static_cast<ptrdiff_t>(chosen) + 1);
  for (const Role& role : search.roles()) {
    if (!role.undivided.empty()) found.undivided.push_back(role.undivided);
  }
  found.estimates = search.estimates();
  return found;
}

void WriteReasons(Program& program, const FoundPlan& found) {
  const auto us = [](int64_t ps) { return std::to_string(static_cast<double>(ps) / 1e6); };
  std::string judged, reasons;
  for (const Judged& one : found.judged) {
    judged += (judged.empty() ? "" : "\n") + one.name + ", " + std::to_string(one.plan.size()) + " weights cut|" +
              us(one.time_ps) + "|" + std::to_string(one.bytes);
  }
  for (const FoundPlan::Reason& reason : found.reasons) {
    reasons += (reasons.empty() ? "" : "\n") + reason.pattern + "|" + PrintHeld(reason.held) + "|" + us(reason.time_ps);
    for (const auto& [held, ps] : reason.others) reasons += "|" + PrintHeld(held) + "=" + us(ps);
  }
  program.SetMeta("tensor.judged", judged);
  program.SetMeta("tensor.reasons", reasons);
  program.SetMeta("tensor.estimates", std::to_string(found.estimates));
}

}  // namespace interlace::tensor
