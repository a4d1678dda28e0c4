// Recomputation changes no bit: random programs against the reference interpreter, in every mode.
#include <random>

#include "base/testing/rounds.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/random_program.h"
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::InterpretOptions;
using testing::RandomProgram;
using testing::RandomProgramOptions;
using testing::RunResult;

class RecomputeProperty : public ::testing::TestWithParam<int> {};

TEST_P(RecomputeProperty, SameBitsInEveryMode) {
  constexpr int kEach = 12;
  int repeated = 0;
  for (int i = 0; i < kEach; ++i) {
    auto seed = static_cast<uint64_t>(GetParam() * kEach + i);
    std::mt19937_64 random(seed + 1);
    RandomProgramOptions options{.seed = seed, .layers = 2 + static_cast<int>(random() % 8), .max_width = 13};
    InterpretOptions run;
    run.ranks = 1 + static_cast<int64_t>(random() % 3);
    run.accumulation = 1 + static_cast<int64_t>(random() % 3);
    Result<RunResult> expected = Interpret(RandomProgram(options), run);
    ASSERT_TRUE(expected.ok()) << expected.error().ToString();
    // Blocks of one layer keep almost everything; larger ones are made by cutting the list.
    for (const char* mode :
         {"full", "selective", "selective,save=aten.mul.Tensor", "selective,whole=cut.0", "budget,bytes="}) {
      std::string text = Print(RandomProgram(options));
      int64_t width = 1 + static_cast<int64_t>(random() % 4);
      for (int layer = 0; layer < options.layers; ++layer) {
        std::string path = "\"layers." + std::to_string(layer) + "\"";
        text.replace(text.find(path), path.size(),
                     "\"cut." + std::to_string(layer / width) + "." + std::to_string(layer) + "\"");
      }
      std::string call = std::string(random() % 2 ? "canonicalize," : "") + "recompute(mode=" + mode;
      if (call.ends_with("bytes=")) {
        // The least possible is in the message.
        std::string error = RunText(text, call + "1)");
        size_t at = error.find("at least ");
        int64_t least = at == std::string::npos ? 1 : std::stoll(error.substr(at + 9));
        call += std::to_string(least + static_cast<int64_t>(random() % 200));
      }
      call += ")";
      if (call.find("save=") != std::string::npos && text.find("aten.mul.Tensor") == std::string::npos) continue;
      std::string sharding = std::vector<std::string>{"shard", "replicate", "zero1"}[random() % 3];
      std::string pipeline = call + "," + sharding + "(ranks=" + std::to_string(run.ranks) +
                             "),accumulate(steps=" + std::to_string(run.accumulation) + "),update" +
                             (random() % 2 ? ",canonicalize" : "");
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + pipeline);
      for (const std::string& passes : {call, pipeline}) {
        std::string out = RunText(text, passes);
        Result<Program> program = Parse(out);
        ASSERT_TRUE(program.ok()) << out;
        repeated += out.find("meta recompute") != std::string::npos ? 1 : 0;
        Result<RunResult> actual = Interpret(*program, run);
        ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << out;
        ASSERT_EQ(FirstDifference(*expected, *actual), "") << out;
      }
    }
  }
  EXPECT_GT(repeated, kEach) << "hardly anything ran again";
}

INSTANTIATE_TEST_SUITE_P(Seeds, RecomputeProperty, ::testing::Range(0, Rounds(4)));

}  // namespace
}  // namespace interlace
