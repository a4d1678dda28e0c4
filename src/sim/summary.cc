// The results of a simulation in words and as JSON.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "ir/text.h"
#include "sim/simulate.h"
#include "sim/words.h"
#include "trace/json.h"

namespace interlace {

std::string TimeInWords(int64_t ps) {
  static constexpr std::pair<double, const char*> kUnits[] = {{1e12, "s"}, {1e9, "ms"}, {1e6, "us"}};
  double value = static_cast<double>(ps);
  for (auto [size, unit] : kUnits) {
    if (value < size && size > 1e6) continue;
    char buffer[48];
    std::snprintf(buffer, sizeof buffer,
                  value / size < 10    ? "%.2f %s"
                  : value / size < 100 ? "%.1f %s"
                                       : "%.0f %s",
                  value / size, unit);
    return buffer;
  }
  return "";
}

std::string BytesInWords(int64_t bytes) {
  static constexpr std::pair<double, const char*> kUnits[] = {
      {1ll << 30, "GiB"}, {1ll << 20, "MiB"}, {1ll << 10, "KiB"}, {1, "B"}};
  double value = static_cast<double>(bytes);
  for (auto [size, unit] : kUnits) {
    if (value < size && size > 1) continue;
    char buffer[48];
    std::snprintf(buffer, sizeof buffer, size == 1 ? "%.0f %s" : "%.2f %s", value / size, unit);
    return buffer;
  }
  return "";
}

namespace {

// The busiest rank: the one that ends last.
size_t LastRank(const Simulation& s) {
  size_t last = 0;
  for (size_t r = 1; r < s.use.size(); ++r) {
    if (s.use[r].end_ps > s.use[last].end_ps) last = r;
  }
  return last;
}

}  // namespace

double Simulation::error() const {
  if (measured || makespan_ps() <= 0 || (cluster.cpu && coverage.measured < coverage.ops)) return 0;
  if (!(cluster.step.error > 0)) return 0;
  int64_t exposed = 0;
  const RankUse& last = use[LastRank(*this)];
  for (const LaneUse& lane : last.lanes) exposed = std::max(exposed, lane.exposed_ps);
  const double link = ranks > cluster.per_node ? cluster.inter.error : cluster.intra.error;
  const double share = static_cast<double>(exposed) / static_cast<double>(makespan_ps());
  return std::hypot(cluster.step.error, std::min(share, 1.0) * link);
}

std::string SimulationJson(const Simulation& s) {
  const Lowered& lowered = *s.lowered;
  const Program& program = *lowered.program;
  JsonWriter w;
  w.BeginObject().Field("cluster", s.cluster.name).Field("ranks", s.ranks);
  w.Field("simulated_ranks", static_cast<int64_t>(s.input.programs.size()));
  w.Key("profile").BeginObject().Field("fingerprint", s.fingerprint).Field("foreign", s.foreign);
  w.Field("op_kinds", s.coverage.ops).Field("measured_op_kinds", s.coverage.measured).EndObject();
  w.Field("step_us", Microseconds(s.makespan_ps())).Field("lower_bound_us", Microseconds(s.lower_bound_ps()));
  if (const double error = s.error(); error > 0) {  // 80 % of steps lie between
    const double step = Microseconds(s.makespan_ps()), spread = std::exp(kOneInTen * error);
    w.Field("stack", s.cluster.stack).Field("error", error).Field("low_us", step / spread);
    w.Field("high_us", step * spread);
  }
  double bound = Microseconds(s.lower_bound_ps());
  w.Field("gap", bound > 0 ? Microseconds(s.makespan_ps()) / bound - 1 : 0.0);
  w.Key("bounds").BeginArray();
  for (const Bound& b : s.bounds)
    w.BeginObject().Field("name", b.name).Field("us", Microseconds(b.time_ps)).EndObject();
  w.EndArray().Key("per_rank").BeginArray();
  for (const RankUse& use : s.use) {
    w.BeginObject()
        .Field("end_us", Microseconds(use.end_ps))
        .Field("compute_us", Microseconds(use.compute_ps))
        .Field("blocked_us", Microseconds(use.blocked_ps));
    w.Key("lanes").BeginArray();
    for (const LaneUse& lane : use.lanes) {
      w.BeginObject().Field("lane", lane.lane).Field("transfers", lane.transfers).Field("bytes", lane.bytes);
      w.Field("busy_us", Microseconds(lane.busy_ps)).Field("exposed_us", Microseconds(lane.exposed_ps)).EndObject();
    }
    w.EndArray().EndObject();
  }
  w.EndArray().Key("critical_path").BeginArray();
  for (const Blame& b : BlameModules(s.input, s.path)) {
    w.BeginObject()
        .Field("module", b.module)
        .Field("lane", b.lane)
        .Field("us", Microseconds(b.time_ps))
        .Field("slowed_us", Microseconds(b.slowed_ps))
        .EndObject();
  }
  w.EndArray();
  const MemoryCurve& m = s.memory;
  w.Key("memory").BeginObject().Field("peak_bytes", m.peak.bytes).Field("taken_bytes", m.taken_bytes);
  w.Field("persistent_bytes", m.persistent_bytes).Field("input_bytes", m.input_bytes);
  w.Field("limit_bytes", s.cluster.MemoryLimitBytes());
  w.Field("fits", m.taken_bytes <= s.cluster.MemoryLimitBytes()).Key("top_ops").BeginArray();
  for (const MemoryPeak& peak : m.top) {
    const Op& op = program.op(peak.op);
    w.BeginObject().Field("bytes", peak.bytes).Field("phase", lowered.phases[lowered.run[peak.run_index]]->name);
    w.Field("place", peak.place).Field("op", op.name).Field("module", ModuleOf(program, op)).EndObject();
  }
  w.EndArray().Key("holders").BeginArray();
  for (size_t i = 0; i < std::min<size_t>(m.holders.size(), 20); ++i) {
    w.BeginObject()
        .Field("name", m.holders[i].name)
        .Field("module", m.holders[i].module)
        .Field("bytes", m.holders[i].bytes)
        .EndObject();
  }
  w.EndArray().EndObject().Field("events", s.output.events).EndObject();
  return w.Take() + "\n";
}

void AddTimes(std::string& out, const CostModel::Coverage& coverage, const std::string& fingerprint, bool foreign) {
  const auto kinds = static_cast<long long>(coverage.ops);
  if (fingerprint.empty()) return AddLine(out, "times: estimated, no profile (%lld kinds of op)", kinds);
  AddLine(out, "times: %lld of %lld kinds of op measured, profile of %s%s", static_cast<long long>(coverage.measured),
          kinds, fingerprint.c_str(), foreign ? " (ANOTHER MACHINE)" : "");
}

std::string SimulationSummary(const Simulation& s) {
  const Lowered& lowered = *s.lowered;
  const Program& program = *lowered.program;
  std::string out;
  AddLine(out, "%lld %s on %s%s", static_cast<long long>(s.ranks), s.ranks == 1 ? "rank" : "ranks",
          s.cluster.name.c_str(), s.input.programs.size() == 1 && s.ranks > 1 ? " (alike, one simulated)" : "");
  AddTimes(out, s.coverage, s.fingerprint, s.foreign);
  const Bound& bound = s.bounds.front();
  std::string within;
  if (const double error = s.error(); error > 0) {
    const double spread = std::exp(kOneInTen * error), step = static_cast<double>(s.makespan_ps());
    within = ", between " + TimeInWords(static_cast<int64_t>(step / spread)) + " and " +
             TimeInWords(static_cast<int64_t>(step * spread)) + " in 80 of 100 cases (stack " + s.cluster.stack + ")";
  }
  AddLine(out, "step          %s%s", TimeInWords(s.makespan_ps()).c_str(), within.c_str());
  AddLine(out, "lower bound   %s (%s), gap %.1f %%", TimeInWords(bound.time_ps).c_str(),
          std::string(bound.name).c_str(), bound.time_ps > 0 ? Percent(s.makespan_ps(), bound.time_ps) - 100 : 0.0);
  size_t last = LastRank(s);
  const RankUse& use = s.use[last];
  if (s.use.size() > 1) AddLine(out, "the last rank to end is %zu:", last);
  AddLine(out, "compute       %s (%.1f %%), held by waits %s", TimeInWords(use.compute_ps).c_str(),
          Percent(use.compute_ps, s.makespan_ps()), TimeInWords(use.blocked_ps).c_str());
  for (const LaneUse& lane : use.lanes) {
    AddLine(out, "%-13s %s busy, %s exposed, %lld transfers, %s", lane.lane.c_str(), TimeInWords(lane.busy_ps).c_str(),
            TimeInWords(lane.exposed_ps).c_str(), static_cast<long long>(lane.transfers),
            BytesInWords(lane.bytes).c_str());
  }
  out += "critical path, by module:\n";
  std::vector<Blame> blame = BlameModules(s.input, s.path);
  for (size_t i = 0; i < std::min<size_t>(blame.size(), 10); ++i) {
    const Blame& b = blame[i];
    AddLine(out, "  %5.1f %%  %-10s %-12s %s%s", Percent(b.time_ps, s.makespan_ps()), TimeInWords(b.time_ps).c_str(),
            b.lane.c_str(), ModuleInWords(b.module).c_str(),
            b.slowed_ps > 0 ? (" (" + TimeInWords(b.slowed_ps) + " of it by sharing)").c_str() : "");
  }
  const MemoryCurve& m = s.memory;
  int64_t limit = s.cluster.MemoryLimitBytes();
  const std::string placed = m.taken_bytes > m.peak.bytes ? ", in its places " + BytesInWords(m.taken_bytes) + "," : "";
  AddLine(out, "memory        peak %s%s of %s%s; %s persistent; inputs %s apart", BytesInWords(m.peak.bytes).c_str(),
          placed.c_str(), BytesInWords(limit).c_str(), m.taken_bytes > limit ? " (DOES NOT FIT)" : "",
          BytesInWords(m.persistent_bytes).c_str(), BytesInWords(m.input_bytes).c_str());
  if (m.peak.place >= 0) {
    const Op& op = program.op(m.peak.op);
    AddLine(out, "  at %s in %s, %s", op.name.c_str(), ModuleInWords(ModuleOf(program, op)).c_str(),
            lowered.phases[lowered.run[m.peak.run_index]]->name.c_str());
  }
  for (size_t i = 0; i < std::min<size_t>(m.holders.size(), 8); ++i) {
    AddLine(out, "  %-12s %s%s", BytesInWords(m.holders[i].bytes).c_str(), m.holders[i].name.c_str(),
            m.holders[i].module.empty() ? "" : (" in " + m.holders[i].module).c_str());
  }
  return out;
}

}  // namespace interlace
