// Small steps computed by hand, on machines with round numbers.
#include <gtest/gtest.h>

#include "ir/text.h"
#include "sim/simulate.h"
#include "sim/testing/random_step.h"
#include "sim/testing/simulate_text.h"
#include "trace/chrome_trace.h"
#include "trace/memory_snapshot.h"
#include "trace/testing/check_trace.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

constexpr int64_t kUs = 1'000'000;  // picoseconds

// A program of two units of 1000 floats a rank on a mesh of two, with the given ops. Times: aten.relu of n floats moves
// 8n bytes, so takes 8n ns; a gather moves 4000 bytes, so takes 4 us.
Program Step(const std::string& ops, const std::string& update = "", const std::string& inputs = "") {
  int ranks = 2;
  std::string n = std::to_string(1024 * ranks);
  std::string text = "interlace 1 scheduled\nmesh dp " + std::to_string(ranks) +
                     "\nmodule 0 \"\" \"Net\"\nmodule 1 \"fc\" \"Linear\"\nunit u0 dp f32 numel " + n +
                     " shard 1024\nunit u1 dp f32 numel " + n + " shard 1024\ninput %0: f32[1000] \"x\"\n" + inputs +
                     "state %1: f32[1024] u0.shard persistent\nstate %2: f32[1024] u1.shard " +
                     "persistent\nphase micro_batch takes () gives () {\n" + ops + "}\n" +
                     (update.empty() ? "" : "phase update once takes () gives () {\n" + update + "}\n");
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << ErrorOf(program);
  return program.ok() ? std::move(*program) : Program();
}

Simulation Simulated(const Program& program, const ClusterSpec& cluster, const SimulateOptions& options = {}) {
  Result<Simulation> s = Simulate(program, cluster, nullptr, options);
  EXPECT_TRUE(s.ok()) << ErrorOf(s);
  EXPECT_GE(s->makespan_ps(), s->lower_bound_ps());
  return std::move(*s);
}

TEST(Simulate, ComputeOneAfterAnother) {
  Program program = Step("  %10: f32[1000] = aten.relu(%0) {fwd m1}\n  %11: f32[1000] = aten.relu(%10) {fwd m1}\n");
  Simulation s = Simulated(program, RoundCluster(2, 2));
  EXPECT_EQ(s.makespan_ps(), 16 * kUs);
  EXPECT_EQ(s.lower_bound_ps(), 16 * kUs);
  EXPECT_EQ(s.use[0].compute_ps, 16 * kUs);
  ASSERT_EQ(s.path.size(), 2u);
  std::vector<Blame> blame = BlameModules(s.input, s.path);
  ASSERT_EQ(blame.size(), 1u);
  EXPECT_EQ(blame[0].module, "fc");
  EXPECT_EQ(blame[0].lane, "compute fwd");
  EXPECT_EQ(blame[0].time_ps, 16 * kUs);
}

// compute  |relu 8|wait ..|relu 8|        gather: 3 of latency, 4.096 * 2 / 2 of transfer a unit, 16 units long here
constexpr const char* kOverlap =
    "  %10: f32[2048] = gather.start(%1) {fwd units=[u0]}\n"
    "  %11: f32[1000] = aten.relu(%0) {fwd}\n"
    "  gather.wait(%10) {fwd}\n"
    "  %12: f32[1000] = aten.relu(%11) {fwd}\n";

TEST(Simulate, GatherUnderCompute) {
  Program program = Step(kOverlap);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.intra.alpha_us = 10;
  Simulation s = Simulated(program, cluster);
  EXPECT_EQ(s.output.transfers[0].start_ps, 0);
  EXPECT_EQ(s.output.transfers[0].end_ps, 14'096'000);
  EXPECT_EQ(s.makespan_ps(), 22'096'000);
  ASSERT_EQ(s.use[0].lanes.size(), 1u);
  EXPECT_EQ(s.use[0].lanes[0].lane, "gather");
  EXPECT_EQ(s.use[0].lanes[0].bytes, 4096);
  EXPECT_EQ(s.use[0].lanes[0].busy_ps, 14'096'000);
  EXPECT_EQ(s.use[0].lanes[0].exposed_ps, 6'096'000);
  EXPECT_EQ(s.use[0].blocked_ps, 6'096'000);
  ASSERT_EQ(s.path.size(), 2u);
  EXPECT_EQ(s.path[0].kind, PathPiece::Kind::kTransfer);
  EXPECT_EQ(s.path[0].end_ps, 14'096'000);
  EXPECT_EQ(s.path[1].start_ps, 14'096'000);
}

TEST(Simulate, OneLaneIsAQueue) {
  Program program = Step(
      "  %10: f32[2048] = gather.start(%1) {fwd units=[u0]}\n"
      "  %11: f32[2048] = gather.start(%2) {fwd units=[u1]}\n"
      "  gather.wait(%10) {fwd}\n"
      "  gather.wait(%11) {fwd}\n");
  Simulation s = Simulated(program, RoundCluster(2, 2));
  EXPECT_EQ(s.output.transfers[1].start_ps, 4'096'000);
  EXPECT_EQ(s.makespan_ps(), 8'192'000);
  EXPECT_EQ(s.lower_bound_ps(), 8'192'000);
  EXPECT_EQ(s.output.transfers[1].cause_transfer, 0);
  ASSERT_EQ(s.path.size(), 2u) << "the second gather began when the first ended";
}

TEST(Simulate, GatherAndReduceShareTheLink) {
  Program program = Step(
      "  %9: f32[2048] = grad.begin() {bwd units=[u1]}\n"
      "  %10: f32[2048] = gather.start(%1) {bwd units=[u0]}\n"
      "  %11: f32[1024] = reduce.start(%9) {bwd units=[u1]}\n"
      "  gather.wait(%10) {bwd}\n"
      "  reduce.wait(%11) {bwd}\n");
  Simulation s = Simulated(program, RoundCluster(2, 2));
  EXPECT_EQ(s.output.transfers[0].end_ps, 8'192'000) << "both at half the rate";
  EXPECT_EQ(s.output.transfers[1].end_ps, 8'192'000);
  EXPECT_EQ(s.lower_bound_ps(), 8'192'000);
  EXPECT_EQ(s.bounds.front().name, "links within a node");
}

TEST(Simulate, SendAndReceiveUseTwoDirections) {
  Program program = Step(
      "  %9: b8[0] = send.start(%0) {fwd lane=p2p axis=dp peer=1-rank_dp}\n"
      "  %10: f32[1000] = recv.start() {fwd lane=gather axis=dp peer=1-rank_dp}\n"
      "  recv.wait(%10) {fwd}\n"
      "  %11: f32[1000] = aten.relu(%10) {fwd}\n"
      "  send.wait(%9) {fwd}\n");
  Simulation s = Simulated(program, RoundCluster(2, 2));
  EXPECT_EQ(s.output.transfers[0].end_ps, 4 * kUs);
  EXPECT_EQ(s.output.transfers[1].end_ps, 4 * kUs) << "not shared";
  EXPECT_EQ(s.makespan_ps(), 12 * kUs) << "recv.wait holds the compute lane";
}

TEST(Simulate, CopiesShareTheHost) {
  Program program = Step(
      "  offload.start(%0) {fwd}\n"
      "  reload.start(%3) {fwd}\n"
      "  offload.wait(%0) {fwd}\n"
      "  reload.wait(%3) {fwd}\n",
      "", "input %3: f32[1000] \"y\"\n");
  ClusterSpec cluster = RoundCluster(4, 2);
  EXPECT_EQ(Simulated(program, cluster).makespan_ps(), 4 * kUs);
  cluster.host_gb_per_s = 1;  // two devices of a node at once
  EXPECT_EQ(Simulated(program, cluster).makespan_ps(), 8 * kUs);
  EXPECT_EQ(Simulated(program, cluster, {.every_rank = true}).makespan_ps(), 8 * kUs);
  EXPECT_EQ(Simulated(program, cluster).bounds.front().name, "host bandwidth");
}

TEST(Simulate, AStepOnTheHostRunsBesideComputeAndHoldsUpItsReload) {
  // 28 bytes of each of 1024 elements at 2 GB/s: 14.336 us; the reload of 4096 bytes comes after it.
  Program program = Step(
      "  update.adamw(%1, %3, %4, %5) {upd lane=host units=[u0] scale=1.0 ranges=[0, 1024, 0]}\n"
      "  reload.start(%1) {fwd}\n"
      "  %10: f32[1000] = aten.relu(%0) {fwd}\n"
      "  reload.wait(%1) {fwd}\n"
      "  %11: f32[1000] = aten.relu(%10) {fwd}\n",
      "",
      "state %3: f32[1024] u0.grad step out\nstate %4: f32[1024] u0.exp_avg persistent out\nstate %5: f32[1024] "
      "u0.exp_avg_sq persistent out\n");
  ClusterSpec cluster = RoundCluster(2, 1);
  cluster.host_memory_gb_per_s = 2;
  Simulation s = Simulated(program, cluster);
  EXPECT_EQ(s.output.transfers[0].end_ps, 14'336'000);
  EXPECT_EQ(s.output.transfers[1].start_ps, 14'336'000);
  EXPECT_EQ(s.makespan_ps(), 14'336'000 + 4'096'000 + 8 * kUs);
  cluster.per_node = 2;  // two devices of a node share its memory
  EXPECT_EQ(Simulated(program, cluster).makespan_ps(), 2 * 14'336'000 + 4'096'000 + 8 * kUs);
  EXPECT_EQ(Simulated(program, cluster, {.every_rank = true}).makespan_ps(), 2 * 14'336'000 + 4'096'000 + 8 * kUs);
}

TEST(Simulate, FilesShareTheStore) {
  Program program = Step(
      "  offload.start(%0) {fwd lane=file}\n"
      "  offload.wait(%0) {fwd}\n");
  EXPECT_EQ(Simulated(program, RoundCluster(2, 2)).makespan_ps(), 8 * kUs) << "two ranks on one host";
  EXPECT_EQ(Simulated(program, RoundCluster(2, 1)).makespan_ps(), 4 * kUs);
}

// Compute, reads and writes of a file tier, each pair with factors of its own: what runs beside a copy of the tier
// takes longer while it lasts, and the copy does.
TEST(Simulate, PairsOfAFileTier) {
  Program read = Step(
      "  %9: f32[1000] = aten.relu(%0) {fwd}\n"
      "  offload.start(%9) {fwd}\n"
      "  offload.wait(%9) {fwd}\n"
      "  reload.start(%9) {fwd}\n"
      "  %10: f32[1000] = aten.relu(%0) {fwd}\n"
      "  reload.wait(%9) {fwd}\n"
      "  %11: f32[1000] = aten.add.Tensor(%9, %10) {fwd}\n");
  Program both = Step(
      "  %9: f32[2000] = aten.relu(%3) {fwd}\n"
      "  offload.start(%9) {fwd}\n"
      "  offload.wait(%9) {fwd}\n"
      "  %10: f32[1000] = aten.relu(%0) {fwd}\n"
      "  reload.start(%9) {fwd}\n"
      "  offload.start(%10) {fwd}\n"
      "  reload.wait(%9) {fwd}\n"
      "  offload.wait(%10) {fwd}\n"
      "  reload.start(%10) {fwd}\n"
      "  reload.wait(%10) {fwd}\n"
      "  %11: f32[1000] = aten.relu(%10) {fwd}\n"
      "  %12: f32[2000] = aten.relu(%9) {fwd}\n",
      "", "input %3: f32[2000] \"y\"\n");
  ClusterSpec cluster = RoundCluster(2, 1);
  cluster.cpu = cluster.file_tier = true;
  ProfileTable pairs = *ParseProfile(
      "interlace-profile 2\ntogether compute 1.5 file_read 2\ntogether file_read 1.25 file_write 2\n"
      "together compute 100 h2d 100\n",
      "p");
  auto us = [&](const Program& program, const ProfileTable* profile, const SimulateOptions& options = {}) {
    Result<Simulation> s = Simulate(program, cluster, profile, options);
    EXPECT_TRUE(s.ok()) << ErrorOf(s);
    EXPECT_GE(s->makespan_ps(), s->lower_bound_ps());
    return static_cast<double>(s->makespan_ps()) / kUs;
  };
  // The read of 4 us takes 8, in which the op beside it does 16/3 of its 8 us.
  EXPECT_EQ(us(read, nullptr), 8 + 4 + 8 + 12);
  EXPECT_NEAR(us(read, &pairs), 8 + 4 + 8 + (8 - 16.0 / 3) + 12, 1e-4);
  EXPECT_NEAR(us(read, &pairs, {.every_rank = true}), 8 + 4 + 8 + (8 - 16.0 / 3) + 12, 1e-4);
  WhatIf none;
  none.interference = false;
  EXPECT_EQ(us(read, &pairs, {.what_if = none}), 8 + 4 + 8 + 12);
  // The write of 4 us takes 8, in which the read does 6.4 of its 8 us.
  EXPECT_EQ(us(both, nullptr), 16 + 8 + 8 + 8 + 4 + 8 + 16);
  EXPECT_NEAR(us(both, &pairs), 16 + 8 + 8 + 9.6 + 4 + 8 + 16, 1e-4);
  // Two ranks of one host have half of each direction: 16 us for the write, 1.6 of the read's 8 left then.
  cluster.per_node = 2;
  EXPECT_NEAR(us(both, &pairs), 16 + 16 + 8 + 19.2 + 8 + 8 + 16, 1e-4);
  cluster.per_node = 1;
  cluster.file_tier = false;  // copies in memory: other pairs
  EXPECT_NEAR(us(read, &pairs), 8 + 4 + 400 + (8 - 4) + 12, 1e-3);
}

TEST(Simulate, PairsOfATierChangeNothingWithoutOne) {
  Program program = Step(kOverlap);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.cpu = cluster.file_tier = true;
  std::string text = "interlace-profile 2\ntogether compute 1.5 collective 1.25\n";
  ProfileTable without = *ParseProfile(text, "p");
  ProfileTable with = *ParseProfile(text + "together compute 3 file_read 4\ntogether collective 5 file_write 6\n" +
                                        "together file_read 7 file_write 8\ntogether compute 9 h2d 9\n",
                                    "p");
  ProfileTable old = *ParseProfile(
      "interlace-profile 1\ninterference [" +
          [] {
            std::string factors;
            for (int i = 0; i < 28; ++i)
              factors += std::string(i > 0 ? ", " : "") + (i == 16 ? "1.5" : i == 17 ? "1.25" : "1");
            return factors;
          }() +
          "]\n",
      "p");
  const int64_t want = Simulate(program, cluster, &without, {})->makespan_ps();
  EXPECT_EQ(Simulate(program, cluster, &with, {})->makespan_ps(), want);
  EXPECT_EQ(Simulate(program, cluster, &old, {})->makespan_ps(), want) << "as version 1 says it";
  EXPECT_LT(Simulate(program, cluster, nullptr, {})->makespan_ps(), want);
}

TEST(Simulate, InterferenceIsMistsAlgorithm) {
  // All four classes start together; the engine must give what the algorithm gives, for any factors and amounts.
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> factors;
    for (int i = 0; i < 28; ++i) factors.push_back(1 + static_cast<double>(random() % 300) / 100);
    std::array<int64_t, 4> n;
    for (int64_t& x : n) x = 1 + static_cast<int64_t>(random() % 5000);
    std::string inputs;
    for (int i = 0; i < 4; ++i)
      inputs +=
          "input %" + std::to_string(3 + i) + ": f32[" + std::to_string(n[i]) + "] \"i" + std::to_string(i) + "\"\n";
    auto type = [&](int i) { return "f32[" + std::to_string(n[i]) + "]"; };
    Program program = Step(
        "  %10: " + type(1) +
            " = all_reduce.start(%4) {fwd lane=gather axis=dp}\n  reload.start(%5) {fwd}\n"
            "  offload.start(%6) {fwd}\n  %13: " +
            type(0) +
            " = aten.relu(%3) {fwd}\n  all_reduce.wait(%10) {fwd}\n  reload.wait(%5) {fwd}\n  offload.wait(%6) {fwd}\n",
        "", inputs);
    ClusterSpec cluster = RoundCluster(2, 2);
    cluster.interference_factors = factors;
    Simulation s = Simulated(program, cluster);
    std::array<double, 28> f;
    std::copy(factors.begin(), factors.end(), f.begin());
    // us alone: relu 8n bytes; an all-reduce over two moves n floats; copies 4n bytes.
    double want = Interference::FromFactors(f).Together({8e-3 * n[0], 4e-3 * n[1], 4e-3 * n[2], 4e-3 * n[3]});
    EXPECT_NEAR(static_cast<double>(s.makespan_ps()) / kUs, want, want * 1e-5);
  }
}

TEST(Simulate, CoresOfAHostAreShared) {
  Program program = Step(kOverlap);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.cpu = true;
  cluster.cores = 2;
  cluster.intra.gb_per_s = 0.256;          // 16 us
  cluster.comm_core_us_per_mb = 1953.125;  // 8 us of a core for 4096 bytes: half a core
  Simulation s = Simulated(program, cluster);
  // Two ranks compute (2 cores) and move data (2 x 1/2): 3 wanted, 2 there. Compute takes 12 us, the transfer has then
  // done 8 of its 16 us and the lane waits; 1 core is wanted, and 8 us are left.
  EXPECT_NEAR(static_cast<double>(s.output.transfers[0].end_ps), 20.0 * kUs, 20);
  EXPECT_NEAR(static_cast<double>(s.makespan_ps()), 28.0 * kUs, 20);
  EXPECT_NEAR(static_cast<double>(Simulated(program, cluster, {.every_rank = true}).makespan_ps()), 28.0 * kUs, 20);
}

// On a CPU, with a profile: transfers go out in the order of issue, the latency of one that queues is over before its
// turn, and starting and finishing are work of the compute lane.
TEST(Simulate, CollectivesOfACpuAreMessagesInOrder) {
  ProfileTable profile = *ParseProfile(R"(interlace-profile 1
fingerprint "here"
op "aten.relu(f32[1000])->f32[1000]" us 8 bytes 4000 transient 0 measured
collective gather ranks 2 bytes 1 us 5
collective gather ranks 2 bytes 8192 us 25
finish gather ranks 2 bytes 8192 us 4
issue us 1
)",
                                       "p");
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.cpu = true;
  cluster.cores = 8;
  Program gathers = Step(R"(  %10: f32[2048] = gather.start(%1) {fwd units=[u0]}
  %11: f32[2048] = gather.start(%2) {fwd units=[u1]}
  gather.wait(%10) {fwd}
  %12: f32[1000] = aten.relu(%0) {fwd}
  gather.wait(%11) {fwd}
  release(%10) {fwd}
  release(%11) {fwd}
)");
  Result<Simulation> s = Simulate(gathers, cluster, &profile, {});
  ASSERT_TRUE(s.ok()) << ErrorOf(s);
  // The first: 5 us of latency and 16 of transfer; the second follows at once, its latency is over: 21 + 16. The lane
  // starts both (2 us), waits until 21, finishes the first (25), computes (33), waits until 37 and finishes the second.
  EXPECT_EQ(s->output.transfers[0].end_ps, 21 * kUs);
  EXPECT_EQ(s->output.transfers[1].end_ps, 37 * kUs);
  EXPECT_EQ(s->makespan_ps(), 41 * kUs);
  int64_t total = 0;
  for (const PathPiece& piece : s->path) total += piece.end_ps - piece.start_ps;
  EXPECT_EQ(total, s->makespan_ps());
}

TEST(Simulate, LaunchesHoldTheDevice) {
  std::string ops;
  for (int i = 0; i < 10; ++i) ops += "  %" + std::to_string(10 + i) + ": f32[1000] = aten.relu(%0) {fwd}\n";
  Program program = Step(ops);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.issue_us = 20;
  Simulation s = Simulated(program, cluster);
  EXPECT_EQ(s.makespan_ps(), (9 * 20 + 8) * kUs);
  EXPECT_EQ(s.bounds.front().name, "launches");
  int64_t launch = 0, total = 0;
  for (const PathPiece& piece : s.path) {
    total += piece.end_ps - piece.start_ps;
    launch += piece.kind == PathPiece::Kind::kLaunch ? piece.end_ps - piece.start_ps : 0;
  }
  EXPECT_EQ(launch, 9 * 12 * kUs);
  EXPECT_EQ(total, s.makespan_ps());
}

TEST(Simulate, LaunchesInBackwardHaveATimeOfTheirOwn) {
  std::string ops;
  for (int i = 0; i < 10; ++i)
    ops += "  %" + std::to_string(10 + i) + ": f32[1000] = aten.relu(%0) {" + (i < 4 ? "fwd" : "bwd") + "}\n";
  Program program = Step(ops);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.issue_us = 40;
  cluster.step.issue_backward = 0.5;
  Simulation s = Simulated(program, cluster);
  EXPECT_EQ(s.makespan_ps(), (4 * 40 + 5 * 20 + 8) * kUs);
  EXPECT_EQ(s.bounds.front().name, "launches");
  EXPECT_EQ(s.bounds.front().time_ps, (4 * 40 + 6 * 20 - 40) * kUs) << "all but one, of the longer ones";
}

TEST(Simulate, ASlowRankHoldsTheOthers) {
  Program program = Step(
      "  %9: f32[1000] = aten.relu(%0) {fwd}\n"
      "  %10: f32[2048] = gather.start(%1) {fwd units=[u0]}\n"
      "  gather.wait(%10) {fwd}\n"
      "  %11: f32[1000] = aten.relu(%9) {fwd}\n");
  Simulation even = Simulated(program, RoundCluster(2, 2), {.every_rank = true});
  EXPECT_EQ(even.makespan_ps(), 20'096'000);
  EXPECT_EQ(Simulated(program, RoundCluster(2, 2)).makespan_ps(), 20'096'000);
  Simulation s = Simulated(program, RoundCluster(2, 2), {.slow = {{1, 2.0}}});
  EXPECT_EQ(s.output.transfers[0].start_ps, 16 * kUs);
  EXPECT_EQ(s.output.transfers[0].cause_rank, 1);
  EXPECT_EQ(s.output.ranks[0].end_ps.back(), 28'096'000);
  EXPECT_EQ(s.makespan_ps(), 36'096'000);
  EXPECT_EQ(s.use[0].blocked_ps, 12'096'000);
  EXPECT_EQ(ErrorOf(Simulate(program, RoundCluster(2, 2), nullptr, {.slow = {{2, 2.0}}})),
            "rank 2 is to be slow, but the program's mesh has 2 ranks");
  EXPECT_EQ(ErrorOf(Simulate(program, RoundCluster(2, 2), nullptr, {.slow = {{1, 0.5}}})),
            "rank 1 cannot be 0.5 times slower; give 1 to 1000");
}

TEST(Simulate, RanksThatDoNotMeet) {
  Program with = Step(kOverlap), without = Step("  %11: f32[1000] = aten.relu(%0) {fwd}\n");
  ClusterSpec cluster = RoundCluster(2, 2);
  CostModel model = *CostModel::Create(with, cluster, nullptr), other = *CostModel::Create(without, cluster, nullptr);
  Lowered a = *Lower(with, model), b = *Lower(without, other);
  EXPECT_EQ(ErrorOf(RunEngine({{&a, &b}, {kOne, kOne}, 1}, model)),
            "rank 0 waits for ever at 'gather.wait(%10) {fwd}': not started by rank 1");
  Program bigger = Step(
      "  %10: f32[2048], %11: f32[2048] = gather.start(%1, %2) {fwd units=[u0,u1]}\n  gather.wait(%10, %11) {fwd}\n");
  CostModel third = *CostModel::Create(bigger, cluster, nullptr);
  Lowered c = *Lower(bigger, third);
  EXPECT_NE(ErrorOf(RunEngine({{&a, &c}, {kOne, kOne}, 1}, model))
                .find("rank 1 meets the others of its group in another collective"),
            std::string::npos);
}

TEST(Simulate, AccumulationRepeatsPhases) {
  Program program =
      Step("  %10: f32[1000] = aten.relu(%0) {fwd}\n", "  update.sgd(%1, %2) {upd units=[u0] scale=1.0}\n");
  program.accumulation = 5;
  Simulation s = Simulated(program, RoundCluster(2, 2));
  EXPECT_EQ(s.lowered->instances(), 6);
  EXPECT_EQ(s.makespan_ps(), 5 * 8 * kUs + 3 * 4096 * 1000) << "sgd reads two shards and writes one";
  program.accumulation = int64_t{1} << 40;
  EXPECT_EQ(
      ErrorOf(Simulate(program, RoundCluster(2, 2), nullptr, {})),
      "a step runs 'micro_batch' 1099511627776 times, more than 134217728 ops in all; simulate fewer micro-batches");
}

TEST(Simulate, TimesBeyond64Bits) {
  Program program = Step(
      "  %10: f32[1000] = aten.relu(%0) {fwd}\n  %11: f32[1000] = aten.relu(%0) {fwd}\n  %12: f32[1000] = "
      "aten.relu(%0) {fwd}\n");
  ProfileTable table;
  table.ops["aten.relu(f32[1000])->f32[1000]"] = {4e12, 4000, 0, true};
  EXPECT_EQ(ErrorOf(Simulate(program, RoundCluster(2, 2), &table, {})),
            "the step takes longer than fits in 64 bits of picoseconds");
  table.ops["aten.relu(f32[1000])->f32[1000]"] = {9e12, 4000, 0, true};
  EXPECT_NE(ErrorOf(Simulate(program, RoundCluster(2, 2), &table, {})).find("does not fit in 64 bits"),
            std::string::npos);
  ClusterSpec cluster = RoundCluster(2, 2);
  cluster.issue_us = 1e12;
  EXPECT_FALSE(Simulate(Step("  %10: f32[1000] = aten.relu(%0) {fwd}\n  %11: f32[1000] = aten.relu(%0) {fwd}\n  %12: "
                             "f32[1000] = aten.relu(%0) {fwd}\n"
                             "  %13: f32[1000] = aten.relu(%0) {fwd}\n  %14: f32[1000] = aten.relu(%0) {fwd}\n  %15: "
                             "f32[1000] = aten.relu(%0) {fwd}\n"),
                        cluster, nullptr, {})
                   .ok());
}

TEST(Simulate, MemoryByStorage) {
  Program program = Step(kOverlap);
  Simulation s = Simulated(program, RoundCluster(2, 2));
  const MemoryCurve& m = s.memory;
  EXPECT_EQ(m.persistent_bytes, 2 * 4096);
  EXPECT_EQ(m.input_bytes, 4000);
  // The gather's buffer lives to its wait, the first relu to the second.
  EXPECT_EQ(m.at_op[0],
            (std::vector<int64_t>{8192 + 8192, 8192 + 8192 + 4000, 8192 + 8192 + 4000, 8192 + 4000 + 4000}));
  EXPECT_EQ(m.peak.bytes, 20384);
  EXPECT_EQ(m.peak.place, 1);
  EXPECT_EQ(m.holders[0].name, "%10 gather.start u0");
  int64_t sum = 0;
  for (const MemoryHolder& holder : m.holders) sum += holder.bytes;
  EXPECT_EQ(sum, m.peak.bytes);
}

TEST(Simulate, ProfileOfAnotherMachine) {
  Program program = Step(kOverlap);
  ProfileTable table;
  table.fingerprint = "a";
  EXPECT_EQ(ErrorOf(Simulate(program, RoundCluster(2, 2), &table, {.machine = "b"})),
            "the profile was measured on another machine ('a', here 'b'); measure here, or allow it with --foreign");
  Result<Simulation> s = Simulate(program, RoundCluster(2, 2), &table, {.machine = "b", .foreign = true});
  ASSERT_TRUE(s.ok());
  EXPECT_TRUE(s->foreign);
  EXPECT_NE(SimulationSummary(*s).find("ANOTHER MACHINE"), std::string::npos);
}

TEST(ArenaPicture, PlacesOfASmallStep) {
  Program program = Step(kOverlap);
  ClusterSpec cluster = RoundCluster(2, 2);
  Simulation accelerator = Simulated(program, cluster);
  EXPECT_EQ(ErrorOf(PictureOf(accelerator, accelerator.output.ranks[0])), "only CPUs have an arena");
  cluster.cpu = true;
  Simulation s = Simulated(program, cluster);
  const RankRecord& rank = s.output.ranks[0];
  Result<ArenaPicture> arena = PictureOf(s, rank);
  ASSERT_TRUE(arena.ok()) << ErrorOf(arena);
  EXPECT_EQ(arena->live_bytes, 8192 + 4000);
  EXPECT_EQ(arena->top_bytes, 8192 + 4032) << "rounded up to 64";
  ASSERT_EQ(arena->pieces.size(), 3u);
  const ArenaPiece &gathered = arena->pieces[0], &first = arena->pieces[1], &second = arena->pieces[2];
  EXPECT_EQ(gathered.name, "%10 gather.start u0");
  EXPECT_EQ(gathered.kind, MemoryKind::kGathered);
  EXPECT_EQ(first.name, "%11 aten.relu");
  EXPECT_EQ(first.kind, MemoryKind::kActivations);
  EXPECT_EQ(second.bytes, 4000);
  EXPECT_EQ((std::vector<int64_t>{gathered.first, gathered.last, first.first, first.last, second.first, second.last}),
            (std::vector<int64_t>{1, 3, 2, 4, 4, 4}))
      << "op i is in slot i + 1";
  EXPECT_EQ(gathered.start_ps, rank.start_ps[0]);
  EXPECT_EQ(gathered.end_ps, rank.end_ps[2]);
  EXPECT_EQ(first.end_ps, rank.end_ps[3]);
  Result<std::string> snapshot = SimulationSnapshot(s);
  ASSERT_TRUE(snapshot.ok()) << ErrorOf(snapshot);
  EXPECT_EQ(ErrorOf(CheckMemorySnapshot(*snapshot)), "no error");
  const Json json = *ParseJson(*snapshot);
  EXPECT_EQ(json.Find("segments")->items[0].Find("total_size")->number, static_cast<double>(arena->top_bytes));
}

TEST(SimulateText, OutputsAreWellFormed) {
  std::string program = Print(Step(kOverlap));
  Result<std::string> json = SimulateText(program, "h100-80gb-2", "", "json", {});
  ASSERT_TRUE(json.ok()) << ErrorOf(json);
  Result<Json> root = ParseJson(*json);
  ASSERT_TRUE(root.ok()) << ErrorOf(root);
  EXPECT_EQ(root->Find("cluster")->text, "h100-80gb-2");
  EXPECT_GE(root->Find("step_us")->number, root->Find("lower_bound_us")->number);
  double blame = 0;
  for (const Json& piece : root->Find("critical_path")->items) blame += piece.Find("us")->number;
  EXPECT_NEAR(blame, root->Find("step_us")->number, 1e-6);
  Result<std::string> trace = SimulateText(program, "h100-80gb-2", "", "trace", {.every_rank = true});
  ASSERT_TRUE(trace.ok()) << ErrorOf(trace);
  EXPECT_EQ(ErrorOf(CheckChromeTrace(*trace)), "no error");
  EXPECT_NE(trace->find("ncclDevKernel_AllGather"), std::string::npos);
  Result<std::string> snapshot = SimulateText(program, "h100-80gb-2", "", "snapshot", {});
  ASSERT_TRUE(snapshot.ok()) << ErrorOf(snapshot);
  EXPECT_EQ(ErrorOf(CheckMemorySnapshot(*snapshot)), "no error");
  EXPECT_TRUE(SimulateText(program, "h100-80gb-2", "", "summary", {}).ok());
  EXPECT_EQ(ErrorOf(SimulateText(program, "h100-80gb-1", "", "json", {})),
            "the program's mesh has 2 ranks, the cluster 'h100-80gb-1' has 1 device; take a larger cluster or a "
            "smaller mesh");
}

}  // namespace
}  // namespace interlace
