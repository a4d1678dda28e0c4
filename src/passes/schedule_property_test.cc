// Random programs through random sequences of the papers' schedule passes: the verifier is content after every pass,
// the text reads back, and the interpreter gives the bits of the textbook step; limits hold. INTERLACE_SOAK=1 runs more
// of them.
#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/keep.h"
#include "passes/pass_test_support.h"
#include "passes/passes.h"
#include "passes/phase_memory.h"
#include "passes/predict.h"
#include "passes/search_space.h"
#include "passes/transfers.h"
#include "sim/memory_curve.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RandomProgram;
using testing::RandomProgramOptions;
using testing::RunResult;

template <typename T>
T OneOf(std::mt19937_64& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

struct ScheduleCase {
  RandomProgramOptions program;
  InterpretOptions run;
};

ScheduleCase RandomScheduleCase(uint64_t seed) {
  std::mt19937_64 random(seed * 31 + 5);
  ScheduleCase out;
  out.program.seed = seed + 5000;
  out.program.layers = 1 + static_cast<int>(random() % 6);
  out.program.max_width = OneOf<int64_t>(random, {3, 13, 40});
  out.program.dtype = OneOf(random, {DType::kF32, DType::kF32, DType::kBF16});
  out.run.steps = 2;
  out.run.ranks = 1 + static_cast<int64_t>(seed % 4);
  out.run.accumulation = OneOf<int64_t>(random, {1, 1, 2, 3, 4});
  out.run.accumulate_mode = OneOf<const char*>(random, {"reduce_each", "reduce_last"});
  return out;
}

// One of the passes with random options; limits around what such programs take.
std::string RandomPass(std::mt19937_64& random) {
  const std::string cluster =
      ",cluster=" + std::string(OneOf<const char*>(random, {"local-4", "h100-80gb-4", "l4-24gb-4"}));
  const std::string limit = random() % 2 ? ",limit=" + std::to_string(500 + random() % 30000) : "";
  switch (random() % 5) {
    case 0:
      return "bucket(mode=greedy,time=" + std::string(OneOf<const char*>(random, {"faithful", "model"})) +
             ",pack=" + OneOf<const char*>(random, {"flat", "copy"}) + cluster + limit + ")";
    case 1:
      return "bucket(modules=" + std::string(OneOf<const char*>(random, {"*", "layers.*"})) +
             ",pack=" + OneOf<const char*>(random, {"flat", "copy"}) + ")";
    case 2:
      return "prefetch(alpha=" + std::string(OneOf<const char*>(random, {"0", "1", "1.5"})) +
             (random() % 2 ? ",prefetch=" + std::to_string(100 + random() % 3000) : "") + cluster + limit + ")";
    case 3:
      return "unshard(units=" + std::string(OneOf<const char*>(random, {"auto", "auto", "all"})) + cluster + limit +
             ")";
    default:
      return "reorder(forward=" + std::string(OneOf<const char*>(random, {"before", "after"})) +
             ",backward=" + OneOf<const char*>(random, {"before", "after"}) + ")";
  }
}

std::string RandomPasses(std::mt19937_64& random, const std::string& sharding, const InterpretOptions& run) {
  std::string text = std::string("canonicalize,") + (random() % 4 == 0 ? "recompute," : "") + sharding +
                     "(ranks=" + std::to_string(run.ranks);
  if (random() % 2) text += ",wait=now";
  if (sharding == "shard") text += ",ahead=" + std::to_string(random() % 3);
  text += "),accumulate(steps=" + std::to_string(run.accumulation) + ",mode=" + run.accumulate_mode + "),update";
  const uint64_t count = 1 + random() % 4;
  for (uint64_t i = 0; i < count; ++i) text += "," + RandomPass(random);
  return random() % 4 == 0 ? text + ",canonicalize" : text;
}

class ScheduleProperty : public ::testing::TestWithParam<int> {};

TEST_P(ScheduleProperty, SameBitsAsTheTextbookStep) {
  constexpr int kEach = 20;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    ScheduleCase test = RandomScheduleCase(seed);
    const Program captured = RandomProgram(test.program);
    Result<RunResult> expected = Interpret(captured, test.run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    std::mt19937_64 random(seed * 77 + 1);
    for (const char* sharding : {"shard", "shard", "zero1"}) {
      const std::string pipeline = RandomPasses(random, sharding, test.run);
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + pipeline);
      Program program = RandomProgram(test.program);
      Result<std::vector<PassCall>> calls = ParsePipeline(pipeline);
      ASSERT_TRUE(calls.ok()) << calls.error().ToString();
      Result<std::vector<PassReport>> reports = RunPasses(program, *calls);
      // No such module; copies after unshard.
      const bool refused =
          !reports.ok() && (reports.error().message.find("owns no parameter") != std::string::npos ||
                            reports.error().message.find("run bucket(pack=copy) before") != std::string::npos);
      if (refused) continue;
      ASSERT_TRUE(reports.ok()) << reports.error().ToString();
      const std::string text = Print(program);
      Result<Program> parsed = Parse(text);
      ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
      EXPECT_EQ(Print(*parsed), text);
      Result<RunResult> actual = Interpret(program, test.run);
      ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
      ASSERT_EQ(FirstDifference(*expected, *actual), "") << text;
    }
  }
}

// P(o) at its largest over the micro-batch phases, on a cluster that both passes are given.
int64_t LivePeakOf(Program& program) {
  Result<ClusterSpec> cluster = LoadCluster("l4-24gb-4", "cluster");
  Result<CostModel> model = CostModel::Create(program, *cluster, nullptr);
  int64_t peak = 0;
  for (Phase* phase : MicroBatches(program)) {
    Result<PhaseMemory> memory = MemoryOf(program, *phase, *model);
    EXPECT_TRUE(memory.ok());
    if (memory.ok()) peak = std::max(peak, memory->Peak());
  }
  return peak;
}

Program After(const ScheduleCase& test, const std::string& pipeline) {
  Program program = RandomProgram(test.program);
  Result<std::vector<PassReport>> reports = RunPasses(program, *ParsePipeline(pipeline));
  EXPECT_TRUE(reports.ok()) << pipeline;
  return program;
}

TEST_P(ScheduleProperty, LimitsAreObeyedAndUsed) {
  constexpr int kEach = 10;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    ScheduleCase test = RandomScheduleCase(seed);
    std::mt19937_64 random(seed * 13 + 3);
    const std::string start = "canonicalize,shard(ranks=" + std::to_string(test.run.ranks) +
                              ",ahead=0),accumulate(steps=" + std::to_string(test.run.accumulation) +
                              ",mode=" + test.run.accumulate_mode + "),update,";
    // Gathers at their first uses need the least.
    Program least = After(test, start + "prefetch(limit=1,cluster=l4-24gb-4)");
    const int64_t limit = LivePeakOf(least) + 1 + static_cast<int64_t>(random() % 3000);
    const std::string options = "(cluster=l4-24gb-4,limit=" + std::to_string(limit) + ")";
    SCOPED_TRACE("seed " + std::to_string(seed) + " " + start + " limit " + std::to_string(limit));
    Program prefetched = After(test, start + "prefetch" + options);
    EXPECT_LT(LivePeakOf(prefetched), limit);
    Program kept = After(test, start + "unshard" + options);
    EXPECT_LT(LivePeakOf(kept), limit);
    for (UnitId unit : KeepableUnits(kept)) {
      Program more = kept.Clone();
      ASSERT_TRUE(KeepGathered(more, {unit}).ok());
      EXPECT_GE(LivePeakOf(more), limit) << "u" << unit << " was skipped although it fits";
    }
    if (HasFailure()) return;
  }
}

SearchSpace::Settings RandomSettings(std::mt19937_64& random) {
  SearchSpace::Settings out;
  out.forward_bucket = static_cast<int32_t>(random() % 8);
  out.backward_bucket = static_cast<int32_t>(random() % 8);
  out.reduce_bucket = static_cast<int32_t>(random() % 8);
  out.forward_ahead = static_cast<int32_t>(random() % 9);
  out.backward_ahead = static_cast<int32_t>(random() % 9);
  out.late = static_cast<int32_t>(random() % 6);
  out.keep = static_cast<int32_t>(random() % 9);
  out.keep_order = static_cast<int32_t>(random() % 2);
  return out;
}

// One program that is changed and taken back, as the search does it, against a copy for each schedule; what is known of
// the base's ops against costs that are looked up; the peak alone against the whole curve.
TEST_P(ScheduleProperty, VariantsTakenBackAreLikeCopies) {
  constexpr int kEach = 5;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    const ScheduleCase test = RandomScheduleCase(seed);
    std::mt19937_64 random(seed * 17 + 3);
    const Program base = After(test, "canonicalize,shard(ranks=" + std::to_string(test.run.ranks) +
                                         "),accumulate(steps=" + std::to_string(test.run.accumulation) +
                                         ",mode=" + test.run.accumulate_mode + "),update");
    SCOPED_TRACE("seed " + std::to_string(seed));
    Result<PassCosts> costs = ReadCosts(base, (*ParsePipeline("prefetch(cluster=l4-24gb-4)"))[0].options);
    ASSERT_TRUE(costs.ok());
    Result<KnownOps> known = KnownOpsOf(base, *costs);
    Result<SearchSpace> space = SearchSpace::Of(base);
    ASSERT_TRUE(known.ok() && space.ok());
    const std::string text = Print(base);
    Program variant = base.Clone();
    variant.Track();
    for (int k = 0; k < 8; ++k) {
      const Schedule schedule = space->Make(RandomSettings(random));
      Program copy = base.Clone();
      for (Program* program : {&copy, &variant}) {
        ASSERT_TRUE(ApplySchedule(*program, schedule).ok());
        ASSERT_TRUE(OverlapUpdate(*program).ok());
      }
      ASSERT_EQ(Print(variant), Print(copy)) << PrintSchedule(schedule);
      Result<CostModel> model = costs->Model(copy);
      Result<Lowered> lowered = Lower(copy, *model);
      ASSERT_TRUE(lowered.ok());
      EXPECT_EQ(*PeakBytes(*lowered), ComputeMemory(*lowered)->peak.bytes);
      Result<Prediction> looked_up = Predict(copy, *costs), short_cut = Predict(variant, *costs, false, *known);
      ASSERT_TRUE(looked_up.ok() && short_cut.ok());
      EXPECT_EQ(short_cut->time_ps, looked_up->time_ps) << PrintSchedule(schedule);
      EXPECT_EQ(short_cut->bytes, looked_up->bytes) << PrintSchedule(schedule);
      variant.TakeBack(base);
      ASSERT_EQ(Print(variant), text) << PrintSchedule(schedule);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ScheduleProperty, ::testing::Range(0, Rounds(4)));

}  // namespace
}  // namespace interlace
