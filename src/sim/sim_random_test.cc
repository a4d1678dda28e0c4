// Properties over random steps: bounds, equal bits, folding, memory against a count by hand, well-formed traces; and
// speed.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/testing/rounds.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/chakra_export.h"
#include "sim/measured.h"
#include "sim/memory_kinds.h"
#include "sim/simulate.h"
#include "sim/testing/random_step.h"
#include "trace/chrome_trace.h"
#include "trace/memory_snapshot.h"
#include "trace/testing/check_trace.h"

namespace interlace {
namespace {

// Machines of all kinds, with what slows down made strong.
ClusterSpec RandomCluster(std::mt19937& random, int64_t ranks) {
  auto pick = [&](uint32_t n) { return static_cast<double>(random() % n); };
  ClusterSpec c = RoundCluster(ranks, std::min<int64_t>(ranks, int64_t{1} << random() % 4));
  c.cpu = random() % 3 == 0;
  c.issue_us = c.cpu || random() % 2 == 0 ? 0 : pick(40);
  c.step.issue_backward = random() % 2 == 0 ? 1 : pick(9) / 4;
  c.shortest_us = pick(4);
  c.intra = {pick(20), 0.1 + pick(30) / 10, pick(3), pick(2) * 3};
  c.inter = {pick(60), 0.1 + pick(10) / 10, 0, 0};
  c.copy_us = pick(10);
  c.h2d_gb_per_s = 0.5 + pick(4);
  c.d2h_gb_per_s = 0.5 + pick(4);
  c.host_gb_per_s = 0.5 + pick(12);
  c.cores = 1 + pick(8);
  c.compute_threads = 1 + pick(3);
  c.comm_core_us_per_mb = pick(4000);
  c.coalesce = random() % 2 == 0;
  c.file_tier = c.cpu && random() % 2 == 0;
  if (c.file_tier) {
    c.file_read_gb_per_s = 0.5 + pick(4);
    c.file_write_gb_per_s = 0.5 + pick(4);
    c.tier_gb_per_s = pick(3) / 2;
  }
  if (random() % 2 == 0) {
    for (int i = 0; i < 28; ++i) c.interference_factors.push_back(1 + pick(300) / 100);
  }
  return c;
}

// What was measured of a few kinds of work that ran at the same time.
ProfileTable RandomPairs(std::mt19937& random) {
  static const char* kKinds[] = {"compute", "collective", "file_read", "file_write"};
  ProfileTable table;
  for (uint32_t pairs = random() % 4; pairs > 0; --pairs) {
    const size_t a = random() % 3, b = a + 1 + random() % (3 - a);
    auto factor = [&] { return 1 + static_cast<double>(random() % 200) / 100; };
    table.together[{kKinds[a], kKinds[b]}] = {factor(), factor()};
  }
  return table;
}

Result<Simulation> RandomSimulation(std::mt19937& random, const Program& program) {
  int64_t ranks = program.mesh[0].size;
  ClusterSpec cluster = RandomCluster(random, ranks);
  SimulateOptions options;
  options.every_rank = random() % 8 == 0;
  if (random() % 8 == 0) options.slow.emplace_back(random() % ranks, 1 + static_cast<double>(random() % 30) / 10);
  if (random() % 4 == 0) {  // a changed machine obeys the same rules
    WhatIf& w = options.what_if;
    for (double* factor : {&w.compute, &w.links, &w.latency, &w.copies, &w.launches})
      *factor = static_cast<double>(random() % 5) / 2;
    w.interference = random() % 2 == 0;
    if (w.compute == 0) w.compute = 0.5;  // the bounds say something only of a step that takes time
  }
  const ProfileTable pairs = RandomPairs(random);
  return Simulate(program, cluster, &pairs, options);
}

TEST(RandomSteps, AreWellFormed) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    Program program = RandomStep(random);
    std::string text = Print(program);
    Result<Program> back = Parse(text);
    ASSERT_TRUE(back.ok()) << ErrorOf(back) << "\n" << text;
    ASSERT_EQ(Print(*back), text);
    Status valid = Verify(*back);
    ASSERT_TRUE(valid.ok()) << ErrorOf(valid);
  }
}

TEST(RandomSteps, NeverBelowTheLowerBound) {
  std::mt19937 random(2);
  int64_t tight = 0;
  const int rounds = Rounds(1500);
  for (int i = 0; i < rounds; ++i) {
    Program program = RandomStep(random);
    Result<Simulation> s = RandomSimulation(random, program);
    ASSERT_TRUE(s.ok()) << ErrorOf(s) << "\n" << Print(program);
    for (const Bound& bound : s->bounds) {
      ASSERT_GE(s->makespan_ps(), bound.time_ps) << bound.name << ", program " << i << "\n" << Print(program);
    }
    ASSERT_GT(s->lower_bound_ps(), 0) << i;
    tight += s->makespan_ps() < s->lower_bound_ps() * 3 / 2;
    // The critical path covers the step without gaps.
    int64_t at = 0;
    for (const PathPiece& piece : s->path) {
      ASSERT_EQ(piece.start_ps, at) << i << "\n" << Print(program);
      at = piece.end_ps;
    }
    ASSERT_EQ(at, s->makespan_ps()) << i << "\n" << Print(program);
  }
  EXPECT_GT(tight, rounds / 5) << "a bound that is never near says nothing";
}

TEST(RandomSteps, TheSameBitsEachTime) {
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    Program program = RandomStep(random);
    std::mt19937 again = random;
    std::string first = SimulationJson(*RandomSimulation(random, program));
    EXPECT_EQ(first, SimulationJson(*RandomSimulation(again, program)));
  }
}

TEST(RandomSteps, FoldedIsAllRanks) {
  std::mt19937 random(4);
  for (int i = 0; i < Rounds(220); ++i) {
    Program program = RandomStep(random);
    ClusterSpec cluster = RandomCluster(random, program.mesh[0].size);
    const ProfileTable pairs = RandomPairs(random);
    Result<Simulation> one = Simulate(program, cluster, &pairs, {});
    Result<Simulation> all = Simulate(program, cluster, &pairs, {.every_rank = true});
    ASSERT_TRUE(one.ok() && all.ok());
    EXPECT_EQ(one->makespan_ps(), all->makespan_ps()) << i << "\n" << Print(program);
    EXPECT_EQ(one->lower_bound_ps(), all->lower_bound_ps());
    EXPECT_EQ(one->output.ranks[0].end_ps, all->output.ranks.back().end_ps);
  }
}

// docs/ir.md, read again: a storage lives from the op that defines its root (a take: from the start) to the last op
// that touches any value of that root, or its release; a start's sources live to its wait. Every storage is followed by
// itself.
std::vector<int64_t> CountByHand(const Program& program, const Phase& phase) {
  std::vector<int64_t> bytes(phase.ops.size());
  auto touches = [&](const Op& op, ValueId root) {
    bool found = false;
    ForEachOperand(op, [&](ValueId id) { found = found || program.RootOf(id) == root; });
    for (ValueId id : op.results) found = found || (id != kNone && program.RootOf(id) == root);
    for (ValueId id : op.writes) found = found || program.RootOf(id) == root;
    return found;
  };
  for (ValueId root = 0; root < program.num_values(); ++root) {
    if (!program.HasValue(root) || program.RootOf(root) != root) continue;
    int64_t size = *program.StorageBytes(program.value(root).type);
    if (program.value(root).kind == ValueKind::kState) {
      for (int64_t& sum : bytes) sum += size;
    }
    bool taken = std::find(phase.takes.begin(), phase.takes.end(), root) != phase.takes.end();
    bool defined = false;
    int64_t first = -1, last = -1, released = -1;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      const Op& op = program.op(phase.ops[i]);
      if (std::find(op.results.begin(), op.results.end(), root) != op.results.end())
        defined = true, first = static_cast<int64_t>(i);
      if (touches(op, root)) last = std::max(last, static_cast<int64_t>(i));
      if (op.name == "release" && touches(op, root)) released = static_cast<int64_t>(i);
      // A source lives until the wait for any of the results.
      if (!op.name.ends_with(".start") || !touches(op, root)) continue;
      for (ValueId result : op.results) {
        int64_t waited = static_cast<int64_t>(phase.ops.size());
        for (size_t j = i + 1; j < phase.ops.size() && waited == static_cast<int64_t>(phase.ops.size()); ++j) {
          const Op& wait = program.op(phase.ops[j]);
          if (!wait.name.ends_with(".wait")) continue;
          ForEachOperand(wait, [&](ValueId id) {
            if (id == result) waited = static_cast<int64_t>(j);
          });
        }
        if (program.RootOf(result) != root) last = std::max(last, waited);
      }
    }
    for (ValueId id : phase.gives) {
      if (program.RootOf(id) == root) last = static_cast<int64_t>(phase.ops.size());
    }
    if (!taken && !defined) continue;
    if (released >= 0) last = std::min(last, released);
    if (last < 0) last = 0;  // taken and never touched
    bool out = false;        // after its offload.wait, before its reload.start
    for (int64_t at = 0; at < static_cast<int64_t>(phase.ops.size()); ++at) {
      const Op& op = program.op(phase.ops[at]);
      if (op.name == "reload.start" && touches(op, root)) out = false;
      if (first <= at && at <= last && !out) bytes[at] += size;
      if (op.name == "offload.wait" && touches(op, root)) out = true;
    }
  }
  return bytes;
}

TEST(RandomSteps, MemoryIsABruteForceCount) {
  std::mt19937 random(5);
  for (int i = 0; i < Rounds(300); ++i) {
    Program program = RandomStep(random);
    Result<Simulation> s = Simulate(program, RoundCluster(64, 8), nullptr, {});
    ASSERT_TRUE(s.ok()) << ErrorOf(s);
    int64_t peak = 0;
    for (size_t p = 0; p < s->lowered->phases.size(); ++p) {
      const Phase& phase = *s->lowered->phases[p];
      const std::vector<int64_t> want = CountByHand(program, phase);
      for (size_t place = 0; place < phase.ops.size(); ++place) {
        ASSERT_EQ(s->memory.at_op[p][place], want[place]) << i << " " << phase.name << " " << place << "\n"
                                                          << Print(program);
        peak = std::max(peak, want[place]);
      }
    }
    EXPECT_EQ(s->memory.peak.bytes, peak);
    int64_t held = 0;
    for (const MemoryHolder& holder : s->memory.holders) held += holder.bytes;
    EXPECT_EQ(held, peak) << i << "\n" << Print(program);
    Result<MemoryKinds> kinds = ComputeMemoryKinds(*s->lowered, s->memory);
    ASSERT_TRUE(kinds.ok()) << ErrorOf(kinds);
    for (size_t p = 0; p < kinds->at_op.size(); ++p) {
      for (size_t place = 0; place < kinds->at_op[p].size(); ++place) {
        int64_t sum = 0;
        for (int64_t bytes : kinds->at_op[p][place]) sum += bytes;
        ASSERT_EQ(sum, s->memory.at_op[p][place]) << i << " " << p << " " << place << "\n" << Print(program);
      }
    }
    held = 0;
    for (const KindHolder& holder : kinds->at_peak) held += holder.bytes;
    EXPECT_EQ(held, peak) << i << "\n" << Print(program);
  }
}

// What a recorder would have written down of a simulated step.
MeasuredRank RecordOf(const Simulation& s, const RankRecord& r) {
  MeasuredRank out;
  for (int64_t i = 0; i < s.lowered->instances(); ++i) {
    size_t run = 0;
    const LoweredOp& op = s.lowered->At(i, run);
    if (op.kind == LoweredOp::Kind::kFree) continue;
    const auto number = static_cast<int32_t>(run);
    out.ops.push_back({number, op.op, r.start_ps[i] / 1000, r.end_ps[i] / 1000});
    if (op.kind != LoweredOp::Kind::kStart) continue;
    const TransferRecord& t = s.output.transfers[r.transfer_of[i]];
    out.transfers.push_back({number, op.op, t.start_ps / 1000, t.end_ps / 1000});
  }
  return out;
}

TEST(RandomSteps, AStepThatIsRecordedIsTheStepThatRan) {
  std::mt19937 random(7);
  for (int i = 0; i < 30; ++i) {
    Program program = RandomStep(random);
    Result<ClusterSpec> cluster = LoadCluster("local-" + std::to_string(program.mesh[0].size), "here");
    Result<Simulation> s = Simulate(program, *cluster, nullptr, {.slow = {{0, 1.5}}});
    ASSERT_TRUE(s.ok()) << ErrorOf(s);
    std::vector<MeasuredRank> records;
    for (const RankRecord& r : s->output.ranks) records.push_back(RecordOf(*s, r));
    Result<Simulation> measured = Measured(program, records);
    ASSERT_TRUE(measured.ok()) << ErrorOf(measured) << "\n" << Print(program);
    for (size_t r = 0; r < records.size(); ++r) {
      MeasuredRank again = RecordOf(*measured, measured->output.ranks[r]);
      ASSERT_EQ(again.ops.size(), records[r].ops.size());
      for (size_t k = 0; k < again.ops.size(); ++k) {
        ASSERT_EQ(again.ops[k].begin_ns, records[r].ops[k].begin_ns) << i << "\n" << Print(program);
        ASSERT_EQ(again.ops[k].end_ns, records[r].ops[k].end_ns);
      }
      for (size_t k = 0; k < again.transfers.size(); ++k)
        ASSERT_EQ(again.transfers[k].end_ns, records[r].transfers[k].end_ns) << i << "\n" << Print(program);
      EXPECT_EQ(SimulationChakra(*measured, static_cast<int32_t>(r)).empty(), false);
    }
    Result<std::string> a = SimulationSnapshot(*s), b = SimulationSnapshot(*measured);
    ASSERT_TRUE(a.ok() && b.ok()) << ErrorOf(a) << ErrorOf(b);
    EXPECT_EQ(ErrorOf(CheckMemorySnapshot(*b)), "no error");
  }
}

TEST(Measured, WhatIsNotOfTheProgramIsNamed) {
  std::mt19937 random(8);
  Program program = RandomStep(random);
  const auto ranks = static_cast<size_t>(program.mesh[0].size);
  const OpId first = program.phases[0].ops[0];
  auto error = [&](MeasuredTime time) {
    std::vector<MeasuredRank> records(ranks);
    records.back().ops.push_back(time);
    return ErrorOf(Measured(program, records));
  };
  EXPECT_EQ(error({0, first, 5, 9}), "no error");
  EXPECT_NE(error({0, first, 9, 5}).find("was recorded from 9 to 5 ns"), std::string::npos);
  EXPECT_NE(error({0, first, -1, 5}).find("was recorded from -1"), std::string::npos);
  EXPECT_NE(error({0, first, 1, INT64_MAX}).find("was recorded from 1"), std::string::npos);
  for (MeasuredTime time :
       std::vector<MeasuredTime>{{0, -1, 1, 2}, {0, 1 << 30, 1, 2}, {-1, first, 1, 2}, {1 << 30, first, 1, 2}}) {
    EXPECT_NE(error(time).find("where the program does not have it"), std::string::npos);
  }
  EXPECT_NE(ErrorOf(Measured(program, {})).find("rank"), std::string::npos);
}

TEST(RandomSteps, TracesHold) {
  std::mt19937 random(6);
  int moving = 0;
  for (int i = 0; i < 100; ++i) {
    Program program = RandomStep(random);
    Result<Simulation> s = RandomSimulation(random, program);
    ASSERT_TRUE(s.ok());
    ASSERT_EQ(ErrorOf(CheckChromeTrace(SimulationTrace(*s))), "no error") << Print(program);
    Result<std::string> snapshot = SimulationSnapshot(*s);
    ASSERT_TRUE(snapshot.ok()) << ErrorOf(snapshot) << Print(program);
    ASSERT_EQ(ErrorOf(CheckMemorySnapshot(*snapshot)), "no error") << Print(program);
    Result<ArenaPicture> arena = PictureOf(*s, s->output.ranks[0]);
    bool moves = false;
    for (const Phase& phase : program.phases) {
      for (OpId id : phase.ops) moves = moves || MoveOf(program.op(id)) != nullptr;
    }
    moving += moves;
    ASSERT_EQ(ErrorOf(arena), !s->cluster.cpu ? "only CPUs have an arena"
                              : moves         ? "a program that moves storages has no arena"
                                              : "no error");
    if (!arena.ok()) continue;
    std::map<int64_t, int64_t> change;  // by slot
    for (const ArenaPiece& piece : arena->pieces) {
      ASSERT_LE(piece.start_ps, piece.end_ps) << piece.name << "\n" << Print(program);
      ASSERT_LE(piece.offset + piece.bytes, arena->top_bytes);
      change[piece.first] += piece.bytes;
      change[piece.last + 1] -= piece.bytes;
    }
    int64_t live = 0, most = 0;
    for (const auto& [slot, bytes] : change) most = std::max(most, live += bytes);
    EXPECT_EQ(most, arena->live_bytes) << Print(program);
  }
  EXPECT_GT(moving, 0);
}

}  // namespace
}  // namespace interlace
