// The results of a simulated set in words and as JSON.
#include <algorithm>
#include <array>
#include <map>

#include "sim/simulate_set.h"
#include "sim/words.h"
#include "trace/json.h"

namespace interlace {
namespace {

struct Cause {
  const char* name;
  int64_t StageUse::*time;
};
constexpr std::array<Cause, 6> kCauses = {{{"before", &StageUse::before_ps},
                                           {"behind", &StageUse::behind_ps},
                                           {"fill", &StageUse::fill_ps},
                                           {"drain", &StageUse::drain_ps},
                                           {"transfers", &StageUse::transfers_ps},
                                           {"launch", &StageUse::launch_ps}}};

// Time on the critical path by stage and lane ("compute bwd", "p2p", "launch"), largest first.
struct PathShare {
  int32_t stage = 0;
  std::string lane;
  int64_t time_ps = 0;
};

std::vector<PathShare> SharesOf(const SetSimulation& s) {
  static constexpr const char* kParts[] = {"compute", "compute fwd", "compute bwd", "compute upd"};
  std::map<std::pair<int32_t, std::string>, int64_t> sums;
  for (const PathPiece& piece : s.path) {
    const Program& program = *s.input.programs[static_cast<size_t>(piece.rank)]->program;
    std::string lane(LaneName(piece.lane));
    if (piece.lane == Lane::kCompute) lane = kParts[static_cast<size_t>(program.op(piece.op).part)];
    if (piece.kind == PathPiece::Kind::kLaunch) lane = "launch";
    sums[{s.stage_of[static_cast<size_t>(piece.rank)], lane}] += piece.end_ps - piece.start_ps;
  }
  std::vector<PathShare> out;
  for (const auto& [of, time] : sums) out.push_back({of.first, of.second, time});
  std::sort(out.begin(), out.end(), [](const PathShare& a, const PathShare& b) {
    if (a.time_ps != b.time_ps) return a.time_ps > b.time_ps;
    return a.stage != b.stage ? a.stage < b.stage : a.lane < b.lane;
  });
  return out;
}

}  // namespace

std::string SetSimulationJson(const SetSimulation& s) {
  JsonWriter w;
  w.BeginObject().Field("cluster", s.cluster.name).Field("ranks", s.ranks);
  w.Field("simulated_ranks", static_cast<int64_t>(s.input.programs.size()));
  w.Key("profile").BeginObject().Field("fingerprint", s.fingerprint).Field("foreign", s.foreign);
  w.Field("op_kinds", s.coverage.ops).Field("measured_op_kinds", s.coverage.measured).EndObject();
  w.Field("step_us", Microseconds(s.makespan_ps())).Key("stages").BeginArray();
  for (size_t stage = 0; stage < s.stages.size(); ++stage) {
    const StageUse& use = s.use[stage];
    const MemoryCurve& memory = s.memory[stage];
    w.BeginObject().Field("file", s.files[stage]).Field("compute_us", Microseconds(use.compute_ps));
    w.Field("optimizer_us", Microseconds(use.optimizer_ps)).Key("bubble_us").BeginObject();
    for (const Cause& cause : kCauses) w.Field(cause.name, Microseconds(use.*cause.time));
    w.EndObject().Field("bubble", Percent(use.Bubble(), s.makespan_ps()) / 100);
    w.Field("peak_bytes", memory.peak.bytes).Field("taken_bytes", memory.taken_bytes);
    w.Field("persistent_bytes", memory.persistent_bytes);
    w.Field("input_bytes", memory.input_bytes).Field("fits", memory.taken_bytes <= s.cluster.MemoryLimitBytes());
    w.EndObject();
  }
  w.EndArray().Field("limit_bytes", s.cluster.MemoryLimitBytes()).Key("critical_path").BeginArray();
  for (const PathShare& share : SharesOf(s)) {
    w.BeginObject().Field("stage", static_cast<int64_t>(share.stage)).Field("lane", share.lane);
    w.Field("us", Microseconds(share.time_ps)).EndObject();
  }
  w.EndArray().Key("modules").BeginArray();  // of the critical path
  for (const Blame& b : BlameModules(s.input, s.path)) {
    w.BeginObject().Field("module", b.module).Field("lane", b.lane).Field("us", Microseconds(b.time_ps));
    w.Field("slowed_us", Microseconds(b.slowed_ps)).EndObject();
  }
  w.EndArray().Field("events", s.output.events).EndObject();
  return w.Take() + "\n";
}

std::string SetSimulationSummary(const SetSimulation& s) {
  std::string out;
  const size_t simulated = s.input.programs.size();
  AddLine(out, "%zu stages on %lld ranks of %s%s", s.stages.size(), static_cast<long long>(s.ranks),
          s.cluster.name.c_str(), static_cast<int64_t>(simulated) < s.ranks ? " (one rank of each simulated)" : "");
  AddTimes(out, s.coverage, s.fingerprint, s.foreign);
  int64_t idle = 0;
  for (const StageUse& use : s.use) idle += use.Bubble();
  AddLine(out, "step          %s, %.1f %% of it bubbles", TimeInWords(s.makespan_ps()).c_str(),
          Percent(idle, s.makespan_ps()) / static_cast<double>(s.stages.size()));
  out += "stage  compute optimizer  before  behind    fill   drain transfers  launch   peak memory\n";
  const int64_t limit = s.cluster.MemoryLimitBytes();
  for (size_t stage = 0; stage < s.stages.size(); ++stage) {
    const StageUse& use = s.use[stage];
    const auto share = [&](int64_t time) { return Percent(time, s.makespan_ps()); };
    const int64_t peak = s.memory[stage].taken_bytes;
    AddLine(out, "%5zu %6.1f %% %7.1f %% %5.1f %% %5.1f %% %5.1f %% %5.1f %% %7.1f %% %5.1f %%   %s%s", stage,
            share(use.compute_ps), share(use.optimizer_ps), share(use.before_ps), share(use.behind_ps),
            share(use.fill_ps), share(use.drain_ps), share(use.transfers_ps), share(use.launch_ps),
            BytesInWords(peak).c_str(), peak > limit ? " (DOES NOT FIT)" : "");
  }
  out += "critical path, by stage:\n";
  const std::vector<PathShare> shares = SharesOf(s);
  for (size_t i = 0; i < std::min<size_t>(shares.size(), 10); ++i) {
    AddLine(out, "  %5.1f %%  %-10s stage %-3d %s", Percent(shares[i].time_ps, s.makespan_ps()),
            TimeInWords(shares[i].time_ps).c_str(), shares[i].stage, shares[i].lane.c_str());
  }
  return out;
}

}  // namespace interlace
