// The example of docs/adding_a_pass.md, compiled and run; the last test holds the page and this file together.
#include "base/files.h"
#include "passes/pass_test_support.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// merge_releases.cc — neighbouring releases are one op.
//   before: release(%1) {fwd}   release(%2) {fwd}
//   after:  release(%1, %2) {fwd}
// Runs after shard. No options, no errors.
Result<bool> MergeReleases(Program& program, const PassOptions& options = {});

Result<bool> MergeReleases(Program& program, const PassOptions&) {
  bool changed = false;
  for (Phase& phase : program.phases) {
    std::vector<OpId> ops;
    for (OpId id : phase.ops) {
      Op& op = program.op(id);
      if (op.kind == OpKind::kRelease && !ops.empty() && program.op(ops.back()).kind == OpKind::kRelease) {
        Op& before = program.op(ops.back());
        before.args.insert(before.args.end(), op.args.begin(), op.args.end());
        changed = true;
      } else {
        ops.push_back(id);
      }
    }
    phase.ops = std::move(ops);
  }
  return changed;
}

TEST(AddingAPass, TheExampleDoesWhatThePageSays) {
  Result<Program> program = Parse(RunText(GoldenInput("mlp.il"), "canonicalize,shard(ranks=2)"));
  ASSERT_TRUE(program.ok());
  const std::string before = "  release(%14) {fwd m1}\n  release(%15) {fwd m1}\n",
                    after = "  release(%14, %15) {fwd m1}\n";
  ASSERT_NE(Print(*program).find(before), std::string::npos) << Print(*program);
  Result<bool> changed = MergeReleases(*program);
  ASSERT_TRUE(changed.ok());
  EXPECT_TRUE(*changed);
  EXPECT_NE(Print(*program).find(after), std::string::npos) << Print(*program);
  EXPECT_TRUE(RunPasses(*program, {}).ok()) << "the verifier is content";
  EXPECT_FALSE(*MergeReleases(*program));
}

TEST(AddingAPass, CodeOnThePageIsTheCodeHere) {
  const std::string root = INTERLACE_SOURCE_DIR;
  Result<std::string> page = ReadFile(root + "/docs/adding_a_pass.md"),
                      code = ReadFile(root + "/src/passes/adding_a_pass_test.cc");
  ASSERT_TRUE(page.ok() && code.ok());
  const std::string open = "```cpp\n";
  int blocks = 0;
  for (size_t at = page->find(open); at != std::string::npos; at = page->find(open, at + 1), ++blocks) {
    size_t begin = at + open.size();
    std::string block = page->substr(begin, page->find("```", begin) - begin);
    EXPECT_NE(code->find(block), std::string::npos) << block;
  }
  EXPECT_EQ(blocks, 2);
}

}  // namespace
}  // namespace interlace
