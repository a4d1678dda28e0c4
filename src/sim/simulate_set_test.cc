#include "sim/simulate_set.h"

#include <gtest/gtest.h>

#include "base/digest.h"
#include "ir/testing/two_stages.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulate.h"
#include "sim/testing/random_step.h"
#include "trace/chrome_trace.h"
#include "trace/testing/check_trace.h"

namespace interlace {
namespace {

ProgramSet SetOf(const std::vector<std::string>& texts) {
  std::string file = "interlace-set 1\naxis pp\n";
  for (size_t i = 0; i < texts.size(); ++i)
    file += "stage " + std::to_string(i) + " \"" + std::to_string(i) + "\" digest \"" + Digest(texts[i]) + "\"\n";
  Result<ProgramSet> set = ParseProgramSet(
      file, "net.set", [&](const std::string& name) -> Result<std::string> { return texts[std::stoul(name)]; });
  EXPECT_TRUE(set.ok()) << ErrorOf(set);
  if (!set.ok()) return {};
  const Status fits = CheckProgramSet(*set);
  EXPECT_TRUE(fits.ok()) << fits.error().ToString();
  return std::move(*set);
}

SetSimulation Simulated(const ProgramSet& set, const ClusterSpec& cluster, const SetOptions& options = {}) {
  Result<SetSimulation> s = SimulateSet(set, cluster, nullptr, options);
  EXPECT_TRUE(s.ok()) << ErrorOf(s);
  if (!s.ok()) return {};
  for (const StageUse& use : s->use) EXPECT_EQ(use.Sum(), s->makespan_ps());
  int64_t path = 0;
  for (const PathPiece& piece : s->path) path += piece.end_ps - piece.start_ps;
  EXPECT_EQ(path, s->makespan_ps());
  return std::move(*s);
}

TEST(SimulateSet, TwoStagesOfTwoRanks) {
  const ProgramSet set = SetOf({testing::FirstStage(testing::k1F1BOfTwo), testing::SecondStage()});
  const SetSimulation s = Simulated(set, RoundCluster(4, 4), {.every_rank = true});
  ASSERT_EQ(s.output.ranks.size(), 4u);
  // Ranks 0 and 1 are the first stage. Of each pair four activations of 128 bytes go on, and four gradients come back.
  int messages = 0;
  for (const TransferRecord& t : s.output.transfers) {
    if (!t.op->IsMessage()) continue;
    ++messages;
    ASSERT_EQ(t.members.size(), 2u);
    EXPECT_EQ(t.members[1] - t.members[0], 2);
    EXPECT_EQ(t.end_ps - t.start_ps, 128'000);
  }
  EXPECT_EQ(messages, 2 * (4 + 4));
  EXPECT_EQ(s.output.ranks[1].end_ps, s.output.ranks[0].end_ps);
  EXPECT_EQ(s.output.ranks[3].end_ps, s.output.ranks[2].end_ps);
  // The first stage holds one activation more while it works on the next: begin, f0 f1 b0 f2 b1 f3 b2 b3, update.
  EXPECT_EQ(s.memory[0].through, (std::vector<int64_t>{0, 0, 128, 128, 128, 128, 128, 128, 0, 0}));
  EXPECT_TRUE(s.memory[1].through.empty());
  const Status trace = CheckChromeTrace(WriteChromeTrace(SetTimeline(s)));
  EXPECT_TRUE(trace.ok()) << trace.error().ToString();
}

TEST(SimulateSet, AStageStandsForItsRanks) {
  const ProgramSet set = SetOf({testing::FirstStage(testing::k1F1BOfTwo), testing::SecondStage()});
  for (int64_t per_node : {1, 2, 4}) {
    for (bool cpu : {false, true}) {
      ClusterSpec cluster = RoundCluster(4, per_node);
      cluster.cpu = cpu;
      if (cpu) cluster.cores = static_cast<double>(per_node) / 2;  // two ranks share one
      const SetSimulation one = Simulated(set, cluster), all = Simulated(set, cluster, {.every_rank = true});
      EXPECT_EQ(one.output.ranks.size(), 2u);
      EXPECT_EQ(one.makespan_ps(), all.makespan_ps()) << per_node << cpu;
      for (size_t stage = 0; stage < 2; ++stage) {
        EXPECT_EQ(one.output.ranks[stage].end_ps, all.output.ranks[2 * stage].end_ps) << per_node << cpu;
        EXPECT_EQ(one.use[stage].compute_ps, all.use[stage].compute_ps);
        EXPECT_EQ(one.use[stage].Bubble(), all.use[stage].Bubble());
      }
    }
  }
}

// relu of 1000 floats takes 8 us, a message of them 4 us.
std::vector<std::string> Chain() {
  const std::string head = "interlace 1 scheduled\nmesh pp 2\nstep 2 reduce_each\nrun forward 0 x2\n";
  return {
      head +
          "input %0: f32[1000] \"x\"\nphase forward takes () gives () {\n  %1: f32[1000] = aten.relu(%0) {fwd}\n"
          "  %2: b8[0] = send.start(%1) {fwd axis=pp peer=1}\n  send.wait(%2) {fwd}\n}\n",
      head +
          "phase forward takes () gives () {\n  %1: f32[1000] = recv.start() {fwd axis=pp peer=0}\n"
          "  recv.wait(%1) {fwd}\n  %2: f32[1000] = aten.relu(%1) {fwd}\n  %3: f32[1000] = aten.relu(%2) {fwd}\n}\n"};
}

// us:       0       8   12      20      28  32              48
// stage 0   |=relu=|send|=relu=|  waits |send|
// stage 1   |  fill     |====relu relu===|recv|===relu relu==|
TEST(SimulateSet, WhereTheTimeGoes) {
  const ProgramSet set = SetOf(Chain());
  const SetSimulation s = Simulated(set, RoundCluster(2, 2));
  constexpr int64_t kUs = 1'000'000;
  EXPECT_EQ(s.makespan_ps(), 48 * kUs);
  const StageUse &first = s.use[0], &second = s.use[1];
  EXPECT_EQ(first.compute_ps, 16 * kUs);
  EXPECT_EQ(first.behind_ps, 8 * kUs) << "for the second stage to take it";
  EXPECT_EQ(first.transfers_ps, 8 * kUs);
  EXPECT_EQ(first.drain_ps, 16 * kUs);
  EXPECT_EQ(second.fill_ps, 12 * kUs);
  EXPECT_EQ(second.compute_ps, 32 * kUs);
  EXPECT_EQ(second.transfers_ps, 4 * kUs);
  EXPECT_EQ(s.memory[0].peak.bytes, 4000);
  EXPECT_EQ(s.memory[1].peak.bytes, 8000);
  // relu and message, the second stage, message, the second stage
  std::vector<std::pair<int32_t, int64_t>> path;
  for (const PathPiece& piece : s.path) {
    if (piece.kind == PathPiece::Kind::kTransfer || path.empty() || path.back().first != piece.rank)
      path.emplace_back(piece.kind == PathPiece::Kind::kTransfer ? -1 : piece.rank, 0);
    path.back().second += (piece.end_ps - piece.start_ps) / kUs;
  }
  EXPECT_EQ(path, (std::vector<std::pair<int32_t, int64_t>>{{0, 8}, {-1, 4}, {1, 16}, {-1, 4}, {1, 16}}));
}

// Sockets take the second message at 20 us, while the second stage works.
TEST(SimulateSet, OnCpusAMessageComesByItself) {
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.cpu = true;
  const ProgramSet set = SetOf(Chain());
  const SetSimulation s = Simulated(set, cluster);
  constexpr int64_t kUs = 1'000'000;
  EXPECT_EQ(s.makespan_ps(), 44 * kUs);
  EXPECT_EQ(s.use[0].behind_ps, 0);
  EXPECT_EQ(s.use[0].drain_ps, 20 * kUs);
  EXPECT_EQ(s.use[1].fill_ps, 12 * kUs);
  EXPECT_EQ(s.use[1].Bubble(), 12 * kUs);
}

// The last stage takes the first message when it has that of the one between, which lies behind it at the sender.
TEST(SimulateSet, AMessageDoesNotHoldUpThoseToOthers) {
  const std::string head = "interlace 1 scheduled\nmesh pp 3\nstep 1 reduce_each\n";
  const auto phase = [](const std::string& ops) { return "phase forward takes () gives () {\n" + ops + "}\n"; };
  const ProgramSet set = SetOf(
      {head + "input %0: f32[1000] \"x\"\n" +
           phase(
               "  %1: b8[0] = send.start(%0) {fwd axis=pp peer=2}\n  %2: b8[0] = send.start(%0) {fwd axis=pp peer=1}\n"
               "  send.wait(%2) {fwd}\n  send.wait(%1) {fwd}\n"),
       head + phase("  %1: f32[1000] = recv.start() {fwd axis=pp peer=0}\n  recv.wait(%1) {fwd}\n"
                    "  %2: b8[0] = send.start(%1) {fwd axis=pp peer=2}\n  send.wait(%2) {fwd}\n"),
       head + phase("  %1: f32[1000] = recv.start() {fwd axis=pp peer=1}\n  recv.wait(%1) {fwd}\n"
                    "  %2: f32[1000] = recv.start() {fwd axis=pp peer=0}\n  recv.wait(%2) {fwd}\n")});
  EXPECT_EQ(Simulated(set, RoundCluster(3, 3)).makespan_ps(), int64_t{3} * 4 * 1'000'000);
}

TEST(SimulateSet, OneStageIsTheProgram) {
  const std::string text =
      "interlace 1 scheduled\nmesh pp 1\nmesh dp 4\nstep 3 reduce_each\ninput %0: f32[1000] \"x\"\n"
      "phase forward takes () gives () {\n  %1: f32[1000] = aten.relu(%0) {fwd}\n"
      "  %2: f32[1000] = all_reduce.start(%1) {fwd axis=dp}\n  %3: f32[1000] = aten.relu(%1) {fwd}\n"
      "  all_reduce.wait(%2) {fwd}\n}\n";
  const ProgramSet set = SetOf({text});
  for (bool every_rank : {false, true}) {
    const SetSimulation s = Simulated(set, RoundCluster(4, 2), {.every_rank = every_rank});
    const Result<Simulation> one =
        Simulate(set.stages[0].program, RoundCluster(4, 2), nullptr, {.slow = {}, .every_rank = every_rank});
    ASSERT_TRUE(one.ok()) << ErrorOf(one);
    EXPECT_EQ(s.makespan_ps(), one->makespan_ps());
    ASSERT_EQ(s.output.ranks.size(), one->output.ranks.size());
    EXPECT_EQ(s.output.ranks[0].end_ps, one->output.ranks[0].end_ps);
    EXPECT_EQ(s.memory[0].peak.bytes, one->memory.peak.bytes);
    EXPECT_EQ(WriteChromeTrace(SetTimeline(s)).size() > 0, true);
  }
}

TEST(SimulateSet, Texts) {
  const ProgramSet set = SetOf(Chain());
  const auto text = [&](const std::string& output, const std::string& cluster = "h100-80gb-2") {
    return SimulateSetText(set, cluster, "", output, {});
  };
  EXPECT_NE(text("json")->find("\"stages\":["), std::string::npos);
  EXPECT_NE(text("summary")->find("critical path, by stage:"), std::string::npos);
  EXPECT_NE(text("trace")->find("\"stage 1\""), std::string::npos);
  EXPECT_EQ(ErrorOf(text("jsn")), "unknown output 'jsn', did you mean 'json'? (json, summary, trace)");
  EXPECT_EQ(ErrorOf(text("json", "h100-80gb-1")).substr(0, 2), "0:");
}

}  // namespace
}  // namespace interlace
