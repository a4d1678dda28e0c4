#include "passes/host_update.h"

#include "base/files.h"
#include "base/testing/rounds.h"
#include "passes/phase_memory.h"
#include "passes/predict.h"
#include "passes/testing/training_case.h"

namespace interlace {
namespace {

using testing::FirstDifference;
using testing::Interpret;
using testing::RunResult;

int64_t PeakOf(const Program& program, const PassCosts& costs) {
  Result<CostModel> model = costs.Model(program);
  int64_t peak = 0;
  for (const Phase& phase : program.phases) peak = std::max(peak, MemoryOf(program, phase, *model)->Peak());
  return peak;
}

PassCosts CostsOn(const Program& program, const std::string& cluster) {
  return std::move(*ReadCosts(program, PassOptions({{"cluster", cluster}})));
}

TEST(HostUpdate, WhatItCannotMove) {
  const std::string mlp = GoldenInput("mlp.il");
  EXPECT_EQ(RunText(mlp, "canonicalize,zero1(ranks=2),update,host_update(units=u0)").substr(0, 114),
            "error: pass 'host_update': the optimizer step of u0 cannot be made on the host: %39 is a part of a larger "
            "storage");
  EXPECT_EQ(RunText(mlp, "canonicalize,shard(ranks=2),update,host_update(units=u9)"),
            "error: pass 'host_update': option units: there is no u9; the program has 5 units");
  EXPECT_EQ(RunText(mlp, "canonicalize,shard(ranks=2),update,host_update(units=u4)"),
            "error: pass 'host_update': u4 has no optimizer step");
  EXPECT_EQ(
      RunText(mlp, "canonicalize,shard(ranks=2),update,host_update,host_update(units=u0)"),
      "error: pass 'host_update': the optimizer step of u0 cannot be made on the host: it is made on the host already");
  EXPECT_EQ(RunText(mlp, "canonicalize,host_update"),
            "error: pass 'host_update': the program has no units; run shard, replicate or zero1 before host_update");
}

// Its phases run in several places of the step.
TEST(HostUpdate, NothingMovesWhereAStageUsesItAgainAndAgain) {
  const std::string stage = RunText(
      GoldenInput("mlp.il"),
      "canonicalize,mesh(axes=pp:2+dp:2),pipeline(stage=0,at=auto,cluster=h100-80gb-4),shard(axis=dp),"
      "accumulate(steps=4,mode=reduce_last),update,order(schedule=1f1b)");
  EXPECT_EQ(RunText(stage, "host_update"), stage);
  EXPECT_NE(RunText(stage, "host_update(units=u0)").find("is first or last used in a phase that repeats"),
            std::string::npos);
}

TEST(HostUpdate, RandomProgramsKeepTheirBitsAndStatesTakeNoMemory) {
  int stepped = 0;
  for (uint64_t seed = 0, end = Rounds(15); seed < end; ++seed) {
    std::mt19937_64 random(seed * 13 + 5);
    const TrainingCase training = MakeTrainingCase(seed + 3100, 2, random);
    const RunResult expected = training.Expected();
    const std::string start = training.start + (seed % 3 == 0   ? ",reposition_update"
                                                : seed % 3 == 1 ? ",overlap_update"
                                                                : "");
    Program base = training.Captured();
    ASSERT_TRUE(Apply(base, start).ok()) << start;
    const PassCosts costs = CostsOn(base, "l4-24gb-4");
    const int64_t peak = PeakOf(base, costs), limit = peak * static_cast<int64_t>(40 + random() % 50) / 100;
    const std::string limited =
        "limit=" + std::to_string(limit) + ",cluster=l4-24gb-4,kinds=states+gradients+master+activations";
    for (const std::string& pass : {std::string("host_update"), std::string("host_update(share=0.5)"),
                                    "offload(host=always," + limited + ")", "offload(host=auto," + limited + ")"}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " " + start + "," + pass);
      Program program = training.Captured();
      const Status status = Apply(program, start + "," + pass);  // the verifier runs after every pass
      if (!status.ok()) {
        ASSERT_NE(status.error().message.find("cannot be met"), std::string::npos) << status.error().ToString();
        continue;
      }
      const std::string text = Print(program);
      EXPECT_EQ(Print(*Parse(text)), text);
      Result<RunResult> actual = Interpret(program, training.run);
      ASSERT_TRUE(actual.ok()) << actual.error().ToString() << "\n" << text;
      ASSERT_EQ(FirstDifference(expected, *actual), "") << text;
      if (pass.starts_with("offload")) {
        EXPECT_LE(PeakOf(program, costs), limit) << text;
      }
      if (pass == "host_update" && program.Meta("host_update") != nullptr) {
        ++stepped;
        EXPECT_LT(PeakOf(program, costs), peak) << text;
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GE(stepped, 12) << "nearly all of these can step on the host";
}

// Copies to and from the host at 0.5 GB/s, its own memory at 100: moving states is the worse way. The other way round
// it is the better.
std::string Cluster(double link, double memory) {
  std::string text = *PresetCluster("l4-24gb-4");
  const auto set = [&](const std::string& key, double value) {
    const size_t at = text.find("\n" + key + " = ", text.find("[host]")) + 1;
    text.replace(at, text.find('\n', at) - at, key + " = " + std::to_string(value));
  };
  set("h2d_gb_per_s", link), set("d2h_gb_per_s", link), set("host_gb_per_s", 8 * link), set("memory_gb_per_s", memory);
  const std::string path = ::testing::TempDir() + "host_update_" + std::to_string(static_cast<int>(memory)) + ".toml";
  EXPECT_TRUE(WriteFile(path, text).ok());
  return path;
}

TEST(HostUpdate, AutoIsWhatTheSimulatorFindsFaster) {
  for (const bool slow_links : {true, false}) {
    const std::string cluster = slow_links ? Cluster(0.5, 100) : Cluster(50, 0.1);
    testing::RandomProgramOptions shape;
    shape.seed = 77;
    shape.layers = 6;
    shape.max_width = 96;
    const std::string start = "canonicalize,shard(ranks=2),update(clip=0.5),reposition_update";
    Program base = testing::RandomProgram(shape);
    ASSERT_TRUE(Apply(base, start).ok());
    const PassCosts costs = CostsOn(base, cluster);
    const std::string limited = "limit=" + std::to_string(PeakOf(base, costs) * 7 / 10) + ",cluster=" + cluster;
    int64_t time_ps[3];
    std::string metas[3];
    const char* kHosts[] = {"never", "auto", "always"};
    for (int i = 0; i < 3; ++i) {
      Program program = testing::RandomProgram(shape);
      const Status status = Apply(program, start + ",offload(host=" + kHosts[i] + "," + limited + ")");
      ASSERT_TRUE(status.ok()) << status.error().ToString();
      time_ps[i] = Predict(program, costs)->time_ps;
      metas[i] = program.Meta("host_update") == nullptr ? "" : *program.Meta("host_update");
    }
    EXPECT_EQ(metas[0], "");
    EXPECT_NE(metas[2], "");
    // One in a hundred is nothing to the pass.
    EXPECT_LE(time_ps[1], time_ps[0]);
    EXPECT_LE(time_ps[1], time_ps[2] + time_ps[2] / 100);
    EXPECT_EQ(metas[1] != "", slow_links) << metas[1];
  }
}

}  // namespace
}  // namespace interlace
