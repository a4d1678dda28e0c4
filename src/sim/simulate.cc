#include "sim/simulate.h"

#include <algorithm>
#include <map>

#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "sim/simulated_timeline.h"
#include "trace/chrome_trace.h"
#include "trace/memory_snapshot.h"

namespace interlace {
namespace {

// Time of sorted disjoint intervals `a` that no interval of `b` covers.
int64_t Uncovered(const std::vector<std::pair<int64_t, int64_t>>& a,
                  const std::vector<std::pair<int64_t, int64_t>>& b) {
  int64_t total = 0;
  size_t j = 0;
  for (auto [begin, end] : a) {
    int64_t at = begin;
    while (j > 0 && b[j - 1].second > begin) --j;  // one interval may touch two of a
    while (j < b.size() && b[j].second <= begin) ++j;
    for (size_t k = j; k < b.size() && b[k].first < end; ++k) {
      total += std::max<int64_t>(b[k].first - at, 0);
      at = std::max(at, b[k].second);
    }
    total += std::max<int64_t>(end - at, 0);
  }
  return total;
}

RankUse UseOf(const Lowered& program, const EngineOutput& output, size_t rank) {
  RankUse use;
  const RankRecord& r = output.ranks[rank];
  std::vector<std::pair<int64_t, int64_t>> busy;  // compute, neighbours joined
  for (size_t run = 0; run < program.run.size(); ++run) {
    const std::vector<LoweredOp>& ops = program.ops[program.run[run]];
    for (size_t i = 0; i < ops.size(); ++i) {
      int64_t start = r.start_ps[program.first[run] + i], end = r.end_ps[program.first[run] + i];
      use.end_ps = std::max(use.end_ps, end);
      if (end == start) continue;
      if (ops[i].kind != LoweredOp::Kind::kCompute) {
        use.blocked_ps += end - start;
        continue;
      }
      use.compute_ps += end - start;
      if (!busy.empty() && busy.back().second == start) {
        busy.back().second = end;
      } else {
        busy.emplace_back(start, end);
      }
    }
  }
  struct Used {
    LaneUse use;
    std::vector<std::pair<int64_t, int64_t>> intervals;
  };
  std::map<std::pair<Lane, std::string_view>, Used> lanes;  // and the axis that has lanes of its own
  const std::vector<const LoweredOp*> issued = IssuedOps(program, r);
  for (size_t i = 0; i < issued.size(); ++i) {
    const TransferRecord& t = output.transfers[r.transfers[i]];
    Used& lane = lanes[{issued[i]->lane, ActivationAxisOf(*program.program, program.program->op(issued[i]->op))}];
    ++lane.use.transfers;
    lane.use.bytes += program.costs[issued[i]->cost].bytes;
    lane.use.busy_ps += t.end_ps - t.start_ps;
    lane.intervals.emplace_back(t.start_ps, t.end_ps);
    use.end_ps = std::max(use.end_ps, t.end_ps);
  }
  for (auto& [key, lane] : lanes) {
    if (key.first == Lane::kCompute) continue;  // what moves nothing is on no lane of its own
    lane.use.lane = ShownLane(key.first, key.second);
    lane.use.exposed_ps = Uncovered(lane.intervals, busy);
    use.lanes.push_back(std::move(lane.use));
  }
  return use;
}

}  // namespace

std::string ShownLane(Lane lane, std::string_view axis) {
  std::string name(LaneName(lane));
  return axis.empty() ? name : name + " " + std::string(axis);
}

Result<Simulation> Simulate(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile,
                            const SimulateOptions& options) {
  Simulation s;
  s.cluster = cluster;
  if (profile != nullptr) {
    s.fingerprint = profile->fingerprint;
    INTERLACE_ASSIGN(s.foreign, IsOfAnotherMachine(*profile, options.machine, options.foreign));
  }
  INTERLACE_TRY(CheckWhatIf(options.what_if));
  ProfileTable changed;
  if (profile != nullptr && !options.what_if.plain()) {
    changed = *profile;
    profile = &changed;
  }
  ApplyToCluster(options.what_if, s.cluster, &changed);
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(program, s.cluster, profile));
  s.ranks = model.ranks();
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  INTERLACE_TRY(ApplyToCosts(options.what_if, lowered));
  s.lowered = std::make_unique<Lowered>(std::move(lowered));
  s.coverage = model.coverage();
  // Ranks that send to one another stand at different places at once.
  bool folded = !options.every_rank && s.lowered->peers.empty();
  for (auto [rank, factor] : options.slow) {
    if (rank < 0 || rank >= s.ranks)
      return MakeError("rank ", rank, " is to be slow, but the program's mesh has ", s.ranks, " ranks");
    if (!(factor >= 1 && factor <= 1000))
      return MakeError("rank ", rank, " cannot be ", factor, " times slower; give 1 to 1000");
    folded = folded && factor == 1;
  }
  int64_t simulated = folded ? 1 : s.ranks;
  if (simulated > kMaxInstances / std::max<int64_t>(s.lowered->instances(), 1)) {
    return MakeError("simulating ", simulated, " ranks of ", s.lowered->instances(),
                     " ops each is too much; fold equal ranks");
  }
  s.input.fold = folded ? model.ranks_per_node() : 1;
  s.input.programs.assign(static_cast<size_t>(simulated), s.lowered.get());
  s.input.compute_slow.assign(static_cast<size_t>(simulated), kOne);
  for (auto [rank, factor] : options.slow) {
    if (!folded) s.input.compute_slow[rank] = FixedPoint(factor);
  }
  INTERLACE_ASSIGN(s.output, RunEngine(s.input, model));
  for (size_t r = 0; r < s.input.programs.size(); ++r) s.use.push_back(UseOf(*s.lowered, s.output, r));
  s.bounds = LowerBounds(s.input, model);
  s.path = CriticalPath(s.input, s.output);
  INTERLACE_ASSIGN(s.memory, ComputeMemory(*s.lowered));
  s.memory.taken_bytes = TakenBytes(*s.lowered, s.memory.peak.bytes);
  return s;
}

Timeline SimulationTimeline(const Simulation& s) {
  Timeline out = SimulatedTimeline(s.cluster, s.ranks);
  for (size_t rank = 0; rank < s.output.ranks.size(); ++rank)
    AddRank(out, *s.lowered, s.memory, s.output, static_cast<int32_t>(rank));
  return out;
}

Result<ArenaPicture> PictureOf(const Simulation& s, const RankRecord& rank) {
  if (!s.cluster.cpu) return MakeError("only CPUs have an arena");
  return DrawArena(*s.lowered, rank.start_ps, rank.end_ps);
}

std::string SimulationTrace(const Simulation& simulation, int32_t rank) {
  return WriteChromeTrace(SimulationTimeline(simulation), rank);
}

Result<std::string> SimulationSnapshot(const Simulation& s) {
  std::vector<MemoryEvent> all;
  for (size_t r = 0; r < s.output.ranks.size(); ++r) {
    const RankRecord& at = s.output.ranks[r];
    const auto rank = static_cast<int32_t>(r);
    std::vector<MemoryEvent> events;
    if (Result<ArenaPicture> arena = PictureOf(s, at); arena.ok()) {
      INTERLACE_ASSIGN(events, ArenaEvents(*s.lowered, *arena, rank));
    } else {  // what an allocator would do
      INTERLACE_ASSIGN(events, MemoryEvents(*s.lowered, at.start_ps, at.end_ps, rank));
    }
    all.insert(all.end(), std::make_move_iterator(events.begin()), std::make_move_iterator(events.end()));
  }
  return WriteMemorySnapshot(all);
}

}  // namespace interlace
