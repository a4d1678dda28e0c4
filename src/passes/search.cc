#include "passes/search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_set>
#include <utility>

#include "passes/passes.h"
#include "passes/runner.h"
#include "passes/search_space.h"

namespace interlace {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Searcher {
 public:
  Searcher(const Program& base, const PassCosts& costs, const SearchOptions& options)
      : base_(base), costs_(costs), options_(options), trials_(base, costs, options.seconds) {}

  Result<SearchResult> Run() {
    INTERLACE_ASSIGN(space_, SearchSpace::Of(base_));
    int64_t ops = 0;
    for (const Phase& phase : base_.phases) ops += static_cast<int64_t>(phase.ops.size());
    const int64_t by_size = std::clamp<int64_t>(6'000'000 / std::max<int64_t>(ops, 1), 60, 1200);
    budget_ = options_.evaluations > 0 ? options_.evaluations
                                       : static_cast<int64_t>(options_.share * static_cast<double>(by_size));
    INTERLACE_TRY(trials_.Begin());
    INTERLACE_TRY(Bound());
    INTERLACE_TRY(Heuristic("plain", {}, true));
    INTERLACE_TRY(trials_.Try(space_.Make(space_.LeastMemory()), "least memory"));
    // The limit has no part in the next four lines, so that a higher one finds what a lower one found, but for what
    // the lower one's own heuristics and offloads gave.
    INTERLACE_TRY(Heuristics());
    INTERLACE_TRY(Grid());
    INTERLACE_TRY(Refine());
    INTERLACE_TRY(Shrink());
    INTERLACE_TRY(HeuristicsWithin(costs_.limit, true));
    if (options_.reposition) INTERLACE_TRY(PartsInTheNextStep());
    if (options_.offload && costs_.limit < kNoLimit) INTERLACE_TRY(OffloadWithin(costs_.limit));
    result_.evaluations = trials_.count();
    result_.seconds = trials_.Elapsed();
    result_.tried = std::move(trials_.all());
    return std::move(result_);
  }

 private:
  // The bound of the program with least traffic: everything that can be is gathered once.
  Status Bound() {
    Program least = base_.Clone();
    INTERLACE_TRY(ApplySchedule(least, space_.Make(space_.AllKept())));
    INTERLACE_TRY(OverlapUpdate(least));
    INTERLACE_ASSIGN(result_.lower_bound_ps, LowerBoundPs(least, costs_));
    INTERLACE_ASSIGN(const Prediction kept, trials_.Measure(least));
    kept_bytes_ = kept.bytes;
    return Ok{};
  }

  // Passes as their authors use them, and what they made as a schedule that can be changed. `shown`: a row of its own.
  Status Heuristic(const std::string& name, std::vector<PassCall> passes, bool shown) {
    const bool plain = passes.empty();
    Decisions decisions;
    decisions.heuristic = std::move(passes);
    INTERLACE_ASSIGN(const Trials::Outcome out, trials_.TryPasses(name, std::move(decisions)));
    if (out.candidate == nullptr) return Ok{};
    if (shown) result_.heuristics.push_back(*out.candidate);
    if (out.schedule && !plain) INTERLACE_TRY(trials_.Try(*out.schedule, name + " as a schedule"));
    return Ok{};
  }

  // A pass with these options, then the search's costs and this limit.
  PassCall Within(int64_t limit, std::string_view pass, PassOptions options = {}) const {
    for (const auto& [name, text] : options_.costs.items()) options.Set(name, text);
    if (limit < kNoLimit) options.Set("limit", std::to_string(limit));
    return MakeCall(pass, std::move(options));
  }

  Status Heuristics() {
    INTERLACE_TRY(Heuristic("reorder", {MakeCall("reorder")}, true));
    if (!space_.blocks().empty()) {
      const PassCall modules = MakeCall("bucket", {{"mode", "manual"}, {"modules", space_.blocks()}});
      INTERLACE_TRY(Heuristic("bucket by module", {modules}, true));
      INTERLACE_TRY(Heuristic("bucket by module, reorder", {modules, MakeCall("reorder")}, true));
    }
    const int64_t least = result_.heuristics.front().bytes;
    constexpr int64_t kLevels = 5;
    for (int64_t level = 0; level <= kLevels && !trials_.Spent(budget_ / 3); ++level) {
      INTERLACE_TRY(HeuristicsWithin(least + (kept_bytes_ - least) / kLevels * level, false));
    }
    return Ok{};
  }

  Status HeuristicsWithin(int64_t limit, bool shown) {
    const PassCall prefetch = Within(limit, "prefetch"), unshard = Within(limit, "unshard");
    const PassCall greedy = Within(limit, "bucket", {{"mode", "greedy"}});
    INTERLACE_TRY(Heuristic("greedy buckets, reorder", {greedy, MakeCall("reorder")}, shown));
    INTERLACE_TRY(Heuristic("prefetch", {prefetch}, shown));
    if (base_.stage) return Ok{};  // nothing of it can be kept
    INTERLACE_TRY(Heuristic("unshard", {unshard}, shown));
    return Heuristic("prefetch, unshard", {prefetch, unshard}, shown);
  }

  // Starts over the whole space, then from the best with nothing and with everything kept one coordinate after the
  // other; a change stays when it makes the step faster.
  Status Grid() {
    const int64_t budget = trials_.count() + (budget_ - trials_.count()) / 2;
    std::map<int32_t, std::pair<int64_t, SearchSpace::Settings>> best;  // by the share that is kept
    for (const SearchSpace::Settings& start : space_.Starts()) {
      if (trials_.Spent(budget)) return Ok{};
      INTERLACE_ASSIGN(const Candidate* tried, trials_.Try(space_.Make(start)));
      auto [found, fresh] = best.try_emplace(start.keep, tried->time_ps, start);
      if (!fresh && tried->time_ps < found->second.first) found->second = {tried->time_ps, start};
    }
    size_t left = best.size();
    for (auto& [keep, start] : best) {
      const int64_t share = trials_.count() + (budget - trials_.count()) / static_cast<int64_t>(left--);
      INTERLACE_TRY(Descend(start.second, start.first, share));
    }
    return Ok{};
  }

  Status Descend(SearchSpace::Settings best, int64_t best_ps, int64_t budget) {
    for (bool better = true; better && !trials_.Spent(budget);) {
      better = false;
      for (const SearchSpace::Settings& next : space_.Neighbours(best)) {
        if (trials_.Spent(budget)) break;
        INTERLACE_ASSIGN(const Candidate* tried, trials_.Try(space_.Make(next)));
        if (tried->time_ps >= best_ps) continue;
        best_ps = tried->time_ps;
        best = next;
        better = true;
      }
    }
    return Ok{};
  }

  // From points of the front, moves on what holds the compute lane longest, within the memory of the point; again while
  // it helps.
  Status Refine() {
    for (size_t known = 0; known != trials_.all().size() && !trials_.Spent(budget_);) {
      known = trials_.all().size();
      const std::vector<int64_t> rungs = Rungs();
      for (size_t r = 0; r < rungs.size() && !trials_.Spent(budget_); ++r) {
        const int64_t left = (budget_ - trials_.count()) / static_cast<int64_t>(rungs.size() - r);
        INTERLACE_TRY(Climb(rungs[r], trials_.count() + std::max<int64_t>(left, 1)));
      }
    }
    return Ok{};
  }

  // Memory to refine within: evenly chosen points of the front, the smallest and the fastest among them.
  std::vector<int64_t> Rungs() {
    std::vector<int64_t> rungs;
    for (const Candidate& c : Spread(FrontOf(trials_.all()), 8)) {
      if (rungs.empty() || rungs.back() != c.bytes) rungs.push_back(c.bytes);
    }
    return rungs;
  }

  // So many of them at most, the first and the last among them.
  static std::vector<Candidate> Spread(const std::vector<Candidate>& of, size_t count) {
    std::vector<Candidate> out;
    for (size_t i = 0; i < std::min(count, of.size()); ++i)
      out.push_back(of[of.size() <= count ? i : (of.size() - 1) * i / (count - 1)]);
    return out;
  }

  Status Climb(int64_t limit, int64_t budget) {
    const Candidate* best = trials_.Fastest(limit);
    std::unordered_set<const Candidate*> met;  // from here on
    while (best != nullptr && !trials_.Spent(budget)) {
      INTERLACE_ASSIGN(const std::vector<Stall>* stalls, trials_.StallsOf(*best));
      const Candidate* better = nullptr;
      for (const Schedule& next : space_.Moves(*best->decisions.schedule, *stalls)) {
        if (trials_.Spent(budget)) break;
        INTERLACE_ASSIGN(const Candidate* tried, trials_.Try(next));
        if (!met.insert(tried).second) continue;
        if (tried->bytes > limit || tried->time_ps >= best->time_ps) continue;
        better = tried;
        break;
      }
      best = better;
    }
    return Ok{};
  }

  // Of what is then left of the budget, a quarter of the whole at most: the smallest schedule with other neighbours
  // together, while that makes it smaller.
  Status Shrink() {
    const int64_t budget = std::min(budget_, trials_.count() + budget_ / 4);
    const Candidate* best = trials_.Smallest();
    Status status = Ok{};
    for (const Candidate* from = nullptr; best != from && !trials_.Spent(budget);) {
      from = best;
      SearchSpace::Regroup(*from->decisions.schedule, [&](const Schedule& next) {
        const Result<const Candidate*> tried = trials_.Try(next);
        if (!tried.ok()) {
          status = tried.error();
        } else if ((*tried)->bytes < best->bytes) {
          best = *tried;
        }
        return status.ok() && best == from && !trials_.Spent(budget);
      });
      INTERLACE_TRY(status);
    }
    return Ok{};
  }

  // Schedules of the front that need more than there is, with their excess out of memory: from the smallest to the
  // fastest.
  Status OffloadWithin(int64_t limit) {
    // Those that fit by what lives, but not with all in its place, are over it as well.
    std::vector<Candidate> over = FrontOf(trials_.all());
    size_t first = over.size();
    for (; first > 0; --first) {
      Candidate& c = over[first - 1];
      if (c.bytes <= limit) {
        Program program = base_.Clone();
        INTERLACE_TRY(RunUnverified(program, CallsOf(c.decisions)));
        INTERLACE_ASSIGN(c.bytes, PlacedBytesOf(program, costs_, c.bytes));
      }
      if (c.bytes <= limit) break;
    }
    over.erase(over.begin(), over.begin() + static_cast<ptrdiff_t>(first));
    const Candidate* best = nullptr;
    bool smallest = true;
    for (const Candidate& of : Spread(over, 6)) {
      INTERLACE_ASSIGN(const Trials::Outcome out, Offloaded(of, 0, limit, best));
      if (!std::exchange(smallest, false)) continue;
      result_.refused = out.refused;
      if (out.candidate != nullptr) result_.heuristics.push_back(*out.candidate);
    }
    return options_.reposition && best != nullptr ? LeaveToTheNextStep(*best, limit) : Status(Ok{});
  }

  // What lives is brought to the limit, to the byte where it can be; with all in its place it takes a little more. So
  // again within less, by as much as that is, and by as much as makes something move: pieces of the heap fit more
  // closely than the arena that programs have in which nothing does. Gives the last that was possible, or why none was;
  // `best` becomes the fastest of those that fit, if one is faster.
  Result<Trials::Outcome> Offloaded(const Candidate& of, double next_step, int64_t limit, const Candidate*& best) {
    Decisions decisions = of.decisions;
    decisions.next_step = std::max(next_step, decisions.next_step);
    constexpr int kTimes = 4;
    Trials::Outcome last;
    int64_t within = limit;
    for (int time = 0; time < kTimes; ++time) {
      decisions.offload = Within(within, "offload", options_.host ? PassOptions{{"host", "auto"}} : PassOptions{});
      INTERLACE_ASSIGN(Trials::Outcome out, trials_.TryPasses(of.origin, decisions));
      const Candidate* c = out.candidate;
      if (c == nullptr) {
        if (last.candidate == nullptr) last.refused = out.refused;
        break;
      }
      last = std::move(out);
      if (c->bytes <= limit) {
        if (best == nullptr || c->time_ps < best->time_ps) best = c;
        break;
      }
      within = std::min(within - (c->bytes - limit), last.live_bytes - 1);
    }
    return last;
  }

  // Parts of shards that replicas gather after the optimizer step have nothing to hide behind there; in the next step's
  // forward part they have, the more the earlier they begin, which takes no memory: they come to where the shard lies.
  // Of evenly chosen points of the front.
  Status PartsInTheNextStep() {
    if (std::none_of(base_.units.begin(), base_.units.end(), [](const Unit& unit) { return unit.parted(); }))
      return Ok{};
    for (const Candidate& of : Spread(FrontOf(trials_.all()), 4)) {
      for (const int64_t ahead : {4, 32, 256}) {
        Decisions decisions = of.decisions;
        decisions.next_step = 1;
        decisions.ahead = ahead;
        decisions.overlap_update = false;
        INTERLACE_TRY(trials_.TryPasses(of.origin, std::move(decisions)));
      }
    }
    return Ok{};
  }

  // Copies come back in the backward part, where the optimizer steps are. Of the best of those that were offloaded,
  // some units' steps in the next forward part: then copies run there as well.
  Status LeaveToTheNextStep(const Candidate& best, int64_t limit) {
    Candidate of = best;
    of.decisions.offload.reset();
    const Candidate* unused = nullptr;
    // A quarter first; more where that helped, then less.
    INTERLACE_ASSIGN(const Trials::Outcome quarter, Offloaded(of, 0.25, limit, unused));
    INTERLACE_TRY(Offloaded(of, 0.125, limit, unused));
    if (quarter.candidate != nullptr && quarter.candidate->time_ps < best.time_ps)
      INTERLACE_TRY(Offloaded(of, 0.375, limit, unused));
    return Ok{};
  }

  const Program& base_;
  const PassCosts& costs_;
  const SearchOptions& options_;
  SearchSpace space_;
  Trials trials_;
  int64_t budget_ = 0;
  int64_t kept_bytes_ = 0;  // peak with every unit kept
  SearchResult result_;
};

}  // namespace

Result<SearchResult> TrySchedules(const Program& base, const PassCosts& costs, const SearchOptions& options) {
  return Searcher(base, costs, options).Run();
}

Result<SearchResult> SearchSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options) {
  INTERLACE_ASSIGN(SearchResult found, TrySchedules(base, costs, options));
  INTERLACE_ASSIGN(Picked picked, Choose(found.tried, costs, options.slack, [&](const Candidate& c) -> Result<Program> {
                     Program program = base.Clone();
                     INTERLACE_TRY(RunUnverified(program, CallsOf(c.decisions)));
                     return program;
                   }));
  found.front = std::move(picked.front);
  found.chosen = picked.chosen;
  return found;
}

}  // namespace interlace
