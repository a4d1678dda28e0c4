#include "passes/search.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "base/sort.h"
#include "passes/evaluate.h"
#include "passes/keep.h"
#include "passes/overlap_update.h"
#include "passes/runner.h"
#include "passes/search_space.h"

namespace interlace {
namespace {

class Searcher {
 public:
  Searcher(const Program& base, const PassCosts& costs, const SearchOptions& options)
      : base_(base), costs_(costs), options_(options), begin_(std::chrono::steady_clock::now()) {}

  Result<SearchResult> Run() {
    INTERLACE_ASSIGN(space_, SearchSpace::Of(base_));
    int64_t ops = 0;
    for (const Phase& phase : base_.phases) ops += static_cast<int64_t>(phase.ops.size());
    budget_ = options_.evaluations > 0
                  ? options_.evaluations
                  : static_cast<int64_t>(options_.share * static_cast<double>(std::clamp<int64_t>(
                                                              6'000'000 / std::max<int64_t>(ops, 1), 60, 1200)));
    INTERLACE_ASSIGN(known_, KnownOpsOf(base_, costs_));
    INTERLACE_TRY(Bound());
    INTERLACE_TRY(Plain());
    INTERLACE_TRY(Try(space_.Make(space_.LeastMemory()), "least memory"));
    // The limit has no part in the next four lines, so that a higher one finds what a lower one found, but for what
    // the lower one's own heuristics and journeys gave.
    INTERLACE_TRY(Heuristics());
    INTERLACE_TRY(Grid());
    INTERLACE_TRY(Refine());
    INTERLACE_TRY(Shrink());
    INTERLACE_TRY(HeuristicsWithin(costs_.limit, true));
    INTERLACE_TRY(OffloadWithin(costs_.limit));
    result_.judged = std::move(all_);
    result_.evaluations = evaluations_;
    result_.seconds = Elapsed();
    return std::move(result_);
  }

 private:
  double Elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  bool Spent(int64_t budget) const {
    return evaluations_ >= budget || (options_.seconds > 0 && Elapsed() > options_.seconds);
  }

  // The bound of the program with least traffic: everything that can be is gathered once.
  Status Bound() {
    Program least = base_.Clone();
    INTERLACE_TRY(ApplySchedule(least, space_.Make(space_.AllKept())));
    INTERLACE_TRY(OverlapUpdate(least));
    INTERLACE_ASSIGN(result_.lower_bound_ps, LowerBoundPs(least, costs_));
    ++evaluations_;
    INTERLACE_ASSIGN(const Verdict kept, Judge(least, costs_));
    kept_bytes_ = kept.bytes;
    return Ok{};
  }

  Status Plain() {
    ++evaluations_;
    INTERLACE_ASSIGN(Verdict verdict, Judge(base_, costs_));
    Candidate plain{"plain", "", "", verdict.time_ps, verdict.bytes};
    result_.heuristics.push_back(plain);
    all_.push_back(std::move(plain));
    return Ok{};
  }

  // Runs passes on the base and judges what comes out; a pass that refuses is no candidate. `shown`: a row of its own.
  Status Heuristic(const std::string& name, const std::string& passes, bool shown) {
    Program program = base_.Clone();
    const Status made = RunUnverified(program, passes);
    if (!made.ok()) {
      refusal_ = made.error().message;
      return Ok{};
    }
    ++evaluations_;
    INTERLACE_ASSIGN(Verdict verdict, Judge(program, costs_));
    live_bytes_ = verdict.bytes;
    Candidate candidate{name, "", passes, verdict.time_ps, verdict.bytes};
    const bool offloads = passes.find("offload(") != std::string::npos;
    if (offloads) {
      INTERLACE_ASSIGN(candidate.bytes, PlacedBytesOf(program, costs_, verdict.bytes));
      candidate.placed = true;
    }
    if (shown) result_.heuristics.push_back(candidate);
    all_.push_back(std::move(candidate));
    if (offloads) return Ok{};  // no schedule says that
    Result<Schedule> schedule = ScheduleOf(program, base_);
    if (schedule.ok()) INTERLACE_TRY(Try(*schedule, name + " as a schedule"));
    return Ok{};
  }

  // Schedules of the front that need more than there is, with their excess out of memory: from the smallest to the
  // fastest.
  Status OffloadWithin(int64_t limit) {
    if (!options_.offload || limit == std::numeric_limits<int64_t>::max()) return Ok{};
    // Those that fit by what lives, but not with all in its place, are over it as well.
    std::vector<Candidate> over = Front();
    size_t first = over.size();
    for (; first > 0; --first) {
      Candidate& c = over[first - 1];
      if (c.bytes <= limit) {
        Program program = base_.Clone();
        INTERLACE_TRY(RunUnverified(program, c.passes));
        INTERLACE_ASSIGN(c.bytes, PlacedBytesOf(program, costs_, c.bytes));
      }
      if (c.bytes <= limit) break;
    }
    over.erase(over.begin(), over.begin() + static_cast<ptrdiff_t>(first));
    constexpr size_t kTried = 6;
    size_t last = over.size();
    const size_t before = all_.size();
    for (size_t i = 0; i < std::min(kTried, over.size()); ++i) {
      const size_t at = over.size() <= kTried ? i : (over.size() - 1) * i / (kTried - 1);
      if (at == last) continue;
      last = at;
      refusal_.clear();
      INTERLACE_TRY(Offloaded(over[at].name + kOffloaded, over[at].passes, 0, limit, i == 0));
      if (i == 0) result_.refused = refusal_;
    }
    return LeaveToTheNextStep(before, limit);
  }

  // What lives is brought to the limit, to the byte where it can be; with all in its place it takes a little more. So
  // again within less, by as much as that is, and by as much as makes something move: pieces of the heap fit more
  // closely than the arena that programs have in which nothing does.
  Status Offloaded(const std::string& name, const std::string& passes, double share, int64_t limit, bool shown) {
    constexpr int kTimes = 4;
    const size_t before = all_.size();
    int64_t within = limit;
    for (int time = 0; time < kTimes; ++time) {
      const size_t tried = all_.size();
      INTERLACE_TRY(Heuristic(name, OffloadPasses(passes, share, within), false));
      if (all_.size() == tried || all_.back().bytes <= limit) break;
      within = std::min(within - (all_.back().bytes - limit), live_bytes_ - 1);
    }
    if (all_.size() == before) return Ok{};
    refusal_.clear();
    if (shown) result_.heuristics.push_back(all_.back());
    return Ok{};
  }

  // Copies come back in the backward part, where the optimizer steps are. Of the best of those that were judged since
  // `before`, some units' steps in the next forward part: then copies run there as well.
  Status LeaveToTheNextStep(size_t before, int64_t limit) {
    if (!options_.reposition) return Ok{};
    const Candidate* best = nullptr;
    for (size_t i = before; i < all_.size(); ++i) {
      if (all_[i].bytes <= limit && (best == nullptr || all_[i].time_ps < best->time_ps)) best = &all_[i];
    }
    if (best == nullptr) return Ok{};
    const std::string name = best->name.substr(0, best->name.size() - kOffloaded.size()),
                      passes = best->passes.substr(0, best->passes.find(",offload("));
    const int64_t none_ps = best->time_ps;
    // A quarter first; more where that helped, then less.
    const auto attempt = [&](double share, const char* text) -> Result<int64_t> {
      const size_t tried = all_.size();
      INTERLACE_TRY(
          Offloaded(name + ", " + text + " of the updates in the next step" + kOffloaded, passes, share, limit, false));
      return all_.size() > tried ? all_.back().time_ps : std::numeric_limits<int64_t>::max();
    };
    INTERLACE_ASSIGN(const int64_t quarter_ps, attempt(0.25, "a quarter"));
    INTERLACE_TRY(attempt(0.125, "an eighth"));
    if (quarter_ps < none_ps) INTERLACE_TRY(attempt(0.375, "three eighths"));
    return Ok{};
  }

  // Of a schedule's passes, those that make it fit.
  std::string OffloadPasses(std::string passes, double share, int64_t limit) const {
    constexpr std::string_view kOverlap = "overlap_update";
    if (passes.ends_with(kOverlap)) passes.erase(passes.size() - kOverlap.size());
    if (!passes.empty() && !passes.ends_with(',')) passes += ",";
    if (share > 0) passes += "reposition_update(share=" + std::to_string(share) + "),";
    return passes + std::string(kOverlap) + "," + With("offload", options_.host ? "host=auto" : "", limit);
  }

  std::string With(const std::string& pass, const std::string& own, int64_t limit) const {
    std::string text = own;
    const auto add = [&](const std::string& option) { text += (text.empty() ? "" : ",") + option; };
    if (!options_.costs_text.empty()) add(options_.costs_text);
    if (limit < std::numeric_limits<int64_t>::max()) add("limit=" + std::to_string(limit));
    return text.empty() ? pass : pass + "(" + text + ")";
  }

  Status Heuristics() {
    const std::string modules = "bucket(mode=manual,modules=" + space_.blocks() + ")";
    INTERLACE_TRY(Heuristic("reorder", "reorder", true));
    if (!space_.blocks().empty()) {
      INTERLACE_TRY(Heuristic("bucket by module", modules, true));
      INTERLACE_TRY(Heuristic("bucket by module, reorder", modules + ",reorder", true));
    }
    const int64_t least = result_.heuristics.front().bytes;
    constexpr int64_t kLevels = 5;
    for (int64_t level = 0; level <= kLevels && !Spent(budget_ / 3); ++level) {
      INTERLACE_TRY(HeuristicsWithin(least + (kept_bytes_ - least) / kLevels * level, false));
    }
    return Ok{};
  }

  Status HeuristicsWithin(int64_t limit, bool shown) {
    const std::string prefetch = With("prefetch", "", limit), unshard = With("unshard", "", limit);
    INTERLACE_TRY(Heuristic("greedy buckets, reorder", With("bucket", "mode=greedy", limit) + ",reorder", shown));
    INTERLACE_TRY(Heuristic("prefetch", prefetch, shown));
    INTERLACE_TRY(Heuristic("unshard", unshard, shown));
    return Heuristic("prefetch, unshard", prefetch + "," + unshard, shown);
  }

  // Judges a schedule unless it has been before; remembers the point.
  Result<const Point*> Evaluate(const Schedule& schedule, bool with_stalls) {
    std::string text = PrintSchedule(schedule);
    auto [found, fresh] = points_.try_emplace(text);
    Point& point = found->second;
    if (!fresh && (point.judged_stalls || !with_stalls)) return &point;
    if (variant_) {
      variant_->TakeBack(base_);
    } else {
      variant_ = base_.Clone();
      variant_->Track();
    }
    Program& program = *variant_;
    INTERLACE_TRY(ApplySchedule(program, schedule));
    INTERLACE_ASSIGN(const bool overlaps, OverlapUpdate(program));
    ++evaluations_;
    INTERLACE_ASSIGN(point.verdict, Judge(program, costs_, with_stalls, known_));
    point.schedule = schedule;
    point.judged_stalls = with_stalls;
    if (overlaps) text += ",overlap_update";
    if (fresh) all_.push_back({"", "", text, point.verdict.time_ps, point.verdict.bytes});
    return &point;
  }

  Status Try(const Schedule& schedule, const std::string& name) {
    const size_t before = all_.size();
    INTERLACE_TRY(Evaluate(schedule, false));
    if (all_.size() > before) all_.back().name = name;  // not judged before
    return Ok{};
  }

  // Starts over the whole space, then from the best with nothing and with everything kept one coordinate after the
  // other; a change stays when it makes the step faster.
  Status Grid() {
    const int64_t budget = evaluations_ + (budget_ - evaluations_) / 2;
    std::map<int32_t, std::pair<int64_t, SearchSpace::Settings>> best;  // by the share that is kept
    for (const SearchSpace::Settings& start : space_.Starts()) {
      if (Spent(budget)) return Ok{};
      INTERLACE_ASSIGN(const Point* point, Evaluate(space_.Make(start), false));
      auto [found, fresh] = best.try_emplace(start.keep, point->verdict.time_ps, start);
      if (!fresh && point->verdict.time_ps < found->second.first) found->second = {point->verdict.time_ps, start};
    }
    size_t left = best.size();
    for (auto& [keep, start] : best) {
      const int64_t share = evaluations_ + (budget - evaluations_) / static_cast<int64_t>(left--);
      INTERLACE_TRY(Descend(start.second, start.first, share));
    }
    return Ok{};
  }

  Status Descend(SearchSpace::Settings best, int64_t best_ps, int64_t budget) {
    for (bool better = true; better && !Spent(budget);) {
      better = false;
      for (const SearchSpace::Settings& next : space_.Neighbours(best)) {
        if (Spent(budget)) break;
        INTERLACE_ASSIGN(const Point* tried, Evaluate(space_.Make(next), false));
        if (tried->verdict.time_ps >= best_ps) continue;
        best_ps = tried->verdict.time_ps;
        best = next;
        better = true;
      }
    }
    return Ok{};
  }

  // From points of the front, moves on what holds the compute lane longest, within the memory of the point; again while
  // it helps.
  Status Refine() {
    for (size_t judged = 0; judged != points_.size() && !Spent(budget_);) {
      judged = points_.size();
      const std::vector<int64_t> rungs = Rungs();
      for (size_t r = 0; r < rungs.size() && !Spent(budget_); ++r) {
        const int64_t share = std::max<int64_t>((budget_ - evaluations_) / static_cast<int64_t>(rungs.size() - r), 1);
        INTERLACE_TRY(Climb(rungs[r], evaluations_ + share));
      }
    }
    return Ok{};
  }

  // Memory to refine within: evenly chosen points of the front, the smallest and the fastest among them.
  std::vector<int64_t> Rungs() const {
    const std::vector<Candidate> front = Front();
    constexpr size_t kRungs = 8;
    std::vector<int64_t> rungs;
    for (size_t i = 0; i < kRungs; ++i) {
      const int64_t bytes = front[(front.size() - 1) * i / (kRungs - 1)].bytes;
      if (rungs.empty() || rungs.back() != bytes) rungs.push_back(bytes);
    }
    return rungs;
  }

  // Of what is then left of the budget, a quarter of the whole at most: the smallest schedule with other neighbours
  // together, while that makes it smaller.
  Status Shrink() {
    const int64_t budget = std::min(budget_, evaluations_ + budget_ / 4);
    const Point* best = nullptr;
    for (const auto& [text, point] : points_) {
      if (best == nullptr || point.verdict.bytes < best->verdict.bytes) best = &point;
    }
    Status status = Ok{};
    for (const Point* from = nullptr; best != from && !Spent(budget);) {
      from = best;
      SearchSpace::Regroup(from->schedule, [&](const Schedule& next) {
        const Result<const Point*> point = Evaluate(next, false);
        if (!point.ok()) {
          status = point.error();
        } else if ((*point)->verdict.bytes < best->verdict.bytes) {
          best = *point;
        }
        return status.ok() && best == from && !Spent(budget);
      });
      INTERLACE_TRY(status);
    }
    return Ok{};
  }

  Status Climb(int64_t limit, int64_t budget) {
    const Point* best = nullptr;
    for (const auto& [text, point] : points_) {
      if (point.verdict.bytes > limit) continue;
      if (best == nullptr || point.verdict.time_ps < best->verdict.time_ps) best = &point;
    }
    if (best == nullptr) return Ok{};
    std::set<std::string> tried;
    while (!Spent(budget)) {
      INTERLACE_ASSIGN(best, Evaluate(best->schedule, true));
      const Point* better = nullptr;
      for (const Schedule& next : space_.Moves(*best)) {
        if (Spent(budget)) break;
        if (!tried.insert(PrintSchedule(next)).second) continue;
        INTERLACE_ASSIGN(const Point* point, Evaluate(next, false));
        if (point->verdict.bytes <= limit && point->verdict.time_ps < best->verdict.time_ps) {
          better = point;
          break;
        }
      }
      if (better == nullptr) break;
      best = better;
    }
    return Ok{};
  }

  std::vector<Candidate> Front() const { return FrontOf(all_); }

  static inline const std::string kOffloaded = ", offload";

  const Program& base_;
  const PassCosts& costs_;
  const SearchOptions& options_;
  const std::chrono::steady_clock::time_point begin_;
  SearchSpace space_;
  KnownOps known_;                  // of the base
  std::optional<Program> variant_;  // of the base: the schedule that was judged last
  int64_t budget_ = 0, evaluations_ = 0;
  std::string refusal_;                  // of the last heuristic that a pass refused
  int64_t live_bytes_ = 0;               // of the last heuristic that was judged
  int64_t kept_bytes_ = 0;               // peak with every unit kept
  std::map<std::string, Point> points_;  // by the schedule's text
  std::vector<Candidate> all_;
  SearchResult result_;
};

}  // namespace

size_t PickFromFront(const std::vector<Candidate>& front, int64_t limit, double slack) {
  int64_t best = std::numeric_limits<int64_t>::max();
  for (const Candidate& c : front) {
    if (c.bytes <= limit) best = std::min(best, c.time_ps);
  }
  for (size_t i = 0; i < front.size(); ++i) {
    if (front[i].bytes > limit) break;
    if (static_cast<double>(front[i].time_ps) <= static_cast<double>(best) * (1 + slack)) return i;
  }
  return front.size();
}

std::vector<Candidate> FrontOf(std::vector<Candidate> all) {
  StableSort(all, [](const Candidate& a, const Candidate& b) {
    return std::pair(a.bytes, a.time_ps) < std::pair(b.bytes, b.time_ps);
  });
  std::vector<Candidate> front;
  for (Candidate& c : all) {
    if (!front.empty() && c.time_ps >= front.back().time_ps) continue;
    if (c.name.empty()) c.name = "search";
    front.push_back(std::move(c));
  }
  return front;
}

Status Choose(SearchResult& found, const PassCosts& costs, double slack,
              const std::function<Result<Program>(const Candidate&)>& make) {
  // Each round places one that is not yet, so that ends; bytes only grow, so what lives is a bound for what is left
  // out.
  for (;;) {
    found.front = FrontOf(found.judged);
    found.chosen = PickFromFront(found.front, costs.limit, slack);
    if (costs.limit == std::numeric_limits<int64_t>::max()) return Ok{};
    const Candidate& picked = found.front[found.chosen < found.front.size() ? found.chosen : 0];
    if (picked.placed) return Ok{};
    INTERLACE_ASSIGN(const Program program, make(picked));
    INTERLACE_ASSIGN(const int64_t bytes, PlacedBytesOf(program, costs, picked.bytes));
    for (Candidate& c : found.judged) {
      if (c.captured != picked.captured || c.passes != picked.passes) continue;
      c.bytes = bytes;
      c.placed = true;
    }
  }
}

Result<SearchResult> JudgeSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options) {
  return Searcher(base, costs, options).Run();
}

Result<SearchResult> SearchSchedules(const Program& base, const PassCosts& costs, const SearchOptions& options) {
  INTERLACE_ASSIGN(SearchResult found, JudgeSchedules(base, costs, options));
  INTERLACE_TRY(Choose(found, costs, options.slack, [&](const Candidate& c) -> Result<Program> {
    Program program = base.Clone();
    INTERLACE_TRY(RunUnverified(program, c.passes));
    return program;
  }));
  return found;
}

}  // namespace interlace
