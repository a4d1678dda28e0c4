#include "ir/text.h"
#include "sim/engine_impl.h"

namespace interlace::sim {

Result<EngineOutput> Engine::Run() {
  INTERLACE_TRY(SetUp());
  for (int32_t r = 0; r < num_ranks(); ++r) INTERLACE_TRY(Proceed(r));
  UpdateRates();
  while (!events_.empty()) {
    now_ = events_.top().time;
    if (now_ >= kLatest) return MakeError("the step takes longer than fits in 64 bits of picoseconds");
    // All that happens now, then the new rates: equal ranks do everything in the same round, folded or not.
    while (!events_.empty() && events_.top().time == now_) {
      Event event = events_.top();
      events_.pop();
      INTERLACE_TRY(Handle(event));
    }
    UpdateRates();
  }
  for (int32_t r = 0; r < num_ranks(); ++r) {
    if (!ranks_[r].finished) return Deadlock(r);
  }
  for (const TransferRecord& t : out_.transfers) out_.makespan_ps = std::max(out_.makespan_ps, t.end_ps);
  for (const RankRecord& r : out_.ranks) {
    if (!r.end_ps.empty()) out_.makespan_ps = std::max(out_.makespan_ps, r.end_ps.back());
  }
  return std::move(out_);
}

Status Engine::Handle(const Event& event) {
  bool is_rank = event.id < num_ranks();
  uint32_t version = is_rank ? ranks_[event.id].version : transfers_[event.id - num_ranks()].version;
  if (event.version != version) return Ok{};
  ++out_.events;
  if (!is_rank) return TransferEvent(event.id - num_ranks());
  Walk(event.id, now_);
  MarkDirty(event.id);
  return Proceed(event.id);
}

Status Engine::SetUp() {
  int32_t n = num_ranks();
  for (const Lowered* program : in_.programs) {
    const int64_t longest = std::max(issue_ps_[0], issue_ps_[1]);
    if (longest > 0 && program->instances() >= kLatest / longest) {
      return MakeError("launching ", program->instances(), " ops takes longer than fits in 64 bits of picoseconds");
    }
  }
  ranks_.resize(n);
  out_.ranks.resize(n);
  for (int32_t r = 0; r < n; ++r) nodes_.resize(std::max(nodes_.size(), NodeIndex(r) + 1));
  for (int32_t r = 0; r < n; ++r) {
    RankState& rank = ranks_[r];
    rank.program = in_.programs[r];
    rank.own_slow = rank.slow = in_.compute_slow[r];
    rank.in_flight.assign(rank.program->program->num_values(), -1);
    rank.classes[0] = 1;
    RankRecord& record = out_.ranks[r];
    size_t count = static_cast<size_t>(rank.program->instances());
    record.start_ps.assign(count, 0);
    record.end_ps.assign(count, 0);
    record.waited_for.assign(count, -1);
    record.transfer_of.assign(count, -1);
    NodeOf(r).ranks.push_back(r);
    NodeOf(r).demand += threads_ * FoldOf(r);
    rank.dirty = true;
    dirty_.push_back(r);
  }
  return Ok{};
}

int64_t Engine::CoreSlow(int32_t r) {
  if (threads_ == 0) return kOne;
  int64_t demand = NodeOf(r).demand;
  if (demand <= cores_) return kOne;
  return static_cast<int64_t>((static_cast<__int128>(demand) << 20) / cores_) + 1;
}

int64_t Engine::TransferSlowOn(int32_t r, int32_t id) {
  const OpCost& cost = *transfers_[id].cost;
  const RankState& rank = ranks_[r];
  NodeState& node = NodeOf(r);
  int set = rank.ClassSet();
  switch (cost.resource) {
    case Resource::kIntraLink:
    case Resource::kInterLink: {
      int level = cost.resource == Resource::kInterLink;
      int64_t share =
          std::max<int64_t>(Sends(r, id) ? rank.sending[level] : 1, Receives(r, id) ? rank.receiving[level] : 1);
      int64_t slow = Mul(share * kOne, factor_[set][1]);
      return cost.core_share > 0 ? Mul(slow, CoreSlow(r)) : slow;
    }
    case Resource::kHostToDevice:
    case Resource::kDeviceToHost: {
      int direction = cost.resource == Resource::kDeviceToHost;
      double share = static_cast<double>(node.copies[direction]) * copy_share_[direction];
      return Mul(FixedPoint(std::max(share, 1.0)), factor_[set][2 + direction]);
    }
    case Resource::kHostMemory: {
      if (cluster_.cpu) return CoreSlow(r);
      // Steps share what copies leave of the host's memory, and at least half of it.
      double copies = 0;
      for (int d = 0; d < 2; ++d)
        copies += cluster_.host_gb_per_s * std::min(1.0, static_cast<double>(node.copies[d]) * copy_share_[d]);
      const double all = cluster_.HostMemoryGbPerS(), left = std::max(all - copies, all / 2);
      return FixedPoint(static_cast<double>(std::max<int64_t>(node.steps, 1)) * all / left);
    }
    case Resource::kFile: {
      int direction = cost.sends;
      int64_t slow = std::max(node.files[direction], kOne);
      return cluster_.file_tier ? Mul(slow, factor_[set][2 + direction]) : slow;
    }
    default:
      return kOne;
  }
}

void Engine::UpdateRates() {
  // Rates depend on what is busy, and that has changed for this event already: one round is enough.
  for (size_t i = 0; i < dirty_.size(); ++i) UpdateRatesOf(dirty_[i]);
  dirty_.clear();
}

void Engine::UpdateRatesOf(int32_t r) {
  RankState& rank = ranks_[r];
  rank.dirty = false;
  if (rank.running && !rank.finished) {
    Walk(r, now_);
    rank.slow = Mul(Mul(rank.own_slow, factor_[rank.ClassSet()][0]), CoreSlow(r));
    ++rank.version;
    events_.push({NextStop(rank), r, rank.version});
  } else {
    ++rank.version;
  }
  for (int32_t id : rank.active) {
    Transfer& t = transfers_[id];
    const TransferRecord& record = out_.transfers[id];
    int64_t slow = kOne;
    for (int32_t member : record.members) slow = std::max(slow, TransferSlowOn(member, id));
    if (t.planned && slow == t.slow) continue;
    t.remaining_ps -= std::min(t.remaining_ps, Done(now_ - t.since_ps, t.slow));
    t.since_ps = now_;
    t.slow = slow;
    t.planned = true;
    ++t.version;
    int64_t time = Stretch(t.remaining_ps, slow);
    events_.push({time >= kLatest - now_ ? kLatest : now_ + time, num_ranks() + id, t.version});
  }
}

Error Engine::Deadlock(int32_t r) const {
  const RankState& rank = ranks_[r];
  const Program& program = *rank.program->program;
  if (rank.blocked_on < 0) return MakeError(RankWord(), " ", r, " stands still");
  const TransferRecord& record = out_.transfers[rank.blocked_on];
  const LoweredOp& wait = PhaseOps(rank)[rank.place];
  std::string missing;
  for (int32_t member : record.members) {
    const std::vector<int32_t>& theirs = out_.ranks[member].transfers;
    if (std::find(theirs.begin(), theirs.end(), rank.blocked_on) == theirs.end())
      missing += " " + std::to_string(member);
  }
  return MakeError(RankWord(), " ", r, " waits for ever at '", PrintOp(program, program.op(wait.op)), "': ",
                   missing.empty() ? "an earlier transfer on that lane never begins"
                                   : "not started by " + std::string(RankWord()) + missing);
}

}  // namespace interlace::sim

namespace interlace {

std::vector<const LoweredOp*> IssuedOps(const Lowered& lowered, const RankRecord& record) {
  std::vector<const LoweredOp*> out;
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    const std::vector<LoweredOp>& ops = lowered.ops[lowered.run[run]];
    for (size_t i = 0; i < ops.size(); ++i) {
      if (record.transfer_of[static_cast<size_t>(lowered.first[run]) + i] >= 0) out.push_back(&ops[i]);
    }
  }
  return out;
}

Result<EngineOutput> RunEngine(const EngineInput& input, const CostModel& model) {
  return sim::Engine(input, model).Run();
}

}  // namespace interlace
