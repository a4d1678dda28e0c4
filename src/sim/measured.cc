#include "sim/measured.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace interlace {
namespace {

constexpr int64_t kLatestNs = kLatest / 1000;

// Puts the recorded times of one rank at the instances of the program's ops.
class Placing {
 public:
  Placing(Simulation& s, int32_t rank)
      : s_(s), lowered_(*s.lowered), rank_(rank), place_(lowered_.program->num_ops(), {-1, 0}) {
    for (size_t p = 0; p < lowered_.phases.size(); ++p) {
      for (size_t i = 0; i < lowered_.ops[p].size(); ++i)
        place_[lowered_.ops[p][i].op] = {static_cast<int32_t>(p), static_cast<int64_t>(i)};
    }
  }

  Status Run(const MeasuredRank& measured) {
    RankRecord& r = s_.output.ranks.emplace_back();
    r.start_ps.assign(lowered_.instances(), -1);
    r.end_ps = r.start_ps;
    r.transfer_of.assign(lowered_.instances(), -1);
    for (const MeasuredTime& t : measured.ops) {
      INTERLACE_ASSIGN(const int64_t instance, InstanceOf(t));
      r.start_ps[instance] = t.begin_ns * 1000, r.end_ps[instance] = t.end_ns * 1000;
    }
    int64_t now = measured.ops.empty() ? 0 : measured.ops.front().begin_ns * 1000;
    for (int64_t i = 0; i < lowered_.instances(); ++i) {
      if (r.start_ps[i] < 0) r.start_ps[i] = r.end_ps[i] = now;
      now = r.end_ps[i];
    }
    std::map<int64_t, std::pair<int64_t, int64_t>> moved;  // by instance; an op may start several
    for (const MeasuredTime& t : measured.transfers) {
      INTERLACE_ASSIGN(const int64_t instance, InstanceOf(t));
      auto [at, first] = moved.try_emplace(instance, t.begin_ns * 1000, t.end_ns * 1000);
      if (!first)
        at->second = {std::min(at->second.first, t.begin_ns * 1000), std::max(at->second.second, t.end_ns * 1000)};
    }
    AddTransfers(r, moved);
    s_.output.makespan_ps = std::max(s_.output.makespan_ps, now);
    return Ok{};
  }

 private:
  Result<int64_t> InstanceOf(const MeasuredTime& t) const {
    if (t.begin_ns < 0 || t.end_ns < t.begin_ns || t.end_ns >= kLatestNs) {
      return MakeError("rank ", rank_, ": op ", t.op, " was recorded from ", t.begin_ns, " to ", t.end_ns, " ns");
    }
    const bool known = t.op >= 0 && t.op < static_cast<int64_t>(place_.size()) && t.run >= 0 &&
                       t.run < static_cast<int64_t>(lowered_.run.size());
    if (!known || place_[t.op].first != lowered_.run[t.run]) {
      return MakeError("rank ", rank_, ": op ", t.op, " was recorded in run ", t.run,
                       ", where the program does not have it");
    }
    return lowered_.first[t.run] + place_[t.op].second;
  }

  // A lane is a queue: a transfer begins there when the one before it has ended.
  void AddTransfers(RankRecord& r, const std::map<int64_t, std::pair<int64_t, int64_t>>& moved) {
    int64_t lane_end[kLaneCount] = {};
    for (int64_t i = 0; i < lowered_.instances(); ++i) {
      size_t run = 0;
      const LoweredOp& op = lowered_.At(i, run);
      if (op.kind != LoweredOp::Kind::kStart) continue;
      const auto found = moved.find(i);
      auto [start, end] = found == moved.end() ? std::pair(r.start_ps[i], r.end_ps[i]) : found->second;
      int64_t& before = lane_end[static_cast<size_t>(op.lane)];
      start = std::max(start, before);
      before = end = std::max(start, end);
      r.transfer_of[i] = static_cast<int32_t>(s_.output.transfers.size());
      r.transfers.push_back(r.transfer_of[i]);
      TransferRecord& t = s_.output.transfers.emplace_back();
      t.op = &op, t.issued_ps = r.start_ps[i], t.start_ps = start, t.end_ps = end, t.members = {rank_}, t.rank = rank_;
      s_.output.makespan_ps = std::max(s_.output.makespan_ps, end);
    }
  }

  Simulation& s_;
  const Lowered& lowered_;
  int32_t rank_;
  std::vector<std::pair<int32_t, int64_t>> place_;  // by op: its phase, and where in it
};

}  // namespace

Result<Simulation> Measured(const Program& program, const std::vector<MeasuredRank>& ranks) {
  Simulation s;
  s.measured = true;
  const std::string here = "local-" + std::to_string(std::max<size_t>(ranks.size(), 1));
  INTERLACE_ASSIGN(s.cluster, LoadCluster(here, here));
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(program, s.cluster, nullptr));
  s.ranks = model.ranks();
  if (s.ranks != static_cast<int64_t>(ranks.size())) {
    return MakeError("the step was recorded on ", ranks.size(), " ranks, the program has ", s.ranks);
  }
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  s.lowered = std::make_unique<Lowered>(std::move(lowered));
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    INTERLACE_TRY(Placing(s, static_cast<int32_t>(rank)).Run(ranks[rank]));
  return s;
}

}  // namespace interlace
