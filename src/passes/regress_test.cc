// regress_test.cc — tests/regress: one small program a bug of the past, and what must become of it.
//
//   # What went wrong, in one line.
//   # passes: shard(ranks=2),update,...          none: the text is read and verified
//   # expect: ok | same bits | same bits as PASSES | error: first line of the message
//   # then: an op of the text after the passes, behind that of the "then" before it
//
// "same bits": the interpreter gives, after the passes, the bits of the textbook step, or those of the same program
// after other passes. The program is verified after every pass, and its text reads back.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/files.h"
#include "passes/schedule_test_support.h"

namespace interlace {
namespace {

// What stands behind "# KEY: " in each line of its own at the head of a text.
std::vector<std::string> Fields(const std::string& text, const std::string& key) {
  const std::string begin = "\n# " + key + ": ";
  std::vector<std::string> out;
  for (size_t at = text.find(begin); at != std::string::npos; at = text.find(begin, at + 1)) {
    const size_t from = at + begin.size();
    out.push_back(text.substr(from, text.find('\n', from) - from));
  }
  return out;
}

// The only one, or "".
std::string Field(const std::string& text, const std::string& key) {
  const std::vector<std::string> all = Fields(text, key);
  return all.empty() ? "" : all[0];
}

// The number behind "ranks=" or the like in a pipeline; 1 where it does not stand.
int64_t NumberIn(const std::string& passes, const std::string& option) {
  const size_t at = passes.find(option);
  return at == std::string::npos ? 1 : std::stoll(passes.substr(at + option.size()));
}

std::string Compare(const std::string& text, const std::string& passes, const std::string& reference) {
  const int64_t ranks = NumberIn(passes, "ranks="), steps = NumberIn(passes, "accumulate(steps=");
  if (reference.empty()) return BitsDiffer(text, passes, steps, "reduce_each", ranks);
  Result<Program> expected = Parse(RunText(text, reference)), actual = Parse(RunText(text, passes));
  if (!expected.ok() || !actual.ok()) return RunText(text, expected.ok() ? passes : reference);
  const testing::InterpretOptions run{.ranks = ranks, .accumulation = steps};
  Result<testing::RunResult> one = testing::Interpret(*expected, run), other = testing::Interpret(*actual, run);
  if (!one.ok() || !other.ok()) return (one.ok() ? other : one).error().ToString();
  return testing::FirstDifference(*one, *other);
}

TEST(Regress, EveryBugOfThePastStaysAway) {
  const std::filesystem::path folder = std::filesystem::path(INTERLACE_SOURCE_DIR) / "tests" / "regress";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".il") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  EXPECT_GE(files.size(), 10u) << folder;
  for (const std::filesystem::path& file : files) {
    SCOPED_TRACE(file.filename().string());
    Result<std::string> text = ReadFile(file.string());
    ASSERT_TRUE(text.ok() && text->starts_with("# ")) << "begins with what went wrong";
    const std::string passes = Field(*text, "passes"), expect = Field(*text, "expect");
    const std::string after = RunText(*text, passes), bits = "same bits";
    if (expect.starts_with("error: ")) {
      EXPECT_EQ(after.substr(0, after.find('\n')), expect);
      continue;
    }
    ASSERT_TRUE(expect == "ok" || expect.starts_with(bits)) << "# expect: '" << expect << "'";
    Result<Program> again = Parse(after, "after");
    ASSERT_TRUE(again.ok()) << after;
    EXPECT_EQ(Print(*again), after);
    size_t found = 0;
    for (const std::string& then : Fields(*text, "then")) {
      found = after.find("\n  " + then + "\n", found);
      ASSERT_NE(found, std::string::npos) << "not there, or too early: " << then << "\n" << after;
    }
    if (expect == "ok") continue;
    const std::string reference = expect == bits ? "" : expect.substr((bits + " as ").size());
    EXPECT_EQ(Compare(*text, passes, reference), "");
  }
}

}  // namespace
}  // namespace interlace
