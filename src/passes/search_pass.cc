// The pass `search`: on the program as it is, or one search for each variant of the captured program, side by side.
#include <algorithm>
#include <chrono>
#include <limits>

#include "base/parallel.h"
#include "passes/passes.h"
#include "passes/runner.h"
#include "passes/search.h"
#include "passes/search_space.h"

namespace interlace {
namespace {

// "name|time in us|bytes[|captured passes|passes]" of each, separated by newlines: what explain reads.
std::string Table(const std::vector<Candidate>& candidates, bool with_passes = false) {
  std::string text;
  for (const Candidate& c : candidates) {
    text += (text.empty() ? "" : "\n") + NameOf(c.origin, c.decisions) + "|" + std::to_string(c.time_ps / 1'000'000) +
            "|" + std::to_string(c.bytes);
    if (with_passes)
      text += "|" + PrintPipeline(CallsOf(c.decisions.captured)) + "|" + PrintPipeline(CallsOf(c.decisions));
  }
  return text;
}

void WriteMeta(Program& program, const SearchResult& found, const PassCosts& costs) {
  program.SetMeta("search.chosen", Table({found.front[found.chosen]}, true));
  program.SetMeta("search.front", Table(found.front));
  program.SetMeta("search.heuristics", Table(found.heuristics));
  program.SetMeta("search.without", Table(found.without));
  program.SetMeta("search.bound_us", std::to_string(found.lower_bound_ps / 1'000'000));
  program.SetMeta("search.evaluations", std::to_string(found.evaluations));
  program.SetMeta("search.limit",
                  costs.limit == std::numeric_limits<int64_t>::max() ? "none" : std::to_string(costs.limit));
}

Status CheckFits(const SearchResult& found, const Program& program, const PassCosts& costs,
                 const PassOptions& options) {
  if (found.chosen < found.front.size()) return Ok{};
  const bool recomputes = options.Text("recompute", "auto") == "auto",
             offloads = options.Text("offload", "none") != "none" || program.stage;  // of a stage nothing leaves
  const std::string let = recomputes && offloads ? ""
                          : recomputes ? "let it send storages out of memory (offload=auto; in training: a tier), "
                          : offloads   ? "let it recompute activations (recompute=auto), "
                                       : "let it recompute activations (recompute=auto) or send storages out of memory "
                                         "(offload=auto; in training: a tier), ";
  return MakeError("nothing fits into the limit of ", costs.limit,
                   " bytes: the smallest schedule that was found needs ", found.front.front().bytes, "; raise it to ",
                   (found.front.front().bytes + 1048575) / 1048576, "MiB, use more ranks, ", let,
                   "or take a smaller micro-batch with more accumulation",
                   found.refused.empty() ? "" : "; out of memory less is enough, but: " + found.refused);
}

Result<PassCosts> ReadSearchCosts(const Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(const std::string transient, options.Choice("transient", {"false", "true"}));
  costs.transient = transient == "true";
  return costs;
}

Result<SearchOptions> ReadOptions(const PassOptions& options) {
  SearchOptions search;
  INTERLACE_ASSIGN(search.evaluations, options.Int("evaluations", 0, 0));
  INTERLACE_ASSIGN(search.seconds, options.Number("seconds", 0));
  INTERLACE_ASSIGN(const std::string offload, options.Choice("offload", {"none", "auto", "host"}));
  INTERLACE_ASSIGN(const std::string reposition, options.Choice("reposition", {"none", "auto"}));
  search.host = offload == "host";
  search.offload = search.host || offload == "auto";
  search.reposition = reposition == "auto";
  for (const char* name : {"cluster", "profile"}) {
    if (const std::string* text = options.Find(name)) search.costs.Set(name, *text);
  }
  return search;
}

// The base with a schedule, and updates beside the backward part where they were.
Result<Program> WithSchedule(const Program& base, const Schedule& schedule, bool overlaps) {
  Program program = base.Clone();
  INTERLACE_TRY(ApplySchedule(program, schedule));
  if (overlaps) INTERLACE_TRY(OverlapUpdate(program));
  return program;
}

// What the decisions do, as a schedule; nothing for those whose moves out of memory are made for it as it is.
Result<std::optional<Schedule>> ScheduleThatMayChange(const Program& base, const Decisions& decisions) {
  if (decisions.offload || decisions.schedule)
    return decisions.offload ? std::optional<Schedule>() : decisions.schedule;
  Program program = base.Clone();
  INTERLACE_TRY(RunUnverified(program, CallsOf(decisions)));
  INTERLACE_ASSIGN(Schedule schedule, ScheduleOf(program, base));
  return std::optional(std::move(schedule));
}

// The chosen schedule with its reductions waited for as late as costs neither time nor memory, as far as is predicted.
// The simulator's ranks are equally fast at every moment; real ones are not, and where a reduction is waited for when
// the next one starts, whatever holds up one rank holds up all of them.
Status WaitLater(const Program& base, const PassCosts& costs, Candidate& chosen) {
  INTERLACE_ASSIGN(const std::optional<Schedule> schedule, ScheduleThatMayChange(base, chosen.decisions));
  if (!schedule) return Ok{};
  for (int32_t late : {Schedule::kAtOnce, 16, 8, 4, 2}) {
    Schedule next = *schedule;
    for (Schedule::Bucket& bucket : next.reduce) bucket.ahead = std::max(bucket.ahead, late);
    if (next == *schedule) return Ok{};
    INTERLACE_ASSIGN(const Program program, WithSchedule(base, next, chosen.decisions.overlap_update));
    INTERLACE_ASSIGN(const Prediction prediction, Predict(program, costs));
    int64_t bytes = prediction.bytes;
    if (chosen.placed) {
      INTERLACE_ASSIGN(bytes, PlacedBytesOf(program, costs, bytes));
    }
    if (prediction.time_ps > chosen.time_ps || bytes > chosen.bytes) continue;
    chosen.decisions.schedule = std::move(next);
    chosen.time_ps = prediction.time_ps;
    chosen.bytes = bytes;
    return Ok{};
  }
  return Ok{};
}

// The chosen schedule, each time without one kind of decision: what that decision is worth.
Result<std::vector<Candidate>> WithoutEach(const Program& base, const PassCosts& costs, const Decisions& chosen) {
  using Buckets = std::vector<Schedule::Bucket>;
  std::vector<Candidate> out;
  INTERLACE_ASSIGN(const std::optional<Schedule> schedule, ScheduleThatMayChange(base, chosen));
  if (!schedule) return out;
  const auto alone = [](Buckets& buckets) {
    Buckets units;
    for (const Schedule::Bucket& bucket : buckets) {
      for (UnitId unit : bucket.units) units.push_back({{unit}, bucket.ahead});
    }
    buckets = std::move(units);
  };
  const auto at_once = [](Buckets& buckets) {
    for (Schedule::Bucket& bucket : buckets) bucket.ahead = 0;
  };
  const auto add = [&](const char* name, auto&& change, bool overlaps) -> Status {
    Schedule next = *schedule;
    change(next);
    if (next == *schedule && overlaps == chosen.overlap_update) return Ok{};
    INTERLACE_ASSIGN(const Program program, WithSchedule(base, next, overlaps));
    INTERLACE_ASSIGN(const Prediction prediction, Predict(program, costs));
    out.push_back({name, {}, prediction.time_ps, prediction.bytes, false});
    return Ok{};
  };
  const bool overlaps = chosen.overlap_update;
  // What was kept is then gathered for the backward part again, each unit by itself.
  INTERLACE_TRY(add(
      "no unit kept", [](Schedule& s) { s.keep.clear(); }, overlaps));
  INTERLACE_TRY(add(
      "every unit gathered by itself", [&](Schedule& s) { alone(s.forward), alone(s.backward); }, overlaps));
  INTERLACE_TRY(add(
      "every unit reduced by itself", [&](Schedule& s) { alone(s.reduce); }, overlaps));
  INTERLACE_TRY(add(
      "no gather ahead of its use", [&](Schedule& s) { at_once(s.forward), at_once(s.backward); }, overlaps));
  INTERLACE_TRY(add(
      "every reduction waited for at once", [&](Schedule& s) { at_once(s.reduce); }, overlaps));
  INTERLACE_TRY(add(
      "updates after the last micro-batch", [](Schedule&) {}, false));
  return out;
}

// Searches one variant after the other, several at a time; what is found does not depend on how many.
class VariantSearch {
 public:
  // `program`: what the passes since made of the captured one as it is.
  VariantSearch(const Origin& origin, const Program& program, const PassCosts& costs, const SearchOptions& search)
      : captured_(origin.captured.Clone()), since_(origin.since), costs_(costs), search_(search) {
    for (PassCall& call : since_) {
      if (call.pass == FindPass("overlap")) {  // orders by cost, too
        for (const auto& [name, text] : search.costs.items()) call.options.Set(name, text);
      } else if (call.pass == FindPass("tensor")) {  // parameters are cut in one way
        call.options.Set("plan", "model");
        for (const auto& [name, text] : program.meta) {
          if (name == "tensor" || name.starts_with("tensor.")) captured_.SetMeta(name, text);
        }
      }
    }
  }

  // Error: what runs between the captured program and the search.
  Status Run(const std::vector<CapturedDecisions>& variants) {
    std::vector<Result<SearchResult>> results(variants.size(), SearchResult{});
    InParallel(variants.size(), [&](size_t i) { results[i] = One(variants[i]); });
    for (size_t i = 0; i < variants.size(); ++i) {
      INTERLACE_ASSIGN(SearchResult found, std::move(results[i]));
      if (variants[i] == CapturedDecisions{}) {
        all_.heuristics = std::move(found.heuristics);
      }
      // Of those that were searched: a variant whose passes refuse has none.
      if (found.lower_bound_ps > 0 && (all_.lower_bound_ps == 0 || found.lower_bound_ps < all_.lower_bound_ps))
        all_.lower_bound_ps = found.lower_bound_ps;
      for (Candidate& c : found.tried) {
        c.decisions.captured = variants[i];
        all_.tried.push_back(std::move(c));
      }
      if (!found.refused.empty()) all_.refused = found.refused;  // those that recompute most come last
      all_.evaluations += found.evaluations;
    }
    return Ok{};
  }

  SearchResult& all() { return all_; }

  // The sharded program of these decisions.
  Result<Program> Base(const CapturedDecisions& captured) const {
    Program base = captured_.Clone();
    INTERLACE_TRY(RunUnverified(base, CallsOf(captured)));
    INTERLACE_TRY(RunUnverified(base, Since(captured)));
    return base;
  }

 private:
  Result<SearchResult> One(const CapturedDecisions& captured) const {
    Program base = captured_.Clone();
    // Nothing can run again, or micro-batches depend on one another.
    if (!RunUnverified(base, CallsOf(captured)).ok()) return SearchResult{};
    const Status since = RunUnverified(base, Since(captured));
    // What runs again may not go with a pipeline's borders, or with ranks that share a product.
    if (!since.ok() && captured == CapturedDecisions{}) return since.error();
    if (!since.ok()) return SearchResult{};
    return TrySchedules(base, costs_, search_);
  }

  // What made the sharded program, with what is decided of it.
  std::vector<PassCall> Since(const CapturedDecisions& captured) const {
    std::vector<PassCall> calls = since_;
    for (PassCall& call : calls) {
      if (captured.regather && call.pass == FindPass("tensor")) call.options.Set("regather", "true");
      if (!captured.reduce_last || call.pass != FindPass("accumulate")) continue;
      PassOptions options;
      for (const auto& [name, text] : call.options.items()) {
        if (name != "mode") options.Set(name, text);
      }
      options.Set("mode", "reduce_last");
      call.options = options;
    }
    return calls;
  }

  Program captured_;
  std::vector<PassCall> since_;
  const PassCosts& costs_;
  const SearchOptions& search_;
  SearchResult all_;
};

// What the search ends with: the chosen schedule made on `base`, with its reasons.
Status Finish(Program base, const PassCosts& costs, SearchResult& found, Program& program) {
  Candidate& chosen = found.front[found.chosen];
  INTERLACE_TRY(WaitLater(base, costs, chosen));
  INTERLACE_ASSIGN(std::vector<Candidate> without, WithoutEach(base, costs, chosen.decisions));
  found.without.insert(found.without.begin(), without.begin(), without.end());
  INTERLACE_TRY(RunUnverified(base, CallsOf(chosen.decisions)));
  WriteMeta(base, found, costs);
  program = std::move(base);
  return Ok{};
}

}  // namespace

bool SearchesCaptured(const PassOptions& options) {
  return options.Text("recompute", "auto") == "auto" || options.Text("breadth_first", "auto") == "auto" ||
         options.Text("accumulate", "none") == "auto";
}

Result<bool> SearchCaptured(Program& program, const Origin& origin, const PassOptions& options) {
  INTERLACE_ASSIGN(SearchOptions search, ReadOptions(options));
  INTERLACE_ASSIGN(const PassCosts costs, ReadSearchCosts(program, options));
  // What a pipeline's stages send one another follows from how micro-batches are cut, and no stage decides it alone. A
  // stage recomputes what is of its own blocks.
  const bool alone = !program.stage.has_value();
  const bool recompute = options.Text("recompute", "auto") == "auto";
  const std::vector<CapturedDecisions> variants =
      CapturedSpace(origin.captured, program, recompute, alone && options.Text("breadth_first", "auto") == "auto",
                    options.Text("accumulate", "none") == "auto");
  const auto count = static_cast<int64_t>(variants.size());
  if (search.evaluations > 0) {
    search.evaluations = std::max<int64_t>(search.evaluations / count, 1);
  } else if (count > 1) {
    search.share = 1.5 / static_cast<double>(count);
  }
  search.seconds *= static_cast<double>(ThreadsFor(variants.size())) / static_cast<double>(count);
  const auto begin = std::chrono::steady_clock::now();
  VariantSearch searches(origin, program, costs, search);
  INTERLACE_TRY(searches.Run(variants));
  SearchResult& all = searches.all();
  // With offload the best amount lies between the quarters: what is next to the best of them is tried as well.
  if (search.offload && recompute) {
    const std::vector<Candidate> front = FrontOf(all.tried);
    const size_t best = PickFromFront(front, costs.limit, search.slack);
    if (best < front.size())
      INTERLACE_TRY(searches.Run(NeighboursOf(origin.captured, program, front[best].decisions.captured, variants)));
  }
  INTERLACE_ASSIGN(Picked picked, Choose(all.tried, costs, search.slack, [&](const Candidate& c) -> Result<Program> {
                     INTERLACE_ASSIGN(Program made, searches.Base(c.decisions.captured));
                     INTERLACE_TRY(RunUnverified(made, CallsOf(c.decisions)));
                     return made;
                   }));
  all.front = std::move(picked.front);
  all.chosen = picked.chosen;
  all.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  INTERLACE_TRY(CheckFits(all, program, costs, options));
  // The fastest of those that decide otherwise.
  const auto add_without = [&](const char* name, auto&& decides) {
    if (!decides(all.front[all.chosen].decisions.captured)) return;
    const auto other = std::find_if(all.front.rbegin(), all.front.rend(),
                                    [&](const Candidate& c) { return !decides(c.decisions.captured); });
    if (other != all.front.rend()) all.without.push_back({name, {}, other->time_ps, other->bytes, false});
  };
  add_without("nothing recomputed",
              [](const CapturedDecisions& c) { return c.recompute != CapturedDecisions::Recompute::kNothing; });
  add_without("rows gathered once", [](const CapturedDecisions& c) { return c.regather; });
  add_without("a micro-batch in one part", [](const CapturedDecisions& c) { return c.parts > 1; });
  add_without("one micro-batch after the other", [](const CapturedDecisions& c) { return c.width > 1; });
  add_without("gradients reduced after each micro-batch", [](const CapturedDecisions& c) { return c.reduce_last; });
  INTERLACE_ASSIGN(Program base, searches.Base(all.front[all.chosen].decisions.captured));
  INTERLACE_TRY(Finish(std::move(base), costs, all, program));
  return true;
}

Result<bool> Search(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const SearchOptions search, ReadOptions(options));
  INTERLACE_ASSIGN(const PassCosts costs, ReadSearchCosts(program, options));
  INTERLACE_ASSIGN(SearchResult found, SearchSchedules(program, costs, search));
  INTERLACE_TRY(CheckFits(found, program, costs, options));
  INTERLACE_TRY(Finish(program.Clone(), costs, found, program));
  return true;
}

}  // namespace interlace
