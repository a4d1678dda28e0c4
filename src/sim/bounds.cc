#include "sim/bounds.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/sort.h"
#include "ir/residency.h"

namespace interlace {
namespace {

int64_t Sum(int64_t a, int64_t b) {
  return a > kLatest - b ? kLatest : a + b;
}
// A real factor below one, rounded so that the product is not above the true one.
int64_t Share(int64_t time, double factor) {
  double scaled = static_cast<double>(time) * factor * (1 - 1e-12);
  return scaled < static_cast<double>(kLatest) ? static_cast<int64_t>(scaled) : kLatest;
}

// A share as the engine counts it: in fixed point, rounded down.
double AsCounted(double share) {
  return std::floor(share * static_cast<double>(kOne)) / static_cast<double>(kOne);
}

struct Totals {
  int64_t compute = 0, launches = 0;
  std::array<int64_t, kLaneCount> lanes{};
  int64_t send[2] = {0, 0}, receive[2] = {0, 0};             // within a node, between nodes
  int64_t copies[2] = {0, 0}, files[2] = {0, 0}, steps = 0;  // to the device, from it
  double core_time = 0;
};

Totals TotalsOf(const Lowered& program, int64_t slow, const ClusterSpec& cluster) {
  const std::array<int64_t, 2> issue = IssuePs(cluster);
  std::vector<Totals> by_phase(program.ops.size());
  for (size_t p = 0; p < program.ops.size(); ++p) {
    Totals& t = by_phase[p];
    for (const LoweredOp& op : program.ops[p]) {
      t.launches = Sum(t.launches, issue[op.backward]);
      if (op.kind == LoweredOp::Kind::kCompute) {
        int64_t work = Stretch(op.work_ps, slow);
        t.compute = Sum(t.compute, work);
        t.core_time += static_cast<double>(work) * cluster.compute_threads;
      } else if (op.kind == LoweredOp::Kind::kStart) {
        const OpCost& c = program.costs[op.cost];
        int64_t& lane = t.lanes[static_cast<size_t>(op.lane)];
        // On a CPU the latency of a queued transfer passes while it waits for its lane. Messages of two directions do
        // not wait for one another.
        if (!op.IsMessage()) lane = Sum(lane, cluster.cpu ? c.work_ps : Sum(c.latency_ps, c.work_ps));
        int level = c.resource == Resource::kInterLink;
        if (c.resource == Resource::kIntraLink || c.resource == Resource::kInterLink) {
          if (c.sends) t.send[level] = Sum(t.send[level], c.work_ps);
          if (c.receives) t.receive[level] = Sum(t.receive[level], c.work_ps);
        }
        if (c.resource == Resource::kHostToDevice) t.copies[0] = Sum(t.copies[0], c.work_ps);
        if (c.resource == Resource::kDeviceToHost) t.copies[1] = Sum(t.copies[1], c.work_ps);
        if (c.resource == Resource::kHostMemory) t.steps = Sum(t.steps, c.work_ps);
        if (c.resource == Resource::kFile)
          t.files[c.sends] = Sum(t.files[c.sends], Share(c.work_ps, AsCounted(c.store_share)));
        t.core_time += static_cast<double>(c.work_ps) * AsCounted(c.core_share);
      }
    }
  }
  Totals all;
  auto add = [](int64_t& to, int64_t from) { to = Sum(to, from); };
  for (int32_t phase : program.run) {
    const Totals& t = by_phase[phase];
    add(all.compute, t.compute);
    add(all.launches, t.launches);
    for (size_t i = 0; i < all.lanes.size(); ++i) add(all.lanes[i], t.lanes[i]);
    for (int i = 0; i < 2; ++i)
      add(all.send[i], t.send[i]), add(all.receive[i], t.receive[i]), add(all.copies[i], t.copies[i]),
          add(all.files[i], t.files[i]);
    add(all.steps, t.steps);
    all.core_time += t.core_time;
  }
  all.launches -= std::min(all.launches, std::max(issue[0], issue[1]));  // nothing waits for the last op's
  return all;
}

// Longest chain at full rate: an op begins after the last writers of the storages it reads; what a transfer writes
// counts from its end, for those that come after its wait.
int64_t DependencyPath(const Lowered& lowered, int64_t slow) {
  constexpr int64_t kMostOps = 4'000'000;  // a bound over part of a long step is still a bound
  const Program& program = *lowered.program;
  std::vector<int64_t> root_ready(program.num_values(), 0), landing(program.num_values(), 0);
  int64_t longest = 0, seen = 0;
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    const Phase& phase = *lowered.phases[lowered.run[run]];
    for (const LoweredOp& op : lowered.ops[lowered.run[run]]) {
      const Op& source = program.op(op.op);
      if (op.kind == LoweredOp::Kind::kWait) {
        ForEachOperand(source, [&](ValueId id) {
          int64_t& ready = root_ready[program.RootOf(id)];
          ready = std::max(ready, landing[id]);
        });
        continue;
      }
      int64_t time = 0;
      ForEachOperand(source, [&](ValueId id) { time = std::max(time, root_ready[program.RootOf(id)]); });
      if (op.kind == LoweredOp::Kind::kStart) {
        const OpCost& cost = lowered.costs[op.cost];
        time = Sum(time, Sum(cost.latency_ps, cost.work_ps));
      } else {
        time = Sum(time, Stretch(op.work_ps, slow));
      }
      longest = std::max(longest, time);
      bool lands = op.kind == LoweredOp::Kind::kStart;
      if (const Move* move = MoveOf(source)) {  // lands at its wait; what is on its way out may still be read
        ForEachOperand(source, [&](ValueId id) { landing[id] = time; });
        if (move->to == Place::kLeaving) continue;
      }
      for (ValueId id : source.results) {
        if (id == kNone) continue;
        int64_t& ready = root_ready[program.RootOf(id)];
        if (lands) {
          landing[id] = time;
          if (program.RootOf(id) == id) ready = 0;  // a new storage, readable after the wait
        } else {
          // A new storage in a repeated phase forgets its past; a part of another's storage does not.
          ready = program.RootOf(id) == id ? time : std::max(ready, time);
        }
      }
      for (ValueId id : WrittenOperands(program, source)) {
        int64_t& ready = root_ready[program.RootOf(id)];
        ready = std::max(ready, time);
      }
    }
    seen += static_cast<int64_t>(phase.ops.size());
    if (run + 1 == lowered.run.size() || seen > kMostOps) break;
    const Phase& next = *lowered.phases[lowered.run[run + 1]];
    std::vector<std::pair<int64_t, int64_t>> given;
    for (ValueId id : phase.gives) given.emplace_back(root_ready[program.RootOf(id)], landing[id]);
    for (size_t i = 0; i < next.takes.size() && i < given.size(); ++i) {
      root_ready[program.RootOf(next.takes[i])] = given[i].first;
      landing[next.takes[i]] = given[i].second;
    }
  }
  return longest;
}

}  // namespace

std::vector<Bound> LowerBounds(const EngineInput& input, const CostModel& model) {
  const ClusterSpec& cluster = model.cluster();
  Bound compute{"compute"}, lanes{"one lane"}, intra{"links within a node"}, inter{"links between nodes"};
  Bound host{"host bandwidth"}, memory{"host memory"}, files{"file store"}, cores{"cores of a host"},
      launches{"launches"}, path{"data dependencies"};
  auto raise = [](Bound& bound, int64_t time) { bound.time_ps = std::max(bound.time_ps, time); };
  int64_t per_node = model.ranks_per_node();
  std::vector<Totals> totals;
  for (size_t r = 0; r < input.programs.size(); ++r) {
    // Folded or equal ranks have equal totals.
    bool same =
        r > 0 && input.programs[r] == input.programs[r - 1] && input.compute_slow[r] == input.compute_slow[r - 1];
    if (same) {
      totals.push_back(totals.back());
      continue;
    }
    const Lowered& program = *input.programs[r];
    Totals& t = totals.emplace_back(TotalsOf(program, input.compute_slow[r], cluster));
    raise(compute, t.compute);
    for (int64_t lane : t.lanes) raise(lanes, lane);
    raise(intra, std::max(t.send[0], t.receive[0]));
    raise(inter, std::max(t.send[1], t.receive[1]));
    raise(path, DependencyPath(program, input.compute_slow[r]));
    raise(launches, t.launches);
  }
  for (size_t begin = 0; begin < totals.size(); begin += static_cast<size_t>(per_node)) {
    double copies[2] = {0, 0}, files_time[2] = {0, 0}, step_time = 0, core_time = 0;
    for (size_t r = begin; r < std::min(totals.size(), begin + static_cast<size_t>(per_node)); ++r) {
      for (int i = 0; i < 2; ++i) {
        copies[i] += static_cast<double>(totals[r].copies[i]);
        files_time[i] += static_cast<double>(totals[r].files[i]);
      }
      step_time += static_cast<double>(totals[r].steps);
      core_time += totals[r].core_time;
    }
    auto all = [&](double time) { return Share(1, std::min(time * static_cast<double>(input.fold), 4e18)); };
    raise(host, all(copies[0] * std::min(1.0, cluster.h2d_gb_per_s / cluster.host_gb_per_s)));
    raise(host, all(copies[1] * std::min(1.0, cluster.d2h_gb_per_s / cluster.host_gb_per_s)));
    raise(files, all(std::max(files_time[0], files_time[1])));
    if (!cluster.cpu) raise(memory, all(step_time));
    if (cluster.cpu) raise(cores, all(core_time / cluster.cores));
  }
  std::vector<Bound> out = {compute, lanes, intra, inter, host, memory, files, cores, launches, path};
  StableSort(out, [](const Bound& a, const Bound& b) { return a.time_ps > b.time_ps; });
  return out;
}

}  // namespace interlace
