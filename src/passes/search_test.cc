// The search on random programs whose links are slow: never worse than what it starts from, the limit is obeyed, a
// higher limit never gives a slower step, the same result every time, and the same bits as the plain program.
#include "passes/search.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "ir/text.h"
#include "passes/keep.h"
#include "passes/predict.h"
#include "passes/runner.h"
#include "passes/schedule.h"

namespace interlace {
namespace {

Program Base(uint64_t seed, int64_t steps, const std::string& more = "", const std::string& mode = "reduce_each") {
  testing::RandomProgramOptions options;
  options.seed = seed;
  options.layers = 4;
  options.max_width = 40;
  Program program = testing::RandomProgram(options);
  Result<std::vector<PassCall>> calls =
      ParsePipeline("canonicalize,shard(ranks=2,ahead=0),accumulate(steps=" + std::to_string(steps) + ",mode=" + mode +
                    "),update" + more);
  EXPECT_TRUE(calls.ok()) << ErrorOf(calls);
  Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
  EXPECT_TRUE(reports.ok()) << ErrorOf(reports);
  return program;
}

PassCosts Costs(const Program& program, int64_t limit = std::numeric_limits<int64_t>::max()) {
  Result<PassCosts> costs = ReadCosts(program, {});
  EXPECT_TRUE(costs.ok()) << ErrorOf(costs);
  costs->limit = limit;
  return std::move(*costs);
}

SearchOptions Few(int64_t evaluations = 80) {
  SearchOptions options;
  options.evaluations = evaluations;
  return options;
}

std::string PassesOf(const Candidate& candidate) {
  return PrintPipeline(CallsOf(candidate.decisions));
}

// The least limit that is met, of what is tried whatever the limit.
int64_t LeastLimit(const Program& base, const SearchOptions& options) {
  Result<SearchResult> found = SearchSchedules(base, Costs(base, 0), options);
  EXPECT_TRUE(found.ok()) << ErrorOf(found);
  EXPECT_EQ(found->chosen, found->front.size());
  return found->front.front().bytes;
}

// With reduce_last only the last micro-batch reduces; how late it waits is decided all the same. The pass then waits as
// late as the prediction of what was chosen stays as good: real ranks are not equally fast at every moment.
TEST(Search, ReductionsOfTheLastMicroBatchAlone) {
  int gains = 0, later = 0;
  for (uint64_t seed = 1, last = Rounds(2); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program base = Base(seed, 3, "", "reduce_last");
    PassCosts costs = Costs(base);
    Result<SearchResult> found = SearchSchedules(base, costs, Few());
    ASSERT_TRUE(found.ok()) << ErrorOf(found);
    int64_t at_once = 0, late = 0;
    for (auto [wait, time] : {std::pair{0, &at_once}, std::pair{4, &late}}) {
      Program program = base.Clone();
      Schedule schedule;
      schedule.keep = KeepableUnits(base);
      for (UnitId unit = 0; unit < static_cast<UnitId>(base.units.size()); ++unit) {
        schedule.forward.push_back({{unit}, 3});
        schedule.reduce.push_back({{unit}, wait});
      }
      ASSERT_TRUE(ApplySchedule(program, schedule).ok());
      *time = Predict(program, costs)->time_ps;
    }
    EXPECT_LE(found->front.back().time_ps, late);
    gains += late < at_once;

    const Candidate& chosen = found->front[found->chosen];
    Program program = base.Clone();
    const auto calls = ParsePipeline("search(evaluations=80,recompute=none,breadth_first=none)");
    ASSERT_TRUE(RunPasses(program, *calls).ok());
    const Prediction prediction = *Predict(program, costs);
    EXPECT_LE(prediction.time_ps, chosen.time_ps);
    EXPECT_LE(prediction.bytes, chosen.bytes);
    later += program.Meta("search.chosen")->find(PassesOf(chosen)) == std::string::npos;
  }
  EXPECT_GE(gains, 1) << "waiting later helps somewhere";
  EXPECT_GE(later, 1) << "and costs nothing somewhere";
}

TEST(Search, NeverWorseThanWhatItStartsFrom) {
  for (uint64_t seed = 1, last = Rounds(2); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program base = Base(seed, 1 + static_cast<int64_t>(seed % 3));
    PassCosts costs = Costs(base);
    Result<SearchResult> found = SearchSchedules(base, costs, Few());
    ASSERT_TRUE(found.ok()) << ErrorOf(found);
    ASSERT_LT(found->chosen, found->front.size());
    EXPECT_EQ(found->heuristics.front().origin, "plain");
    EXPECT_GE(found->heuristics.size(), 5U) << "the papers' passes";
    int64_t best = std::numeric_limits<int64_t>::max();
    for (const Candidate& c : found->heuristics) best = std::min(best, c.time_ps);
    EXPECT_LE(found->front.back().time_ps, best);
    EXPECT_LE(static_cast<double>(found->front[found->chosen].time_ps), 1.01 * static_cast<double>(best));
    EXPECT_GE(found->front.back().time_ps, found->lower_bound_ps);
    for (size_t i = 1; i < found->front.size(); ++i) {
      EXPECT_GT(found->front[i].bytes, found->front[i - 1].bytes);
      EXPECT_LT(found->front[i].time_ps, found->front[i - 1].time_ps);
    }
  }
}

TEST(Search, WhatItSaysIsWhatThePassesMake) {
  Program base = Base(3, 2);
  PassCosts costs = Costs(base);
  Result<SearchResult> found = SearchSchedules(base, costs, Few());
  ASSERT_TRUE(found.ok()) << ErrorOf(found);
  for (const Candidate& c : found->front) {
    Program program = base.Clone();
    Result<std::vector<PassCall>> calls = ParsePipeline(PassesOf(c));
    ASSERT_TRUE(calls.ok()) << ErrorOf(calls);
    Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
    ASSERT_TRUE(reports.ok()) << ErrorOf(reports);
    Result<Prediction> prediction = Predict(program, costs);
    ASSERT_TRUE(prediction.ok()) << ErrorOf(prediction);
    EXPECT_EQ(prediction->time_ps, c.time_ps) << PassesOf(c);
    EXPECT_EQ(prediction->bytes, c.bytes) << PassesOf(c);
  }
}

TEST(Search, WithOffloadItMeetsLimitsThatNothingElseMeets) {
  int met = 0;
  for (uint64_t seed = 1, last = Rounds(4); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program base = Base(seed, 1);
    SearchOptions options = Few();
    options.evaluations = 60;
    Result<SearchResult> free = SearchSchedules(base, Costs(base), options);
    ASSERT_TRUE(free.ok()) << ErrorOf(free);
    const PassCosts costs = Costs(base, free->front.front().bytes * 95 / 100);
    Result<SearchResult> without = SearchSchedules(base, costs, options);
    ASSERT_TRUE(without.ok());
    EXPECT_EQ(without->chosen, without->front.size()) << "nothing fits";
    options.offload = true;
    Result<SearchResult> with = SearchSchedules(base, costs, options);
    ASSERT_TRUE(with.ok()) << ErrorOf(with);
    if (with->chosen == with->front.size()) continue;  // activations alone are above it
    ++met;
    const Candidate& chosen = with->front[with->chosen];
    EXPECT_TRUE(chosen.decisions.offload) << PassesOf(chosen);
    Program program = base.Clone();
    Result<std::vector<PassReport>> reports = RunPasses(program, CallsOf(chosen.decisions));
    ASSERT_TRUE(reports.ok()) << ErrorOf(reports);
    Result<Prediction> prediction = Predict(program, costs);
    ASSERT_TRUE(prediction.ok());
    EXPECT_LE(prediction->bytes, costs.limit);
    Result<testing::RunResult> before = testing::Interpret(base), after = testing::Interpret(program);
    ASSERT_TRUE(after.ok()) << ErrorOf(after);
    EXPECT_EQ(testing::FirstDifference(*before, *after), "");
  }
  EXPECT_GT(met, 0);
}

TEST(Search, AHigherLimitIsNeverSlower) {
  for (uint64_t seed : {2, 5}) {
    Program base = Base(seed, 2);
    Result<SearchResult> free = SearchSchedules(base, Costs(base), Few());
    ASSERT_TRUE(free.ok()) << ErrorOf(free);
    const int64_t least = LeastLimit(base, Few()), most = free->front.back().bytes;
    int64_t last = std::numeric_limits<int64_t>::max();
    for (int step = 0; step <= 3; ++step) {
      const int64_t limit = least + (most - least) * step / 3;
      Result<SearchResult> found = SearchSchedules(base, Costs(base, limit), Few());
      ASSERT_TRUE(found.ok()) << ErrorOf(found);
      ASSERT_LT(found->chosen, found->front.size());
      EXPECT_LE(found->front[found->chosen].bytes, limit);
      EXPECT_LE(found->front[found->chosen].time_ps, last) << "seed " << seed << ", step " << step;
      last = found->front[found->chosen].time_ps;
    }
  }
}

// What the runtime takes is not the sum of what lives: pieces of the arena are aligned, packing leaves gaps, and of
// what moves whole pages count. Limits in small steps from one that nothing meets to one that everything does: every
// program that is accepted keeps the limit with all in its place, and above an accepted limit all are accepted.
// `refuted`: where judging what lives alone would have gone over.
TEST(Search, EveryLimitAboveOneThatIsMetIsMet) {
  int refuted = 0, moved = 0;
  for (uint64_t seed = 2, last = 1 + Rounds(1); seed <= last; ++seed) {
    for (const bool offload : {false, true}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (offload ? ", offload" : ""));
      testing::RandomProgramOptions sizes;
      sizes.seed = seed;
      sizes.layers = 6;
      sizes.max_width = offload ? 120 : 40;
      Program base = testing::RandomProgram(sizes);
      ASSERT_TRUE(RunPasses(base, *ParsePipeline("canonicalize,shard(ranks=2,ahead=0),update(clip=none)")).ok());
      SearchOptions options = Few();
      options.evaluations = 40;
      const int64_t least = LeastLimit(base, options);
      options.offload = offload;
      bool accepted = false;
      constexpr int kSteps = 12;
      for (int step = 0; step <= kSteps; ++step) {
        const PassCosts costs = Costs(base, least * 7 / 10 + least * step / (2 * kSteps));
        Result<SearchResult> found = SearchSchedules(base, costs, options);
        ASSERT_TRUE(found.ok()) << ErrorOf(found);
        const bool fits = found->chosen < found->front.size();
        EXPECT_TRUE(fits || !accepted) << "limit " << costs.limit << " is refused, and a lower one was not";
        accepted = accepted || fits;
        for (const Candidate& c : found->tried) {
          if (!c.placed || c.bytes <= costs.limit) continue;
          Program program = base.Clone();
          ASSERT_TRUE(RunUnverified(program, CallsOf(c.decisions)).ok());
          refuted += Predict(program, costs)->bytes <= costs.limit;
        }
        if (!fits) continue;
        const Candidate& chosen = found->front[found->chosen];
        moved += chosen.decisions.offload.has_value();
        Program program = base.Clone();
        ASSERT_TRUE(RunUnverified(program, CallsOf(chosen.decisions)).ok());
        Result<int64_t> placed = PlacedBytesOf(program, costs, 0);
        ASSERT_TRUE(placed.ok()) << ErrorOf(placed);
        EXPECT_LE(*placed, costs.limit) << PassesOf(chosen);
        EXPECT_EQ(*placed, chosen.bytes) << PassesOf(chosen);
      }
      EXPECT_TRUE(accepted);
    }
  }
  EXPECT_GT(refuted, 0);
  EXPECT_GT(moved, 0);
}

TEST(Search, TheSameEveryTime) {
  std::string first = Print(Base(4, 2, ",search(evaluations=80)"));
  EXPECT_EQ(Print(Base(4, 2, ",search(evaluations=80)")), first);
  EXPECT_NE(first.find("meta search.chosen"), std::string::npos);
}

TEST(Search, OutOfTimeKeepsWhatItHas) {
  Program base = Base(3, 2);
  PassCosts costs = Costs(base);
  SearchOptions hurried;
  hurried.seconds = 1e-9;
  Result<SearchResult> found = SearchSchedules(base, costs, hurried), whole = SearchSchedules(base, costs, Few());
  ASSERT_TRUE(found.ok() && whole.ok());
  ASSERT_LT(found->chosen, found->front.size());
  EXPECT_LT(found->evaluations, whole->evaluations / 2);
  EXPECT_EQ(found->lower_bound_ps, whole->lower_bound_ps);
  for (const Candidate& c : found->heuristics) EXPECT_LE(found->front.back().time_ps, c.time_ps) << c.origin;
}

// Buckets of neighbours in random places, each up to `most` steps ahead.
std::vector<Schedule::Bucket> RandomBuckets(size_t units, uint64_t most, std::mt19937_64& random) {
  std::vector<Schedule::Bucket> buckets;
  for (UnitId unit = 0; unit < static_cast<UnitId>(units); ++unit) {
    if (buckets.empty() || random() % 3 > 0) buckets.push_back({{}, static_cast<int32_t>(random() % (most + 1))});
    buckets.back().units.push_back(unit);
  }
  return buckets;
}

// The least memory that any of some random schedules needs; from waiting at once and nothing kept to far ahead.
int64_t LeastOfRandomSchedules(const Program& base, uint64_t seed) {
  std::mt19937_64 random(seed);
  const PassCosts costs = Costs(base);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (uint64_t round = 0; round < 60; ++round) {
    Schedule schedule;
    for (UnitId unit : KeepableUnits(base)) {
      if (random() % 8 < round % 4) schedule.keep.push_back(unit);
    }
    for (auto* buckets : {&schedule.forward, &schedule.backward, &schedule.reduce}) {
      *buckets = RandomBuckets(base.units.size(), round % 4, random);
    }
    Program program = base.Clone();
    const Status applied = ApplySchedule(program, schedule);
    EXPECT_TRUE(applied.ok()) << ErrorOf(applied) << ", " << PrintSchedule(schedule);
    Result<Prediction> prediction = Predict(program, costs);
    EXPECT_TRUE(prediction.ok()) << ErrorOf(prediction);
    least = std::min(least, prediction->bytes);
  }
  return least;
}

// No schedule is smaller than the smallest that the search finds, and a limit of that size is met.
TEST(Search, MeetsALimitThatSomeScheduleMeets) {
  int below_heuristics = 0;
  for (uint64_t seed = 1, last = Rounds(6); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program base = Base(seed, 1 + static_cast<int64_t>(seed % 2));
    Result<SearchResult> free = SearchSchedules(base, Costs(base), Few(200));
    ASSERT_TRUE(free.ok()) << ErrorOf(free);
    const int64_t least = free->front.front().bytes;
    EXPECT_LE(least, LeastOfRandomSchedules(base, seed));
    for (const Candidate& c : free->heuristics) EXPECT_LE(least, c.bytes) << c.origin;
    below_heuristics += least < free->heuristics.front().bytes;
    if (seed > 3) continue;
    const int64_t met = LeastLimit(base, Few());
    EXPECT_GE(met, least);
    for (int64_t limit : {met, std::max(met, (met + free->heuristics.front().bytes) / 2)}) {
      Result<SearchResult> found = SearchSchedules(base, Costs(base, limit), Few());
      ASSERT_TRUE(found.ok()) << ErrorOf(found);
      ASSERT_LT(found->chosen, found->front.size()) << "limit " << limit;
      EXPECT_LE(found->front[found->chosen].bytes, limit);
    }
  }
  EXPECT_GE(below_heuristics, 3) << "what the plain program needs is not the least";
}

// Every schedule of two units, whatever is kept, merged and ahead.
TEST(Search, IsAsSmallAsTheSmallestOfAllSchedules) {
  std::vector<std::vector<Schedule::Bucket>> transfers;
  for (int32_t first = 0; first < 3; ++first) {
    transfers.push_back({{{0, 1}, first}});
    for (int32_t second = 0; second < 3; ++second) transfers.push_back({{{0}, first}, {{1}, second}});
  }
  int found = 0;
  for (uint64_t seed = 1; found < 2; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program base = Base(seed, 1);
    if (base.units.size() != 2) continue;
    ++found;
    const PassCosts costs = Costs(base);
    int64_t least = std::numeric_limits<int64_t>::max();
    const std::vector<UnitId> keepable = KeepableUnits(base);
    for (size_t kept = 0; kept < size_t{1} << keepable.size(); ++kept) {
      Schedule schedule;
      for (size_t i = 0; i < keepable.size(); ++i) {
        if (kept >> i & 1) schedule.keep.push_back(keepable[i]);
      }
      for (const auto& forward : transfers) {
        for (const auto& reduce : transfers) {
          schedule.forward = forward;
          schedule.backward = forward;
          schedule.reduce = reduce;
          Program program = base.Clone();
          ASSERT_TRUE(ApplySchedule(program, schedule).ok());
          least = std::min(least, Predict(program, costs)->bytes);
        }
      }
    }
    Result<SearchResult> found = SearchSchedules(base, costs, Few());
    ASSERT_TRUE(found.ok()) << ErrorOf(found);
    EXPECT_EQ(found->front.front().bytes, least);
  }
}

// Only reductions move there; sums that every rank takes are gathered behind them.
TEST(Search, OfReplicatedParameters) {
  for (uint64_t seed = 1, last = Rounds(5); seed <= last; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const char* strategy : {"replicate", "zero1"}) {
      testing::RandomProgramOptions options;
      options.seed = seed;
      options.layers = 6;
      testing::InterpretOptions run;
      run.ranks = 2;
      run.accumulation = 1 + static_cast<int64_t>(seed % 3);
      run.accumulate_mode = seed % 2 ? "reduce_each" : "reduce_last";
      Program program = testing::RandomProgram(options);
      Result<testing::RunResult> expected = testing::Interpret(program, run);
      ASSERT_TRUE(expected.ok()) << ErrorOf(expected);
      Result<std::vector<PassCall>> calls = ParsePipeline(
          std::string("canonicalize,") + strategy + "(ranks=2),accumulate(steps=" + std::to_string(run.accumulation) +
          ",mode=" + run.accumulate_mode + "),update");
      ASSERT_TRUE(calls.ok()) << ErrorOf(calls);
      ASSERT_TRUE(RunPasses(program, *calls).ok());
      Result<SearchResult> found = SearchSchedules(program, Costs(program), Few(120));
      ASSERT_TRUE(found.ok()) << ErrorOf(found);
      EXPECT_LE(found->front.front().bytes, LeastOfRandomSchedules(program, seed)) << strategy;
      for (const Candidate* c : {&found->front.front(), &found->front.back()}) {
        Program after = program.Clone();
        ASSERT_TRUE(RunPasses(after, CallsOf(c->decisions)).ok()) << PassesOf(*c);
        Result<testing::RunResult> actual = testing::Interpret(after, run);
        ASSERT_TRUE(actual.ok()) << ErrorOf(actual);
        EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << strategy << ", " << PassesOf(*c);
      }
    }
  }
}

TEST(Search, ALimitThatNothingFitsNamesTheLeastAndWhatWouldLowerIt) {
  const Program captured = testing::RandomProgram({});
  const auto search = [&](int64_t limit, const std::string& options) {
    Program program = captured.Clone();
    Result<std::vector<PassCall>> calls =
        ParsePipeline("shard(ranks=2),update,search(evaluations=10,limit=" + std::to_string(limit) + options + ")");
    EXPECT_TRUE(calls.ok()) << ErrorOf(calls);
    return ErrorOf(RunPasses(program, *calls));
  };
  const std::string error = search(64, ",recompute=none"),
                    begin = "nothing fits into the limit of 64 bytes: the smallest schedule that was found needs ";
  ASSERT_NE(error.find(begin), std::string::npos) << error;
  EXPECT_NE(error.find("; raise it to 1MiB, use more ranks, let it recompute activations (recompute=auto) or send "
                       "storages out of memory "
                       "(offload=auto; in training: a tier), or take a smaller micro-batch with more accumulation"),
            std::string::npos)
      << error;
  const int64_t least = std::stoll(error.substr(error.find(begin) + begin.size()));
  EXPECT_EQ(search(least, ",recompute=none"), "no error") << "what is named does fit";
  EXPECT_NE(search(least - 1, ",recompute=none").find(" needs " + std::to_string(least)), std::string::npos);
  EXPECT_EQ(search(64, "").find("recompute=auto"), std::string::npos) << "it does that already";
  const std::string out = search(64, ",offload=auto,recompute=none");
  EXPECT_EQ(out.find("offload=auto"), std::string::npos);
  EXPECT_NE(out.find("pass 'offload': the limit of 64 bytes cannot be met with everything out that may leave"),
            std::string::npos)
      << out;
}

TEST(Search, KeepsTheBits) {
  for (uint64_t seed = 10, end = 10 + Rounds(4); seed < end; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 1 + static_cast<int>(seed % 5);
    testing::InterpretOptions run;
    run.ranks = 2 + static_cast<int64_t>(seed % 2);
    run.steps = 2;
    run.accumulation = 1 + static_cast<int64_t>(seed % 4);
    run.accumulate_mode = seed % 2 ? "reduce_each" : "reduce_last";
    Program program = testing::RandomProgram(options);
    Result<testing::RunResult> expected = testing::Interpret(program, run);
    ASSERT_TRUE(expected.ok()) << ErrorOf(expected);
    const std::string pipeline = "canonicalize,shard(ranks=" + std::to_string(run.ranks) +
                                 "),accumulate(steps=" + std::to_string(run.accumulation) +
                                 ",mode=" + run.accumulate_mode + "),update,search(evaluations=60)";
    Result<std::vector<PassCall>> calls = ParsePipeline(pipeline);
    ASSERT_TRUE(calls.ok()) << ErrorOf(calls);
    Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
    ASSERT_TRUE(reports.ok()) << ErrorOf(reports);
    Result<testing::RunResult> actual = testing::Interpret(program, run);
    ASSERT_TRUE(actual.ok()) << ErrorOf(actual) << Print(program);
    EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << Print(program);
  }
}

// The chosen mode is that of the program, whose bits are that mode's; and what it decides is no slower than either
// mode.
TEST(Search, DecidesWhenGradientsAreReduced) {
  int last = 0;
  for (uint64_t seed = 1, end = 1 + Rounds(6); seed < end; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomProgramOptions options;
    options.seed = seed;
    options.layers = 2 + static_cast<int>(seed % 3);
    testing::InterpretOptions run;
    run.ranks = 2;
    run.accumulation = 3;
    const auto searched = [&](const std::string& mode, const std::string& more) {  // as many simulations for each mode
      Program program = testing::RandomProgram(options);
      Result<std::vector<PassCall>> calls =
          ParsePipeline("canonicalize,shard(ranks=2),accumulate(steps=3,mode=" + mode +
                        "),update,search(recompute=none,breadth_first=none," + more + ")");
      EXPECT_TRUE(calls.ok()) << ErrorOf(calls);
      Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
      EXPECT_TRUE(reports.ok()) << ErrorOf(reports);
      return program;
    };
    const auto time_of = [](const Program& program) { return Predict(program, Costs(program))->time_ps; };
    const Program program = searched("reduce_each", "evaluations=120,accumulate=auto");
    run.accumulate_mode = program.accumulate_mode;
    last += run.accumulate_mode == "reduce_last";
    const Program captured = testing::RandomProgram(options);
    Result<testing::RunResult> expected = testing::Interpret(captured, run), actual = testing::Interpret(program, run);
    ASSERT_TRUE(expected.ok() && actual.ok()) << ErrorOf(expected) << ErrorOf(actual);
    EXPECT_EQ(testing::FirstDifference(*expected, *actual), "") << Print(program);
    for (const char* mode : {"reduce_each", "reduce_last"}) {
      EXPECT_LE(static_cast<double>(time_of(program)),
                1.02 * static_cast<double>(time_of(searched(mode, "evaluations=60"))))
          << mode;
    }
  }
  EXPECT_GT(last, 0);
}

TEST(OverlapUpdate, EveryUpdateFollowsItsGradient) {
  Program program = Base(3, 2, ",overlap_update");
  ASSERT_TRUE(program.FindPhase("update")->ops.empty());
  std::vector<size_t> updates;
  size_t last_wait = 0, last_start = 0;
  const Phase& last = *program.FindPhase("micro_batch.last");
  for (size_t i = 0; i < last.ops.size(); ++i) {
    const std::string& name = program.op(last.ops[i]).name;
    if (name.starts_with("update.")) updates.push_back(i);
    if (name == "reduce.wait") last_wait = i;
    if (name == "reduce.start") last_start = i;
  }
  ASSERT_GT(updates.size(), 1U);
  EXPECT_LT(updates.front(), last_start) << "beside reductions";
  EXPECT_GT(updates.back(), last_wait) << "the last gradient's";
  // Clipping needs all gradients before the first update.
  Program clipped = Base(3, 2, "(clip=1.0),overlap_update");
  EXPECT_FALSE(clipped.FindPhase("update")->ops.empty());
}

TEST(PickFromFront, TheSmallestWithinOnePercentOfTheFastestThatFits) {
  const std::vector<Candidate> front = {
      {"a", {}, 1000, 10, false}, {"b", {}, 905, 20, false}, {"c", {}, 900, 30, false}, {"d", {}, 800, 40, false}};
  EXPECT_EQ(PickFromFront(front, 9, 0.01), 4U) << "nothing fits";
  EXPECT_EQ(PickFromFront(front, 10, 0.01), 0U);
  EXPECT_EQ(PickFromFront(front, 30, 0.01), 1U) << "905 <= 909";
  EXPECT_EQ(PickFromFront(front, 30, 0), 2U);
  EXPECT_EQ(PickFromFront(front, 1000, 0.01), 3U);
}

TEST(Schedule, TextsReadBack) {
  Program base = Base(7, 2);
  Schedule schedule;
  schedule.keep = {0, 2};
  schedule.forward = {{{0, 1}, 2}, {{2}, Schedule::kAtOnce}};
  schedule.reduce = {{{1}, 3}};
  const std::string text = PrintSchedule(schedule);
  EXPECT_EQ(text, "schedule(keep=u0+u2,forward=u0+u1:2;u2:head,reduce=u1:3)");
  Result<std::vector<PassCall>> calls = ParsePipeline(text);
  ASSERT_TRUE(calls.ok()) << ErrorOf(calls);
  Result<Schedule> read = ReadSchedule(base, (*calls)[0].options);
  ASSERT_TRUE(read.ok()) << ErrorOf(read);
  EXPECT_EQ(*read, schedule);
  for (auto [bad, expected] : std::vector<std::pair<std::string, std::string>>{
           {"u0+u0", "u0 is listed twice"}, {"u99999", "there is no u99999"}, {"x", "expected units such as u0+u3"}}) {
    EXPECT_NE(ErrorOf(ReadSchedule(base, {{"keep", bad}})).find(expected), std::string::npos) << bad;
  }
}

// What a schedule does can be read off the program it made, and doing that again gives the same program.
TEST(Schedule, CanBeReadOffAProgram) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Program base = Base(seed, 1);
    Program program = base.Clone();
    Schedule schedule;
    for (UnitId unit : KeepableUnits(base)) {
      if (unit % 3 == 0) schedule.keep.push_back(unit);
    }
    for (UnitId unit = 0; unit < static_cast<UnitId>(base.units.size()); ++unit) {
      schedule.forward.push_back({{unit}, unit % 4});
      schedule.backward.push_back({{unit}, unit % 3});
    }
    ASSERT_TRUE(ApplySchedule(program, schedule).ok());
    Result<Schedule> read = ScheduleOf(program, base);
    ASSERT_TRUE(read.ok()) << ErrorOf(read);
    EXPECT_EQ(read->keep, schedule.keep);
    Program again = base.Clone();
    ASSERT_TRUE(ApplySchedule(again, *read).ok());
    PassCosts costs = Costs(base);
    EXPECT_EQ(Predict(again, costs)->time_ps, Predict(program, costs)->time_ps) << "seed " << seed;
  }
}

}  // namespace
}  // namespace interlace
