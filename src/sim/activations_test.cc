// Collectives on activations and messages between ranks, computed by hand on machines with round numbers: 1 GB/s.
#include <gtest/gtest.h>

#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulate.h"
#include "sim/testing/random_step.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

Program OnMesh(const std::string& mesh, const std::string& ops) {
  Result<Program> program =
      Parse("interlace 1 scheduled\n" + mesh +
            "step 1 reduce_each\ninput %0: f32[1200] \"x\"\nphase micro_batch takes () gives () {\n" + ops + "}\n");
  EXPECT_TRUE(program.ok()) << ErrorOf(program);
  if (!program.ok()) return Program();
  const Status valid = Verify(*program);
  EXPECT_TRUE(valid.ok()) << valid.error().ToString();
  return std::move(*program);
}

// 1200 floats, 4.8 us of one GB/s.
TEST(Activations, TimesOfCollectives) {
  const auto time = [](const std::string& name, int64_t result, const std::string& attributes) {
    Program program =
        OnMesh("mesh dp 2\nmesh tp 3\n", "  %1: f32[" + std::to_string(result) + "] = " + name + ".start(%0) {" +
                                             attributes + "}\n  " + name + ".wait(%1)\n");
    Result<Simulation> folded = Simulate(program, RoundCluster(6, 6), nullptr, {});
    Result<Simulation> s = Simulate(program, RoundCluster(6, 6), nullptr, {.every_rank = true});
    EXPECT_TRUE(s.ok()) << ErrorOf(s);
    EXPECT_EQ(folded->makespan_ps(), s->makespan_ps());
    EXPECT_GE(s->makespan_ps(), s->lower_bound_ps());
    return s->makespan_ps();
  };
  EXPECT_EQ(time("all_gather", 3600, "axis=tp dim=0"), 9'600'000) << "two thirds of three times 4.8 us";
  EXPECT_EQ(time("all_gather", 2400, "axis=dp dim=0"), 4'800'000);
  EXPECT_EQ(time("reduce_scatter", 400, "axis=tp dim=0"), 3'200'000);
  EXPECT_EQ(time("all_reduce", 1200, "axis=tp"), 6'400'000) << "two rings";
  EXPECT_EQ(time("all_to_all", 1200, "axis=tp dim=0 to=0"), 3'200'000);
  EXPECT_EQ(time("broadcast", 1200, "axis=tp root=1"), 4'800'000);
}

// Each sends to the next and receives from the one before, in both directions of its links at once.
TEST(Activations, RingOfMessages) {
  Program program = OnMesh("mesh dp 3\n",
                           "  %9: b8[0] = send.start(%0) {fwd axis=dp peer=(rank_dp+1)%3}\n"
                           "  %10: f32[1200] = recv.start() {fwd axis=dp peer=(rank_dp+2)%3}\n"
                           "  recv.wait(%10) {fwd}\n"
                           "  %11: f32[1200] = aten.relu(%10) {fwd}\n"
                           "  send.wait(%9) {fwd}\n");
  Result<Simulation> s = Simulate(program, RoundCluster(3, 3), nullptr, {});
  ASSERT_TRUE(s.ok()) << ErrorOf(s);
  EXPECT_EQ(s->output.ranks.size(), 3u) << "ranks that send to one another are not folded";
  ASSERT_EQ(s->output.transfers.size(), 3u) << "a send and its receive are one";
  for (const TransferRecord& t : s->output.transfers) EXPECT_EQ(t.end_ps, 4'800'000);
  EXPECT_EQ(s->makespan_ps(), 4'800'000 + 9'600'000);
  EXPECT_GE(s->makespan_ps(), s->lower_bound_ps());
  const Timeline timeline = SimulationTimeline(*s);
  int sends = 0, receives = 0;
  for (const TraceEvent& e : timeline.events) {
    sends += e.op == "send.start" && e.lane == TraceLane::kP2P;
    receives += e.op == "recv.start" && e.lane == TraceLane::kP2P;
  }
  EXPECT_EQ(sends, 3);
  EXPECT_EQ(receives, 3);
  const std::string trace = SimulationTrace(*s);
  EXPECT_NE(trace.find("ncclDevKernel_SendRecv(send)"), std::string::npos);
  EXPECT_NE(trace.find("ncclDevKernel_SendRecv(recv)"), std::string::npos);
}

// Along the outer axis of two: 0 and 2, 1 and 3 exchange what they have; 0 and 1 do not.
TEST(Activations, MessagesAlongOneAxisOfTwo) {
  Program program = OnMesh("mesh pp 2\nmesh tp 2\n",
                           "  %9: b8[0] = send.start(%0) {fwd axis=pp peer=1-rank_pp}\n"
                           "  %10: f32[1200] = recv.start() {fwd axis=pp peer=1-rank_pp}\n"
                           "  recv.wait(%10) {fwd}\n"
                           "  send.wait(%9) {fwd}\n");
  Result<Simulation> s = Simulate(program, RoundCluster(4, 4), nullptr, {});
  ASSERT_TRUE(s.ok()) << ErrorOf(s);
  ASSERT_EQ(s->output.transfers.size(), 4u);
  for (const TransferRecord& t : s->output.transfers) EXPECT_EQ(t.members[1] - t.members[0], 2);
}

// Everybody waits before it sends.
TEST(Activations, ReceivingBeforeSendingStandsStill) {
  Program program = OnMesh("mesh dp 2\n",
                           "  %10: f32[1200] = recv.start() {fwd axis=dp peer=1-rank_dp}\n"
                           "  recv.wait(%10) {fwd}\n"
                           "  %9: b8[0] = send.start(%0) {fwd axis=dp peer=1-rank_dp}\n"
                           "  send.wait(%9) {fwd}\n");
  Result<Simulation> s = Simulate(program, RoundCluster(2, 2), nullptr, {});
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().ToString(), "rank 0 waits for ever at 'recv.wait(%10) {fwd}': not started by rank 1");
}

}  // namespace
}  // namespace interlace
