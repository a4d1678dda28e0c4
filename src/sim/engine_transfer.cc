// Transfers: who meets whom in which, when each begins and ends, and what it uses meanwhile.
#include "ir/text.h"
#include "sim/engine_impl.h"

namespace interlace::sim {

Status Engine::Issue(int32_t r, const LoweredOp& op) {
  RankState& rank = ranks_[r];
  int32_t id;
  const int32_t peer = num_ranks() == 1 ? -1 : PeerOf(r, op);
  std::vector<int32_t> members;
  if (peer >= 0) members = {std::min(r, peer), std::max(r, peer)};
  if (!op.IsMessage()) members = MembersOf(r, op.group);
  if (members.size() < 2) {
    id = NewTransfer(r, op, {r});
  } else {
    // What is counted is one sequence: of a lane of a group, or of the messages of a channel from one rank to another.
    int64_t number = members[0], mine = ((op.group.stride << 20) + op.group.size) * kLanes + LaneIndex(op);
    if (peer >= 0) {
      mine = -1 - ((int64_t{2} * peer + op.receives) * kMostChannels + op.channel);
      const int64_t pair = op.receives ? int64_t{peer} * num_ranks() + r : int64_t{r} * num_ranks() + peer;
      number = -1 - (pair * kMostChannels + op.channel);
    }
    int64_t turn = rank_turn_[{r, mine}]++;
    std::vector<int32_t>& sequence = sequences_[{number, peer >= 0 ? -1 : mine}];
    if (turn < static_cast<int64_t>(sequence.size())) {
      id = sequence[turn];
      INTERLACE_TRY(SameCollective(r, op, id));
    } else {
      id = NewTransfer(r, op, std::move(members));
      sequence.push_back(id);
      if (peer >= 0) {
        transfers_[id].sender = op.receives ? peer : r;
        transfers_[id].receiver = op.receives ? r : peer;
      }
    }
  }
  RankRecord& record = out_.ranks[r];
  record.transfer_of[rank.instance] = id;
  record.transfers.push_back(id);
  const Op& started = rank.program->program->op(op.op);
  for (ValueId result : started.results) {
    if (result != kNone) rank.in_flight[result] = id;
  }
  if (started.results.empty()) {  // offload, reload, a step on the host: by storage
    ForEachOperand(started, [&](ValueId operand) {
      const int32_t before = rank.in_flight[operand];
      if (before >= 0 && !transfers_[before].finished && out_.transfers[before].op->lane == Lane::kHost &&
          op.lane != Lane::kCompute) {
        ++transfers_[id].after;
        transfers_[before].followers.push_back(id);
      }
      rank.in_flight[operand] = id;
    });
  }
  if (op.receives && ComesByItself(id)) return Ok{};
  out_.transfers[id].issued_ps = now_;
  std::deque<int32_t>& queue = QueueOf(r, op);
  queue.push_back(id);
  if (queue.front() == id) Arrive(r, id, rank.instance, -1);
  return Ok{};
}

std::vector<int32_t> Engine::MembersOf(int32_t r, const AxisGroup& group) const {
  std::vector<int32_t> out;
  if (num_ranks() == 1 || group.size < 2) return {r};
  if (in_.stages) {  // all of them, or ranks of this one
    const AxisGroup& axis = in_.stages->axis;
    if (group.stride > axis.stride || group.stride * group.size < axis.stride * axis.size) return {r};
    for (int32_t stage = 0; stage < num_ranks(); ++stage) out.push_back(stage);
    return out;
  }
  for (int64_t i = 0; i < group.size; ++i) out.push_back(static_cast<int32_t>(group.BaseOf(r) + i * group.stride));
  return out;
}

int32_t Engine::PeerOf(int32_t r, const LoweredOp& op) const {
  if (op.peers < 0) return op.peer;
  const std::vector<int32_t>& row = ranks_[r].program->peers[op.peers];
  const int32_t peer =
      in_.stages ? row[r] : static_cast<int32_t>(op.group.BaseOf(r) + row[op.group.IndexOf(r)] * op.group.stride);
  return peer == r ? -1 : peer;
}

int Engine::LaneIndex(const LoweredOp& op) const {
  if (op.across) return static_cast<int>(Lane::kReduce);
  const bool of_collectives = cluster_.cpu && op.group.size > 1 && op.lane == Lane::kReduce;
  return static_cast<int>(of_collectives ? Lane::kGather : op.lane);
}

std::deque<int32_t>& Engine::QueueOf(int32_t r, const LoweredOp& op) {
  if (op.IsMessage()) return ranks_[r].messages[{2 * PeerOf(r, op) + op.receives, op.channel}];
  return ranks_[r].lanes[LaneIndex(op)];
}

bool Engine::Sends(int32_t r, int32_t id) const {
  return transfers_[id].sender < 0 ? transfers_[id].cost->sends : transfers_[id].sender == r;
}
bool Engine::Receives(int32_t r, int32_t id) const {
  return transfers_[id].receiver < 0 ? transfers_[id].cost->receives : transfers_[id].receiver == r;
}

int32_t Engine::NewTransfer(int32_t r, const LoweredOp& op, std::vector<int32_t> members) {
  int32_t id = static_cast<int32_t>(transfers_.size());
  transfers_.emplace_back().cost = &ranks_[r].program->costs[op.cost];
  TransferRecord& record = out_.transfers.emplace_back();
  record.op = &op;
  record.rank = r;
  record.members = std::move(members);
  return id;
}

Status Engine::SameCollective(int32_t r, const LoweredOp& op, int32_t id) const {
  const TransferRecord& record = out_.transfers[id];
  const Program& mine = *ranks_[r].program->program;
  const Program& theirs = *ranks_[record.rank].program->program;
  const Op& a = mine.op(op.op);
  const Op& b = theirs.op(record.op->op);
  const OpCost& cost = ranks_[r].program->costs[op.cost];
  if ((a.name == b.name || op.IsMessage()) && cost.bytes == transfers_[id].cost->bytes) return Ok{};
  return MakeError(RankWord(), " ", r, " meets the others of its group in another collective:\n  ", RankWord(), " ", r,
                   ": ", PrintOp(mine, a), "\n  others: ", PrintOp(theirs, b));
}

void Engine::Arrive(int32_t r, int32_t id, int64_t instance, int32_t before) {
  Transfer& t = transfers_[id];
  TransferRecord& record = out_.transfers[id];
  const auto needed = ComesByItself(id) ? 1 : static_cast<int32_t>(record.members.size());
  if (++t.arrived < needed + t.after) return;
  record.start_ps = now_;
  record.cause_rank = r;
  record.cause_transfer = before;
  record.cause_instance = instance;
  t.since_ps = now_;
  t.remaining_ps = t.cost->work_ps;
  ++t.version;
  int64_t latency = t.cost->latency_ps;
  if (cluster_.cpu && before >= 0) latency -= std::min(latency, now_ - record.issued_ps);
  events_.push({now_ + latency, num_ranks() + id, t.version});
}

Status Engine::TransferEvent(int32_t id) {
  Transfer& t = transfers_[id];
  if (!t.active && t.cost->work_ps > 0) {
    t.active = true;
    t.planned = false;
    t.slow = kOne;
    t.since_ps = now_;
    for (int32_t r : out_.transfers[id].members) Use(r, id, +1);
    return Ok{};
  }
  if (t.active) {
    for (int32_t r : out_.transfers[id].members) Use(r, id, -1);
  }
  t.active = false;
  t.finished = true;
  ++t.version;
  TransferRecord& record = out_.transfers[id];
  record.end_ps = now_;
  for (int32_t r : record.members) {
    RankState& rank = ranks_[r];
    // A message's record is the op of the rank that came first; its other end has the other direction.
    const int32_t other = r == t.sender ? t.receiver : t.sender;
    const std::pair<int32_t, int32_t> ends{2 * other + (r == t.receiver), record.op->channel};
    std::deque<int32_t>& queue = t.sender < 0 ? QueueOf(r, *record.op) : rank.messages[ends];
    if (r != t.receiver || !ComesByItself(id)) {
      queue.pop_front();
      if (!queue.empty()) Arrive(r, queue.front(), -1, id);
    }
    for (int32_t follower : std::exchange(transfers_[id].followers, {})) Arrive(r, follower, -1, id);
    Unblock(r, id);
  }
  // After all members have moved on, so that ties do not depend on who is first.
  std::vector<int32_t> ranks;
  ranks.swap(unblocked_);
  for (int32_t r : ranks) INTERLACE_TRY(Proceed(r));
  return Ok{};
}

void Engine::Use(int32_t r, int32_t id, int change) {
  RankState& rank = ranks_[r];
  const OpCost& cost = *transfers_[id].cost;
  if (change > 0) {
    rank.active.push_back(id);
  } else {
    rank.active.erase(std::find(rank.active.begin(), rank.active.end(), id));
  }
  MarkDirty(r);
  if (cost.core_share > 0) ChangeDemand(r, change * FixedPointShare(cost.core_share));
  NodeState& node = NodeOf(r);
  switch (cost.resource) {
    case Resource::kIntraLink:
    case Resource::kInterLink: {
      int level = cost.resource == Resource::kInterLink;
      rank.sending[level] += Sends(r, id) ? change : 0;
      rank.receiving[level] += Receives(r, id) ? change : 0;
      rank.classes[1] += change;
      break;
    }
    case Resource::kHostToDevice:
    case Resource::kDeviceToHost: {
      int direction = cost.resource == Resource::kDeviceToHost;
      rank.classes[2 + direction] += change;
      node.copies[direction] += change * FoldOf(r);
      for (int32_t other : node.ranks) MarkDirty(other);
      break;
    }
    case Resource::kHostMemory:
      node.steps += change * FoldOf(r);
      for (int32_t other : node.ranks) MarkDirty(other);
      break;
    case Resource::kFile:
      node.files[cost.sends] += change * FoldOf(r) * FixedPointShare(cost.store_share);
      if (cluster_.file_tier) rank.classes[2 + cost.sends] += change;
      for (int32_t other : node.ranks) MarkDirty(other);
      break;
    default:
      break;
  }
}

}  // namespace interlace::sim
