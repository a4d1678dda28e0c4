#include "passes/runner.h"

#include <filesystem>

#include "base/files.h"
#include "passes/inspect.h"
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

class Folder {
 public:
  Folder() {
    std::string name = ::testing::TempDir() + "/interlace-runner-XXXXXX";
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

std::vector<PassCall> ParsedCalls(const std::string& text) {
  Result<std::vector<PassCall>> calls = ParsePipeline(text);
  EXPECT_TRUE(calls.ok());
  return calls.ok() ? *calls : std::vector<PassCall>();
}

TEST(Runner, DumpsTheTextBeforeAndAfterEveryPass) {
  Folder folder;
  std::string dir = folder.path + "/a/b", text = GoldenInput("mlp.il");
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok());
  Result<std::vector<PassReport>> reports =
      RunPasses(*program, ParsedCalls("canonicalize,shard(ranks=2)"), {true, dir, ""});
  ASSERT_TRUE(reports.ok()) << reports.error().ToString();
  ASSERT_EQ(reports->size(), 2u);
  EXPECT_EQ((*reports)[1].pass, "shard(ranks=2)");
  EXPECT_TRUE((*reports)[1].changed);
  EXPECT_EQ((*reports)[1].ops, static_cast<int64_t>(program->phases[0].ops.size()));
  EXPECT_EQ(*ReadFile(dir + "/00-input.il"), text);
  EXPECT_EQ(*ReadFile(dir + "/01-canonicalize.il"), RunText(text, "canonicalize"));
  EXPECT_EQ(*ReadFile(dir + "/02-shard.il"), Print(*program));
}

TEST(Runner, AFailureLeavesTheProgramAndAReproFile) {
  Folder folder;
  std::string text = GoldenInput("mlp.il"), repro = folder.path + "/repro.il";
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok());
  Result<std::vector<PassReport>> reports =
      RunPasses(*program, ParsedCalls("canonicalize,shard(ranks=2),shard(ranks=2),update(clip=1)"), {true, "", repro});
  ASSERT_FALSE(reports.ok());
  std::string command = "interlace-opt --verify '--passes=shard(ranks=2),update(clip=1)' " + repro;
  EXPECT_TRUE(reports.error().message.ends_with("\nrun again with: " + command)) << reports.error().message;
  EXPECT_EQ(Print(*program), text) << "must be as it was";
  EXPECT_EQ(*ReadFile(repro), "# " + command + "\n" + RunText(text, "canonicalize,shard(ranks=2)"));
  EXPECT_TRUE(Parse(*ReadFile(repro)).ok());
}

TEST(Runner, AnInvalidInputIsNotBlamedOnAPass) {
  std::string text = GoldenInput("mlp.il");
  text.replace(text.find("aten.mm(%7, %8)"), 15, "aten.mm(%9, %8)");  // used before it is defined
  Result<Program> program = Parse(text);
  ASSERT_TRUE(program.ok());
  Result<std::vector<PassReport>> reports = RunPasses(*program, ParsedCalls("canonicalize"));
  ASSERT_FALSE(reports.ok());
  EXPECT_TRUE(reports.error().message.starts_with("the input is not valid: ")) << reports.error().message;
}

TEST(Runner, FilesThatCannotBeWrittenAreNamed) {
  EXPECT_EQ(WriteFile("/proc/nowhere/x.il", "text").error().message,
            "cannot write /proc/nowhere/x.il: No such file or directory");
  Folder folder;
  EXPECT_EQ(ReadFile(folder.path).error().message, "cannot read " + folder.path + ": is a directory");
  ASSERT_TRUE(WriteFile(folder.path + "/x", "old").ok());
  ASSERT_TRUE(WriteFile(folder.path + "/x", "new").ok());
  EXPECT_EQ(*ReadFile(folder.path + "/x"), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path), {}), 1) << "no temporary file is left";
}

TEST(Inspect, CountsBytesOfAStep) {
  Result<Program> program =
      Parse(RunText(GoldenInput("mlp.il"), "canonicalize,shard(ranks=2),accumulate(steps=3),update"));
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  ProgramSummary summary = Summarize(*program);
  EXPECT_EQ(summary.level, "scheduled");
  EXPECT_EQ(summary.params, 5);
  EXPECT_EQ(summary.trainable_elements, 40 + 8 + 40 + 3);
  EXPECT_EQ(summary.units, 5);
  EXPECT_EQ(summary.largest_unit, "u0");
  EXPECT_EQ(summary.largest_unit_bytes, 64 * 4);
  // Per micro-batch: 4 units gathered forward, 1 backward; 3 reduced; a shard of 32 floats comes from the other rank.
  EXPECT_EQ(summary.gathered_bytes, 3 * 5 * 32 * 4);
  EXPECT_EQ(summary.reduced_bytes, 3 * 3 * 32 * 4);
  EXPECT_EQ(summary.placed_gradient_bytes, 3 * (40 + 40 + 8) * 4);
  EXPECT_EQ(summary.copied_gradient_bytes, 0);
  // Shards of weights, and two states of adamw for two units, one of sgd for the third.
  EXPECT_EQ(summary.persistent_bytes, (5 + 2 * 2 + 1) * 32 * 4);
  EXPECT_EQ(summary.step_bytes, 3 * 32 * 4);
  ASSERT_EQ(summary.phases.size(), 4u);
  EXPECT_EQ(summary.phases[1].repeats, 1);
  EXPECT_TRUE(summary.activation_peak_bytes.has_value());
  EXPECT_NE(SummaryText(summary).find("largest u0 256 B (up.weight)"), std::string::npos) << SummaryText(summary);
}

TEST(Inspect, SymbolicSizesHaveNoPeak) {
  Result<Program> program = Parse(
      "interlace 1 captured\nsymbol b 2 8\nstep 1 reduce_each\ninput %0: f32[b] \"x\"\nphase micro_batch takes () "
      "gives () {\n"
      "  %1: f32[b] = aten.tanh(%0) {fwd}\n}\n");
  ASSERT_TRUE(program.ok());
  EXPECT_FALSE(Summarize(*program).activation_peak_bytes.has_value());
}

}  // namespace
}  // namespace interlace
