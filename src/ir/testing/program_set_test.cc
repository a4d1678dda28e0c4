// Two stages of a small network against the network in one program, and what is said of sets that do not fit
// (tests/golden/ir_program_set_errors.txt).
#include "ir/program_set.h"

#include <gtest/gtest.h>

#include <map>

#include "base/digest.h"
#include "ir/testing/golden.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/two_stages.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::testing {
namespace {

using Files = std::map<std::string, std::string>;

Result<ProgramSet> Read(const std::string& text, const Files& files) {
  return ParseProgramSet(text, "net.set", [&](const std::string& file) -> Result<std::string> {
    const auto found = files.find(file);
    if (found == files.end()) return MakeError("cannot read ", file, ": No such file");
    return found->second;
  });
}

std::string SetText(const Files& files) {
  std::string text = "interlace-set 1\naxis pp\n";
  int stage = 0;
  for (const auto& [file, program] : files)
    text += "stage " + std::to_string(stage++) + " \"" + file + "\" digest \"" + Digest(program) + "\"\n";
  return text;
}

Files TwoStages() {
  return {{"stage0.il", FirstStage(k1F1BOfTwo)}, {"stage1.il", SecondStage()}};
}

TEST(ProgramSet, TwoStagesGiveTheNumbersOfOneProgram) {
  const Files files = TwoStages();
  Result<ProgramSet> set = Read(SetText(files), files);
  ASSERT_TRUE(set.ok()) << set.error().ToString();
  EXPECT_EQ(PrintProgramSet(*set), SetText(files));
  const Status fits = CheckProgramSet(*set);
  ASSERT_TRUE(fits.ok()) << fits.error().ToString();
  Result<Program> whole = Parse(WholeNetwork());
  ASSERT_TRUE(whole.ok()) << whole.error().ToString();
  ASSERT_TRUE(Verify(*whole).ok()) << Verify(*whole).error().ToString();
  Result<RunResult> expected = Interpret(*whole, {.steps = 3});
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  Result<RunResult> got = InterpretSet(*set, {.steps = 3});
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  EXPECT_EQ(FirstDifference(*expected, *got), "");
  EXPECT_EQ(got->outputs.at("loss").size(), 3u * 4 * 2);
}

TEST(ProgramSet, OtherOrdersGiveTheSameNumbers) {
  Result<Program> whole = Parse(WholeNetwork());
  Result<RunResult> expected = Interpret(*whole, {.steps = 2});
  ASSERT_TRUE(expected.ok()) << expected.error().ToString();
  // The first stage may send all it has where the second has begun to receive it.
  const Files files = {{"stage0.il", FirstStage("f0 b0 f1 b1 f2 b2 f3 b3 ")}, {"stage1.il", SecondStageOneByOne()}};
  Result<ProgramSet> set = Read(SetText(files), files);
  ASSERT_TRUE(set.ok()) << set.error().ToString();
  const Status fits = CheckProgramSet(*set);
  ASSERT_TRUE(fits.ok()) << fits.error().ToString();
  Result<RunResult> got = InterpretSet(*set, {.steps = 2});
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  EXPECT_EQ(FirstDifference(*expected, *got), "");
}

std::string Edited(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(ProgramSet, Messages) {
  const Files good = TwoStages();
  const std::string set = SetText(good);
  std::string text;
  const auto add = [&](const std::string& what, const std::string& set_text, const Files& files) {
    Result<ProgramSet> read = Read(set_text, files);
    const Status status = read.ok() ? CheckProgramSet(*read) : Status(read.error());
    EXPECT_FALSE(status.ok()) << what;
    text += "== " + what + "\n" + (status.ok() ? "ok" : status.error().ToString()) + "\n";
  };
  const auto edit = [&](const std::string& what, const std::string& file, const std::string& from,
                        const std::string& to) {
    Files files = good;
    files[file] = Edited(files[file], from, to);
    add(what, SetText(files), files);
  };
  // the file
  add("another kind of file", "interlace 1 sharded\n", good);
  add("a newer version", Edited(set, "interlace-set 1", "interlace-set 2"), good);
  add("no axis", Edited(set, "axis pp\n", ""), good);
  add("no stage", "interlace-set 1\naxis pp\n", good);
  add("unknown line", Edited(set, "stage 0", "stge 0"), good);
  add("a missing stage", Edited(set, "stage 0", "stage 1"), good);
  add("a file that is not there", set, {{"stage0.il", good.at("stage0.il")}});
  add("a file in another folder", Edited(set, "\"stage1.il\"", "\"../stage1.il\""), good);
  add("another text than the digest's", set,
      {{"stage0.il", Edited(good.at("stage0.il"), "scale=0.125", "scale=0.25")}, {"stage1.il", good.at("stage1.il")}});
  edit("a stage that cannot be parsed", "stage1.il", "aten.tanh(", "aten.tanh");
  // the programs
  edit("a stage that is not valid", "stage1.il", "aten.tanh(%101)", "aten.tanh(%301)");
  add("fewer stages than ranks", SetText({{"stage0.il", good.at("stage0.il")}}), good);
  edit("another mesh", "stage1.il", "mesh dp 2\n", "mesh dp 2\nmesh tp 1\n");
  {
    Files files = good;
    for (auto& [file, program] : files) program = Edited(program, "mesh pp 2", "mesh qq 2");
    for (auto& [file, program] : files) {
      for (size_t at; (at = program.find("axis=pp")) != std::string::npos;) program.replace(at, 7, "axis=qq");
    }
    add("stages along no axis of the mesh", SetText(files), files);
  }
  {
    Files files = good;
    files["stage1.il"] = SecondStageOneByOne(2);
    add("other numbers of micro-batches", SetText(files), files);
  }
  // the messages
  edit("a send without its receive", "stage0.il", "  send.wait(%32) {fwd}\n",
       "  send.wait(%32) {fwd}\n  %39: b8[0] = send.start(%30) {axis=pp peer=1}\n  send.wait(%39)\n");
  edit("a receive without its send", "stage0.il", "  recv.wait(%41) {bwd}\n",
       "  recv.wait(%41) {bwd}\n  %49: f32[4,8] = recv.start() {axis=pp peer=1}\n  recv.wait(%49)\n");
  edit("another type", "stage0.il", "%41: f32[4,8] = recv", "%41: f32[4,4] = recv");
  edit("a message to itself", "stage0.il", "send.start(%31) {fwd axis=pp peer=1}",
       "send.start(%31) {fwd axis=pp peer=0}");
  edit("a collective that one stage lacks", "stage0.il", "  send.wait(%32) {fwd}\n",
       "  send.wait(%32) {fwd}\n  %39: f32[4,8] = all_reduce.start(%31) {axis=pp}\n  all_reduce.wait(%39)\n");
  {
    Files files = good;
    files["stage2.il"] = Edited(WholeNetwork(), "mesh dp 2", "mesh pp 2\nmesh dp 2");
    for (auto& [file, program] : files) program = Edited(program, "mesh pp 2", "mesh pp 3");
    add("a stage without messages", SetText(files), files);
  }
  // the waits: both stages receive first
  {
    Files files = good;
    std::string& first = files["stage0.il"];
    first = Edited(first, "saves (%31 as h) {\n",
                   "saves (%31 as h) {\n  %38: f32[4,8] = recv.start() {axis=pp peer=1}\n  recv.wait(%38)\n");
    first = Edited(first, "%41: f32[4,8] = recv.start() {bwd axis=pp peer=1}\n  recv.wait(%41)",
                   "%41: f32[4,8] = aten.neg(%40)");
    add("a cycle of waits", SetText(files), files);
  }
  {
    Files files = good;
    files["stage1.il"] = SecondStageOneByOne();
    add("a cycle through waits for sends", SetText(files), files);
  }
  ExpectGolden("ir_program_set_errors.txt", text);
}

}  // namespace
}  // namespace interlace::testing
