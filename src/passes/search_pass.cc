// The pass `search`: with recompute=none and interleave=none on a program that has been sharded, else on what the
// runner kept of the captured one.
#include <algorithm>
#include <chrono>
#include <limits>
#include <set>

#include "base/parallel.h"
#include "passes/evaluate.h"
#include "passes/overlap_update.h"
#include "passes/runner.h"
#include "passes/search.h"
#include "passes/search_space.h"

namespace interlace {
namespace {

// "name|time in us|bytes[|recompute|passes]" of each, separated by newlines: what explain reads.
std::string Table(const std::vector<Candidate>& candidates, bool with_passes) {
  std::string text;
  for (const Candidate& c : candidates) {
    text += (text.empty() ? "" : "\n") + c.name + "|" + std::to_string(c.time_ps / 1'000'000) + "|" +
            std::to_string(c.bytes);
    if (with_passes) text += "|" + c.captured + "|" + c.passes;
  }
  return text;
}

void WriteMeta(Program& program, const SearchResult& found, const PassCosts& costs) {
  program.SetMeta("search.chosen", Table({found.front[found.chosen]}, true));
  program.SetMeta("search.front", Table(found.front, false));
  program.SetMeta("search.heuristics", Table(found.heuristics, false));
  program.SetMeta("search.without", Table(found.without, false));
  program.SetMeta("search.bound_us", std::to_string(found.lower_bound_ps / 1'000'000));
  program.SetMeta("search.evaluations", std::to_string(found.evaluations));
  program.SetMeta("search.limit",
                  costs.limit == std::numeric_limits<int64_t>::max() ? "none" : std::to_string(costs.limit));
}

Status CheckFits(const SearchResult& found, const PassCosts& costs, const PassOptions& options) {
  if (found.chosen < found.front.size()) return Ok{};
  const bool recomputes = options.Text("recompute", "auto") == "auto",
             offloads = options.Text("offload", "none") != "none";
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

Result<SearchOptions> ReadOptions(const PassOptions& options) {
  SearchOptions search;
  INTERLACE_ASSIGN(search.evaluations, options.Int("evaluations", 0, 0));
  INTERLACE_ASSIGN(search.seconds, options.Number("seconds", 0));
  Result<std::string> offload = options.Choice("offload", {"none", "auto", "host"});
  if (!offload.ok()) return offload.error();
  search.host = *offload == "host";
  search.offload = search.host || *offload == "auto";
  Result<std::string> reposition = options.Choice("reposition", {"none", "auto"});
  if (!reposition.ok()) return reposition.error();
  search.reposition = *reposition == "auto";
  for (const char* name : {"cluster", "profile"}) {
    const std::string* text = options.Find(name);
    if (text != nullptr) search.costs_text += (search.costs_text.empty() ? "" : ",") + std::string(name) + "=" + *text;
  }
  return search;
}

using NamedPasses = std::vector<std::pair<std::string, std::string>>;

std::pair<std::string, std::string> RecomputationOf(const std::vector<std::string>& blocks, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? "+" : "") + blocks[i];
  return {"recomputation of " + std::to_string(count) + " of " + std::to_string(blocks.size()) + " blocks",
          "recompute(mode=full,blocks=" + text + ")"};
}

// An eighth more and an eighth less recomputation than `chosen`, where that is a number of blocks.
void AddNeighbours(const Program& captured, const std::string& chosen, NamedPasses& variants) {
  const std::vector<std::string> blocks = BlocksOf(captured);
  const size_t step = std::max<size_t>(blocks.size() / 8, 1);
  for (size_t count = 0; count <= blocks.size(); ++count) {
    const std::string here = count == 0 ? "" : RecomputationOf(blocks, count).second;
    if (here != chosen) continue;
    for (size_t next : {count >= step ? count - step : 0, count + step}) {
      if (next == 0 || next > blocks.size()) continue;
      auto variant = RecomputationOf(blocks, next);
      const auto known = [&](const auto& v) { return v.second == variant.second; };
      if (std::none_of(variants.begin(), variants.end(), known)) variants.push_back(std::move(variant));
    }
    return;
  }
}

// Recomputation passes from none to all, by rising time and falling memory.
NamedPasses Recomputations(const Program& captured) {
  NamedPasses variants = {{"", ""}};
  const std::vector<std::string> blocks = BlocksOf(captured);
  if (blocks.empty() || captured.Meta("recompute") != nullptr) return variants;
  variants.emplace_back("selective recomputation", "recompute(mode=selective)");
  std::set<size_t> counts;
  for (size_t quarter : {1, 2, 3, 4}) counts.insert(std::max<size_t>(blocks.size() * quarter / 4, 1));
  for (size_t count : counts) variants.push_back(RecomputationOf(blocks, count));
  return variants;
}

// All recomputations, and what hides transfers behind several micro-batches: those without recomputation and, because
// it takes the memory of their activations, with what takes least time to give it back and with all of it.
NamedPasses Variants(const Program& captured, const Program& sharded, const PassOptions& options) {
  NamedPasses variants = options.Text("recompute", "auto") == "auto" ? Recomputations(captured) : NamedPasses{{"", ""}};
  const bool sums = sharded.accumulate_mode == "reduce_last" && sharded.width == 1;
  if (options.Text("interleave", "auto") != "auto" || !sums) return variants;
  const size_t recomputations = variants.size();
  for (int64_t width : {2, 4}) {
    if (sharded.accumulation % width != 0) continue;
    const std::string name = std::to_string(width) + " micro-batches side by side",
                      pass = "interleave(micro_batches=" + std::to_string(width) + ")";
    variants.emplace_back(name, pass);
    if (width > 2 || recomputations < 2) continue;
    for (size_t i : {size_t{1}, recomputations - 1}) {
      variants.emplace_back(name + ", " + variants[i].first, variants[i].second + "," + pass);
    }
  }
  return variants;
}

// The schedule that the candidate's passes make of `base`.
Result<Schedule> ScheduleOfCandidate(const Program& base, const Candidate& candidate) {
  if (candidate.passes.starts_with("schedule(")) {
    INTERLACE_ASSIGN(std::vector<PassCall> calls, ParsePipeline(candidate.passes));
    return ReadSchedule(base, calls[0].options);
  }
  Program program = base.Clone();
  INTERLACE_TRY(RunUnverified(program, candidate.passes));
  return ScheduleOf(program, base);
}

// The chosen schedule with its reductions waited for as late as costs neither time nor memory, as far as is predicted.
// The simulator's ranks are equally fast at every moment; real ones are not, and where a reduction is waited for when
// the next one starts, whatever holds up one rank holds up all of them.
Status WaitLater(const Program& base, const PassCosts& costs, Candidate& chosen) {
  if (chosen.passes.find("offload(") != std::string::npos) return Ok{};  // its moves are made for these waits
  INTERLACE_ASSIGN(const Schedule schedule, ScheduleOfCandidate(base, chosen));
  const bool overlaps = chosen.passes.ends_with(",overlap_update");
  for (int32_t late : {Schedule::kAtOnce, 16, 8, 4, 2}) {
    Schedule next = schedule;
    for (Schedule::Bucket& bucket : next.reduce) bucket.ahead = std::max(bucket.ahead, late);
    if (next == schedule) return Ok{};
    Program program = base.Clone();
    INTERLACE_TRY(ApplySchedule(program, next));
    if (overlaps) INTERLACE_TRY(OverlapUpdate(program));
    INTERLACE_ASSIGN(const Verdict verdict, Judge(program, costs));
    int64_t bytes = verdict.bytes;
    if (chosen.placed) {
      INTERLACE_ASSIGN(bytes, PlacedBytesOf(program, costs, bytes));
    }
    if (verdict.time_ps > chosen.time_ps || bytes > chosen.bytes) continue;
    chosen.passes = PrintSchedule(next) + (overlaps ? ",overlap_update" : "");
    chosen.time_ps = verdict.time_ps;
    chosen.bytes = bytes;
    return Ok{};
  }
  return Ok{};
}

}  // namespace

bool RepeatsSearch(const PassOptions& options) {
  return options.Text("recompute", "auto") == "auto" || options.Text("interleave", "auto") == "auto";
}

Result<std::vector<Candidate>> WithoutEach(const Program& base, const PassCosts& costs, const Candidate& chosen) {
  std::vector<Candidate> out;
  if (chosen.passes.find("offload(") != std::string::npos) return out;  // nothing can be taken away where memory ends
  INTERLACE_ASSIGN(const Schedule schedule, ScheduleOfCandidate(base, chosen));
  const auto alone = [](std::vector<Schedule::Bucket>& buckets) {
    std::vector<Schedule::Bucket> units;
    for (const Schedule::Bucket& bucket : buckets) {
      for (UnitId unit : bucket.units) units.push_back({{unit}, bucket.ahead});
    }
    buckets = std::move(units);
  };
  const auto at_once = [](std::vector<Schedule::Bucket>& buckets, int32_t ahead) {
    for (Schedule::Bucket& bucket : buckets) bucket.ahead = ahead;
  };
  const bool overlaps = chosen.passes.ends_with(",overlap_update");
  const auto add = [&](const char* name, auto&& change, bool late_updates = false) -> Status {
    Schedule next = schedule;
    change(next);
    if (next == schedule && !late_updates) return Ok{};
    Program program = base.Clone();
    INTERLACE_TRY(ApplySchedule(program, next));
    if (overlaps && !late_updates) INTERLACE_TRY(OverlapUpdate(program));
    INTERLACE_ASSIGN(Verdict verdict, Judge(program, costs));
    out.push_back({name, chosen.captured, PrintSchedule(next), verdict.time_ps, verdict.bytes});
    return Ok{};
  };
  // What was kept is then gathered for the backward part again, each unit by itself.
  INTERLACE_TRY(add("no unit kept", [](Schedule& s) { s.keep.clear(); }));
  INTERLACE_TRY(add("every unit gathered by itself", [&](Schedule& s) {
    alone(s.forward);
    alone(s.backward);
  }));
  INTERLACE_TRY(add("every unit reduced by itself", [&](Schedule& s) { alone(s.reduce); }));
  INTERLACE_TRY(add("no gather ahead of its use", [&](Schedule& s) {
    at_once(s.forward, 0);
    at_once(s.backward, 0);
  }));
  INTERLACE_TRY(add("every reduction waited for at once", [&](Schedule& s) { at_once(s.reduce, 0); }));
  if (overlaps)
    INTERLACE_TRY(add(
        "updates after the last micro-batch", [](Schedule&) {}, true));
  return out;
}

Result<SearchResult> SearchCaptured(const Program& captured, const std::vector<PassCall>& between,
                                    const PassOptions& options, Program& program) {
  INTERLACE_ASSIGN(SearchOptions search, ReadOptions(options));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  NamedPasses variants = Variants(captured, program, options);
  if (search.evaluations > 0) {
    search.evaluations = std::max<int64_t>(search.evaluations / static_cast<int64_t>(variants.size()), 1);
  } else if (variants.size() > 1) {
    search.share = 1.5 / static_cast<double>(variants.size());
  }
  // Each is searched by itself, several at a time; what is found does not depend on how many.
  search.seconds *= static_cast<double>(ThreadsFor(variants.size())) / static_cast<double>(variants.size());
  const auto begin = std::chrono::steady_clock::now();
  SearchResult all;
  RunOptions run;
  run.verify = false;
  run.uses_up = true;
  const auto search_variant = [&](const std::string& first) -> Result<SearchResult> {
    Program base = captured.Clone();
    if (!first.empty() && !RunUnverified(base, first).ok())
      return SearchResult{};  // nothing can run again; micro-batches depend on one another
    Result<std::vector<PassReport>> reports = RunPasses(base, between, run);
    if (!reports.ok()) return reports.error();
    return JudgeSchedules(base, costs, search);
  };
  const auto search_from = [&](size_t begin_at) -> Status {
    std::vector<Result<SearchResult>> results(variants.size() - begin_at, SearchResult{});
    InParallel(results.size(), [&](size_t i) { results[i] = search_variant(variants[begin_at + i].second); });
    for (size_t i = 0; i < results.size(); ++i) {
      INTERLACE_ASSIGN(SearchResult found, std::move(results[i]));
      const auto& [name, first] = variants[begin_at + i];
      if (first.empty()) {
        all.heuristics = found.heuristics;
        all.lower_bound_ps = found.lower_bound_ps;
      }
      for (Candidate& c : found.judged) {
        c.captured = first;
        if (!name.empty()) c.name = (c.name.empty() ? "search" : c.name) + ", " + name;
        all.judged.push_back(std::move(c));
      }
      if (!found.refused.empty()) all.refused = found.refused;  // those that recompute most come last
      all.evaluations += found.evaluations;
    }
    return Ok{};
  };
  INTERLACE_TRY(search_from(0));
  // With offload the best amount lies between the quarters: what is next to the best of them is tried as well.
  if (search.offload && options.Text("recompute", "auto") == "auto") {
    const size_t coarse = variants.size();
    const std::vector<Candidate> front = FrontOf(all.judged);
    const size_t best = PickFromFront(front, costs.limit, search.slack);
    if (best < front.size()) AddNeighbours(captured, front[best].captured, variants);
    INTERLACE_TRY(search_from(coarse));
  }
  const auto base_of = [&](const Candidate& c) -> Result<Program> {
    Program base = captured.Clone();
    INTERLACE_TRY(RunUnverified(base, c.captured));
    Result<std::vector<PassReport>> reports = RunPasses(base, between, run);
    if (!reports.ok()) return reports.error();
    return base;
  };
  INTERLACE_TRY(Choose(all, costs, search.slack, [&](const Candidate& c) -> Result<Program> {
    INTERLACE_ASSIGN(Program made, base_of(c));
    INTERLACE_TRY(RunUnverified(made, c.passes));
    return made;
  }));
  all.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  INTERLACE_TRY(CheckFits(all, costs, options));
  Candidate& chosen = all.front[all.chosen];
  INTERLACE_ASSIGN(Program out, base_of(chosen));
  INTERLACE_TRY(WaitLater(out, costs, chosen));
  INTERLACE_ASSIGN(all.without, WithoutEach(out, costs, chosen));
  for (auto [pass, without] :
       {std::pair{"recompute", "nothing recomputed"}, std::pair{"interleave", "one micro-batch after the other"}}) {
    if (chosen.captured.find(pass) == std::string::npos) continue;
    for (auto c = all.front.rbegin(); c != all.front.rend(); ++c) {
      if (c->captured.find(pass) != std::string::npos) continue;
      all.without.push_back({without, "", "", c->time_ps, c->bytes});
      break;
    }
  }
  INTERLACE_TRY(RunUnverified(out, chosen.passes));
  WriteMeta(out, all, costs);
  program = std::move(out);
  return all;
}

Result<bool> Search(Program& program, const PassOptions& options) {
  if (program.level == Level::kCaptured) {
    return MakeError("the program has no units; run shard, accumulate and update before search");
  }
  INTERLACE_ASSIGN(SearchOptions search, ReadOptions(options));
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(SearchResult found, SearchSchedules(program, costs, search));
  INTERLACE_TRY(CheckFits(found, costs, options));
  INTERLACE_TRY(WaitLater(program, costs, found.front[found.chosen]));
  INTERLACE_ASSIGN(found.without, WithoutEach(program, costs, found.front[found.chosen]));
  INTERLACE_TRY(RunUnverified(program, found.front[found.chosen].passes));
  WriteMeta(program, found, costs);
  return true;
}

}  // namespace interlace
