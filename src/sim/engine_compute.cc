// The compute lane of a rank: ops one after another, starts and waits passed, phases.
#include "sim/engine_impl.h"

namespace interlace::sim {

void Engine::Walk(int32_t r, int64_t until) {
  RankState& rank = ranks_[r];
  if (!rank.running || rank.finished) return;
  RankRecord& record = out_.ranks[r];
  const std::vector<LoweredOp>& ops = PhaseOps(rank);
  int64_t end = static_cast<int64_t>(ops.size());
  while (rank.place < end && (rank.in_thread_work || IsWork(ops[rank.place]))) {
    const LoweredOp& op = ops[rank.place];
    if (!rank.begun) {
      int64_t begin = std::max(rank.since_ps, rank.launched_ps);
      if (begin > until) break;
      rank.begun = true;
      rank.since_ps = begin;
      rank.remaining_ps = op.work_ps;
      record.start_ps[rank.instance] = begin;
    }
    int64_t time = Stretch(rank.remaining_ps, rank.slow);
    if (time > until - rank.since_ps) {
      rank.remaining_ps -= std::min(rank.remaining_ps, Done(until - rank.since_ps, rank.slow));
      rank.since_ps = until;
      return;
    }
    rank.since_ps += time;
    record.end_ps[rank.instance] = rank.since_ps;
    rank.in_thread_work = false;
    Step(rank);
  }
}

int64_t Engine::NextStop(const RankState& rank) const {
  const std::vector<LoweredOp>& ops = PhaseOps(rank);
  int64_t time = rank.since_ps;
  int64_t place = rank.place, launched = rank.launched_ps;
  int64_t end = std::min<int64_t>(static_cast<int64_t>(ops.size()), place + kHorizon);
  bool begun = rank.begun, in_thread_work = rank.in_thread_work;
  for (; place < end && (in_thread_work || IsWork(ops[place])); ++place) {
    if (!begun) time = std::max(time, launched);
    time += Stretch(begun ? rank.remaining_ps : ops[place].work_ps, rank.slow);
    if (time >= kLatest) return kLatest;
    begun = in_thread_work = false;
    launched += issue_ps_[ops[place].backward];
  }
  if (place < static_cast<int64_t>(ops.size())) time = std::max(time, launched);
  return std::max(time, now_);
}

Status Engine::Proceed(int32_t r) {
  RankState& rank = ranks_[r];
  RankRecord& record = out_.ranks[r];
  while (rank.running && !rank.finished) {
    const std::vector<LoweredOp>& ops = PhaseOps(rank);
    if (rank.place >= static_cast<int64_t>(ops.size())) {
      INTERLACE_TRY(NextPhase(r));
      continue;
    }
    const LoweredOp& op = ops[rank.place];
    if (rank.in_thread_work || IsWork(op) || rank.launched_ps > now_) return Ok{};
    rank.since_ps = now_;
    record.start_ps[rank.instance] = record.end_ps[rank.instance] = now_;
    if (op.kind == LoweredOp::Kind::kStart) {
      INTERLACE_TRY(Issue(r, op));
      ThreadWork(rank, rank.program->costs[op.cost].issue_ps);
      continue;
    }
    int32_t transfer = PendingOf(rank, op);
    if (transfer < 0) {
      ThreadWork(rank, FinishOf(rank, op));
      continue;
    }
    rank.blocked_on = transfer;
    rank.running = false;
    SetComputing(r, false);
  }
  return Ok{};
}

void Engine::ThreadWork(RankState& rank, int64_t work_ps) {
  if (work_ps == 0) {
    Step(rank);
    return;
  }
  rank.begun = rank.in_thread_work = true;
  rank.remaining_ps = work_ps;
}

int64_t Engine::FinishOf(RankState& rank, const LoweredOp& op) {
  int64_t sum = 0;
  ForEachOperand(rank.program->program->op(op.op), [&](ValueId id) {
    int32_t transfer = rank.in_flight[id];
    if (transfer < 0 || transfers_[transfer].cost->finish_ps == 0) return;
    if (rank.thread_finished.insert(transfer).second) sum += transfers_[transfer].cost->finish_ps;
  });
  return sum;
}

int32_t Engine::PendingOf(RankState& rank, const LoweredOp& op) {
  int32_t pending = -1;
  ForEachOperand(rank.program->program->op(op.op), [&](ValueId id) {
    int32_t transfer = rank.in_flight[id];
    if (transfer >= 0 && !transfers_[transfer].finished) pending = transfer;
  });
  return pending;
}

void Engine::Unblock(int32_t r, int32_t transfer) {
  RankState& rank = ranks_[r];
  if (rank.blocked_on != transfer) return;
  RankRecord& record = out_.ranks[r];
  record.waited_for[rank.instance] = transfer;
  const LoweredOp& op = PhaseOps(rank)[rank.place];
  int32_t pending = PendingOf(rank, op);
  if (pending >= 0) {
    rank.blocked_on = pending;
    return;
  }
  record.end_ps[rank.instance] = now_;
  rank.blocked_on = -1;
  rank.running = true;
  rank.since_ps = now_;
  ThreadWork(rank, FinishOf(rank, op));
  SetComputing(r, true);
  unblocked_.push_back(r);
}

Status Engine::NextPhase(int32_t r) {
  RankState& rank = ranks_[r];
  const Lowered& p = *rank.program;
  const Phase& ended = *p.phases[p.run[rank.run_index]];
  for (const Carried& save : ended.saves) {
    const int32_t transfer = rank.in_flight[save.value];
    if (transfer >= 0 && !transfers_[transfer].finished)
      rank.saved[{save.name, p.micro_batch[rank.run_index]}] = transfer;
  }
  if (rank.run_index + 1 == p.run.size()) {
    rank.finished = true;
    rank.running = false;
    SetComputing(r, false);
    return Ok{};
  }
  ++rank.run_index;
  rank.place = 0;
  const Phase& next = *p.phases[p.run[rank.run_index]];
  std::vector<int32_t> given;
  for (ValueId id : ended.gives) given.push_back(rank.in_flight[id]);
  for (size_t i = 0; i < next.takes.size(); ++i) rank.in_flight[next.takes[i]] = i < given.size() ? given[i] : -1;
  for (const Carried& load : next.loads) {
    rank.in_flight[load.value] = -1;
    if (rank.saved.empty()) continue;
    const auto found = rank.saved.find({load.name, p.micro_batch[rank.run_index]});
    if (found == rank.saved.end()) continue;
    rank.in_flight[load.value] = found->second;
    rank.saved.erase(found);
  }
  return Ok{};
}

void Engine::SetComputing(int32_t r, bool on) {
  ranks_[r].classes[0] = on ? 1 : 0;
  if (threads_ != 0) ChangeDemand(r, on ? threads_ : -threads_);
  MarkDirty(r);
}

void Engine::ChangeDemand(int32_t r, int64_t change) {
  NodeState& node = NodeOf(r);
  int64_t before = node.demand;
  node.demand += change * FoldOf(r);
  if (std::max(before, node.demand) <= cores_) return;  // nobody is slowed, before or after
  for (int32_t other : node.ranks) MarkDirty(other);
}

}  // namespace interlace::sim
