#include "sim/engine.h"

#include <algorithm>
#include <deque>
#include <map>
#include <queue>
#include <set>

#include "ir/text.h"

namespace interlace {
namespace {

constexpr int kLanes = 7;
constexpr int kQueues = kLanes + 4;  // and messages sent to and received from lower and higher ranks
constexpr int kHorizon = 256;  // ops looked ahead when the next event of a compute lane is computed

int64_t Mul(int64_t a, int64_t b) {
  if (b == kOne) return a;
  return static_cast<int64_t>((static_cast<__int128>(a) * b + (kOne - 1)) >> 20);
}

struct Transfer {
  const OpCost* cost = nullptr;
  int32_t arrived = 0;
  bool active = false;           // past its latency: uses links, interferes
  bool planned = false;          // its end is in the queue, at the rate `slow`
  bool finished = false;
  int64_t remaining_ps = 0;
  int64_t since_ps = 0;          // remaining_ps is as of this time
  int64_t slow = kOne;
  uint32_t version = 0;
};

struct RankState {
  // Compute lane.
  const Lowered* program = nullptr;
  size_t run_index = 0;
  int64_t place = 0;             // in the phase
  int64_t instance = 0;
  int64_t remaining_ps = 0;      // of the op in hand
  bool begun = false;            // it has a start time
  bool tending = false;          // the op in hand is a start or a wait, whose own work on the thread is under way
  int64_t since_ps = 0;
  bool running = true;           // not held by a wait, not at the end
  bool finished = false;
  int32_t blocked_on = -1;       // transfer
  int64_t own_slow = kOne;       // of this rank's device
  int64_t slow = kOne;
  uint32_t version = 0;
  bool dirty = false;
  // Transfers.
  std::deque<int32_t> lanes[kQueues];
  std::vector<int32_t> active;
  int32_t sending[2] = {0, 0}, receiving[2] = {0, 0};  // transfers on the links within a node and between nodes
  int32_t classes[4] = {0, 0, 0, 0};
  std::vector<int32_t> in_flight;                      // by value id: the transfer that makes it
  std::set<int32_t> tended;                            // transfers with a finish_ps, whose finish is done
  int ClassSet() const { return (classes[0] > 0) | (classes[1] > 0) << 1 | (classes[2] > 0) << 2 | (classes[3] > 0) << 3; }
};

struct NodeState {
  int64_t copies[2] = {0, 0};    // h2d, d2h, counted per device
  int64_t files = 0;
  int64_t demand = 0;            // of cores, fixed point
  std::vector<int32_t> ranks;
};

struct Event {
  int64_t time;
  int32_t id;                    // a rank's compute lane, or ranks + transfer
  uint32_t version;
  bool operator>(const Event& o) const { return time != o.time ? time > o.time : id > o.id; }
};

class Engine {
 public:
  Engine(const EngineInput& in, const CostModel& model) : in_(in), model_(model), cluster_(model.cluster()) {
    for (int set = 0; set < 16; ++set) {
      for (int member = 0; member < 4; ++member) factor_[set][member] = FixedPoint(model.interference().factor[set][member]);
    }
    issue_ps_ = static_cast<int64_t>(cluster_.issue_us * 1e6);
    cores_ = FixedPoint(cluster_.cores);
    threads_ = cluster_.cpu ? FixedPoint(cluster_.compute_threads) : 0;
    copy_share_[0] = cluster_.h2d_gb_per_s / cluster_.host_gb_per_s;
    copy_share_[1] = cluster_.d2h_gb_per_s / cluster_.host_gb_per_s;
  }

  Result<EngineOutput> Run() {
    INTERLACE_TRY(SetUp());
    for (int32_t r = 0; r < num_ranks(); ++r) INTERLACE_TRY(Proceed(r));
    Settle();
    while (!events_.empty()) {
      now_ = events_.top().time;
      if (now_ >= kLatest) return MakeError("the step takes longer than fits in 64 bits of picoseconds");
      // All that happens now, then the new rates: equal ranks do everything in the same round, folded or not.
      while (!events_.empty() && events_.top().time == now_) {
        Event event = events_.top();
        events_.pop();
        INTERLACE_TRY(Handle(event));
      }
      Settle();
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

 private:
  Status Handle(const Event& event) {
    bool is_rank = event.id < num_ranks();
    uint32_t version = is_rank ? ranks_[event.id].version : transfers_[event.id - num_ranks()].version;
    if (event.version != version) return Ok{};
    ++out_.events;
    if (!is_rank) return TransferEvent(event.id - num_ranks());
    Walk(event.id, now_);
    MarkDirty(event.id);
    return Proceed(event.id);
  }

  int32_t num_ranks() const { return static_cast<int32_t>(in_.programs.size()); }

  Status SetUp() {
    int32_t n = num_ranks();
    for (const Lowered* program : in_.programs) {
      if (issue_ps_ > 0 && program->instances() >= kLatest / issue_ps_) {
        return MakeError("launching ", program->instances(), " ops takes longer than fits in 64 bits of picoseconds");
      }
    }
    ranks_.resize(n);
    out_.ranks.resize(n);
    nodes_.resize(n / model_.ranks_per_node() + 1);
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
      NodeOf(r).demand += threads_ * in_.fold;
      rank.dirty = true;
      dirty_.push_back(r);
    }
    return Ok{};
  }

  NodeState& NodeOf(int32_t r) { return nodes_[static_cast<size_t>(r / model_.ranks_per_node())]; }
  const std::vector<LoweredOp>& PhaseOps(const RankState& rank) const { return rank.program->ops[rank.program->run[rank.run_index]]; }
  int64_t Launched(int64_t instance) const { return issue_ps_ * instance; }

  void MarkDirty(int32_t r) {
    if (ranks_[r].dirty) return;
    ranks_[r].dirty = true;
    dirty_.push_back(r);
  }

  // ---- the compute lane ----

  static bool IsWork(const LoweredOp& op) { return op.kind == LoweredOp::Kind::kCompute || op.kind == LoweredOp::Kind::kFree; }

  // Lets the compute lane do its ops until `until`; stops at a start, a wait or the end of the phase.
  void Walk(int32_t r, int64_t until) {
    RankState& rank = ranks_[r];
    if (!rank.running || rank.finished) return;
    RankRecord& record = out_.ranks[r];
    const std::vector<LoweredOp>& ops = PhaseOps(rank);
    int64_t end = static_cast<int64_t>(ops.size());
    while (rank.place < end && (rank.tending || IsWork(ops[rank.place]))) {
      const LoweredOp& op = ops[rank.place];
      if (!rank.begun) {
        int64_t begin = std::max(rank.since_ps, Launched(rank.instance));
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
      rank.begun = rank.tending = false;
      ++rank.place;
      ++rank.instance;
    }
  }

  // When Walk will next have to stop, at most kHorizon ops ahead.
  int64_t NextStop(const RankState& rank) const {
    const std::vector<LoweredOp>& ops = PhaseOps(rank);
    int64_t time = rank.since_ps;
    int64_t place = rank.place, instance = rank.instance;
    int64_t end = std::min<int64_t>(static_cast<int64_t>(ops.size()), place + kHorizon);
    bool begun = rank.begun, tending = rank.tending;
    for (; place < end && (tending || IsWork(ops[place])); ++place, ++instance) {
      if (!begun) time = std::max(time, Launched(instance));
      time += Stretch(begun ? rank.remaining_ps : ops[place].work_ps, rank.slow);
      if (time >= kLatest) return kLatest;
      begun = tending = false;
    }
    if (place < static_cast<int64_t>(ops.size())) time = std::max(time, Launched(instance));
    return std::max(time, now_);
  }

  // Passes starts, waits and ends of phases that are due now.
  Status Proceed(int32_t r) {
    RankState& rank = ranks_[r];
    RankRecord& record = out_.ranks[r];
    while (rank.running && !rank.finished) {
      const std::vector<LoweredOp>& ops = PhaseOps(rank);
      if (rank.place >= static_cast<int64_t>(ops.size())) {
        INTERLACE_TRY(NextPhase(r));
        continue;
      }
      const LoweredOp& op = ops[rank.place];
      if (rank.tending || IsWork(op) || Launched(rank.instance) > now_) return Ok{};
      rank.since_ps = now_;
      record.start_ps[rank.instance] = record.end_ps[rank.instance] = now_;
      if (op.kind == LoweredOp::Kind::kStart) {
        INTERLACE_TRY(Issue(r, op));
        if (!op.blocking) {
          Tend(rank, rank.program->costs[op.cost].issue_ps);
          continue;
        }
      }
      int32_t transfer = PendingOf(rank, record, op);
      if (transfer < 0) {
        Tend(rank, FinishOf(rank, op));
        continue;
      }
      rank.blocked_on = transfer;
      rank.running = false;
      SetComputing(r, false);
    }
    return Ok{};
  }

  void Step(RankState& rank) {
    ++rank.place;
    ++rank.instance;
    rank.begun = false;
  }

  // The rest of a start or a wait, as work of the compute lane; then the op is done.
  void Tend(RankState& rank, int64_t work_ps) {
    if (work_ps == 0) {
      Step(rank);
      return;
    }
    rank.begun = rank.tending = true;
    rank.remaining_ps = work_ps;
  }

  // What remains to be done with the data that a wait has waited for; once for each transfer.
  int64_t FinishOf(RankState& rank, const LoweredOp& op) {
    int64_t sum = 0;
    ForEachOperand(rank.program->program->op(op.op), [&](ValueId id) {
      int32_t transfer = rank.in_flight[id];
      if (transfer < 0 || transfers_[transfer].cost->finish_ps == 0) return;
      if (rank.tended.insert(transfer).second) sum += transfers_[transfer].cost->finish_ps;
    });
    return sum;
  }

  // A transfer that the op must still wait for, or -1.
  int32_t PendingOf(RankState& rank, RankRecord& record, const LoweredOp& op) {
    if (op.blocking) {
      int32_t transfer = record.transfer_of[rank.instance];
      return transfers_[transfer].finished ? -1 : transfer;
    }
    int32_t pending = -1;
    ForEachOperand(rank.program->program->op(op.op), [&](ValueId id) {
      int32_t transfer = rank.in_flight[id];
      if (transfer >= 0 && !transfers_[transfer].finished) pending = transfer;
    });
    return pending;
  }

  void Unblock(int32_t r, int32_t transfer) {
    RankState& rank = ranks_[r];
    if (rank.blocked_on != transfer) return;
    RankRecord& record = out_.ranks[r];
    record.waited_for[rank.instance] = transfer;
    const LoweredOp& op = PhaseOps(rank)[rank.place];
    int32_t pending = PendingOf(rank, record, op);
    if (pending >= 0) {
      rank.blocked_on = pending;
      return;
    }
    record.end_ps[rank.instance] = now_;
    rank.blocked_on = -1;
    rank.running = true;
    rank.since_ps = now_;
    Tend(rank, FinishOf(rank, op));
    SetComputing(r, true);
    unblocked_.push_back(r);
  }

  // Values that the phase gives are what the next one takes.
  Status NextPhase(int32_t r) {
    RankState& rank = ranks_[r];
    const Lowered& p = *rank.program;
    const Phase& ended = *p.phases[p.run[rank.run_index]];
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
    return Ok{};
  }

  void SetComputing(int32_t r, bool on) {
    ranks_[r].classes[0] = on ? 1 : 0;
    if (threads_ != 0) ChangeDemand(r, on ? threads_ : -threads_);
    MarkDirty(r);
  }

  void ChangeDemand(int32_t r, int64_t change) {
    NodeState& node = NodeOf(r);
    int64_t before = node.demand;
    node.demand += change * in_.fold;
    if (std::max(before, node.demand) <= cores_) return;  // nobody is slowed, before or after
    for (int32_t other : node.ranks) MarkDirty(other);
  }

  // ---- transfers ----

  // Rank r's place along an axis and the others of its group. The last axis is innermost.
  void Group(int32_t r, int axis, std::vector<int32_t>& members, int64_t& number) const {
    const std::vector<Axis>& mesh = ranks_[r].program->program->mesh;
    int64_t stride = 1;
    for (size_t i = mesh.size() - 1; i > static_cast<size_t>(axis); --i) stride *= mesh[i].size;
    int64_t size = mesh[axis].size;
    int64_t base = r - r / stride % size * stride;
    number = base;
    for (int64_t i = 0; i < size; ++i) members.push_back(static_cast<int32_t>(base + i * stride));
  }

  Status Issue(int32_t r, const LoweredOp& op) {
    RankState& rank = ranks_[r];
    int lane = QueueOf(r, op);
    int32_t id;
    std::vector<int32_t> members;
    if (num_ranks() == 1 || (op.axis < 0 && op.peer < 0)) {
      id = NewTransfer(rank, op, {r});
    } else {
      // What is counted is one sequence: of a lane of a group, or of the messages from one rank to another.
      int64_t number = 0, mine = op.axis * kQueues + lane;
      if (op.peer >= 0) {
        members = {std::min(r, op.peer), std::max(r, op.peer)};
        mine = -1 - (int64_t{2} * op.peer + op.receives);
        number = -1 - (op.receives ? int64_t{op.peer} * num_ranks() + r : int64_t{r} * num_ranks() + op.peer);
      } else {
        Group(r, op.axis, members, number);
      }
      int64_t turn = rank_turn_[{r, mine}]++;
      std::vector<int32_t>& sequence = sequences_[{number, op.peer >= 0 ? -1 : mine}];
      if (turn < static_cast<int64_t>(sequence.size())) {
        id = sequence[turn];
        INTERLACE_TRY(SameCollective(r, op, id));
      } else {
        id = NewTransfer(rank, op, std::move(members));
        sequence.push_back(id);
      }
    }
    RankRecord& record = out_.ranks[r];
    record.transfer_of[rank.instance] = id;
    record.transfers.push_back(id);
    const Op& started = rank.program->program->op(op.op);
    for (ValueId result : started.results) {
      if (result != kNone) rank.in_flight[result] = id;
    }
    if (started.results.empty()) {  // offload and reload: by storage
      ForEachOperand(started, [&](ValueId operand) { rank.in_flight[operand] = id; });
    }
    out_.transfers[id].issued_ps = now_;
    rank.lanes[lane].push_back(id);
    if (rank.lanes[lane].front() == id) Arrive(r, id, rank.instance, -1);
    return Ok{};
  }

  // The queue of a transfer: its lane, or on CPUs that of all collectives; messages do not hold up those of another direction.
  int QueueOf(int32_t r, const LoweredOp& op) const {
    if (op.peer >= 0) return kLanes + 2 * (op.peer > r) + op.receives;
    return static_cast<int>(cluster_.cpu && op.axis >= 0 && op.lane == Lane::kReduce ? Lane::kGather : op.lane);
  }

  int32_t NewTransfer(const RankState& rank, const LoweredOp& op, std::vector<int32_t> members) {
    int32_t id = static_cast<int32_t>(transfers_.size());
    transfers_.emplace_back().cost = &rank.program->costs[op.cost];
    TransferRecord& record = out_.transfers.emplace_back();
    record.op = &op;
    record.members = std::move(members);
    return id;
  }

  Status SameCollective(int32_t r, const LoweredOp& op, int32_t id) const {
    const TransferRecord& record = out_.transfers[id];
    const Program& mine = *ranks_[r].program->program;
    const Program& theirs = *ranks_[record.members[0]].program->program;
    const Op& a = mine.op(op.op);
    const Op& b = theirs.op(record.op->op);
    const OpCost& cost = ranks_[r].program->costs[op.cost];
    if ((a.name == b.name || op.peer >= 0) && cost.bytes == transfers_[id].cost->bytes) return Ok{};
    return MakeError("rank ", r, " meets the others of its group in another collective:\n  rank ", r, ": ", PrintOp(mine, a),
                     "\n  others: ", PrintOp(theirs, b));
  }

  // The transfer heads its lane on rank r now, because it was just issued or because `before` has ended.
  void Arrive(int32_t r, int32_t id, int64_t instance, int32_t before) {
    Transfer& t = transfers_[id];
    TransferRecord& record = out_.transfers[id];
    if (++t.arrived < static_cast<int32_t>(record.members.size())) return;
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

  Status TransferEvent(int32_t id) {
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
      int lane = QueueOf(r, *record.op);
      if (record.op->peer >= 0 && record.members.size() == 2) {
        bool first = record.op->peer != r;
        bool receives = record.op->receives == first;
        lane = kLanes + 2 * (record.members[record.members[0] == r] > r) + receives;
      }
      rank.lanes[lane].pop_front();
      if (!rank.lanes[lane].empty()) {
        Arrive(r, rank.lanes[lane].front(), -1, id);
      }
      Unblock(r, id);
    }
    // After all members have moved on, so that ties do not depend on who is first.
    std::vector<int32_t> ranks;
    ranks.swap(unblocked_);
    for (int32_t r : ranks) INTERLACE_TRY(Proceed(r));
    return Ok{};
  }

  // Adds or removes a transfer from what is busy on rank r.
  void Use(int32_t r, int32_t id, int change) {
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
        rank.sending[level] += cost.sends ? change : 0;
        rank.receiving[level] += cost.receives ? change : 0;
        rank.classes[1] += change;
        break;
      }
      case Resource::kHostToDevice:
      case Resource::kDeviceToHost: {
        int direction = cost.resource == Resource::kDeviceToHost;
        rank.classes[2 + direction] += change;
        node.copies[direction] += change * in_.fold;
        for (int32_t other : node.ranks) MarkDirty(other);
        break;
      }
      case Resource::kFile:
        node.files += change * in_.fold;
        for (int32_t other : node.ranks) MarkDirty(other);
        break;
      default:
        break;
    }
  }

  static int64_t FixedPointShare(double share) { return static_cast<int64_t>(share * static_cast<double>(kOne)); }

  // ---- rates ----

  int64_t CoreSlow(int32_t r) {
    if (threads_ == 0) return kOne;
    int64_t demand = NodeOf(r).demand;
    if (demand <= cores_) return kOne;
    return static_cast<int64_t>((static_cast<__int128>(demand) << 20) / cores_) + 1;
  }

  int64_t TransferSlowOn(int32_t r, const OpCost& cost) {
    const RankState& rank = ranks_[r];
    NodeState& node = NodeOf(r);
    int set = rank.ClassSet();
    switch (cost.resource) {
      case Resource::kIntraLink:
      case Resource::kInterLink: {
        int level = cost.resource == Resource::kInterLink;
        int64_t share = std::max<int64_t>(cost.sends ? rank.sending[level] : 1, cost.receives ? rank.receiving[level] : 1);
        int64_t slow = Mul(share * kOne, factor_[set][1]);
        return cost.core_share > 0 ? Mul(slow, CoreSlow(r)) : slow;
      }
      case Resource::kHostToDevice:
      case Resource::kDeviceToHost: {
        int direction = cost.resource == Resource::kDeviceToHost;
        double share = static_cast<double>(node.copies[direction]) * copy_share_[direction];
        return Mul(FixedPoint(std::max(share, 1.0)), factor_[set][2 + direction]);
      }
      case Resource::kFile:
        return std::max<int64_t>(node.files, 1) * kOne;
      default:
        return kOne;
    }
  }

  void Settle() {
    // Rates depend on what is busy, and that has changed for this event already: one round is enough.
    for (size_t i = 0; i < dirty_.size(); ++i) SettleRank(dirty_[i]);
    dirty_.clear();
  }

  void SettleRank(int32_t r) {
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
      for (int32_t member : record.members) slow = std::max(slow, TransferSlowOn(member, *t.cost));
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

  Error Deadlock(int32_t r) const {
    const RankState& rank = ranks_[r];
    const Program& program = *rank.program->program;
    if (rank.blocked_on < 0) return MakeError("rank ", r, " stands still");
    const TransferRecord& record = out_.transfers[rank.blocked_on];
    const LoweredOp& wait = PhaseOps(rank)[rank.place];
    std::string missing;
    for (int32_t member : record.members) {
      const std::vector<int32_t>& theirs = out_.ranks[member].transfers;
      if (std::find(theirs.begin(), theirs.end(), rank.blocked_on) == theirs.end()) missing += " " + std::to_string(member);
    }
    return MakeError("rank ", r, " waits for ever at '", PrintOp(program, program.op(wait.op)), "': ",
                     missing.empty() ? "an earlier transfer on that lane never begins" : "not started by rank" + missing);
  }

  const EngineInput& in_;
  const CostModel& model_;
  const ClusterSpec& cluster_;
  int64_t factor_[16][4];
  int64_t issue_ps_ = 0, cores_ = kOne, threads_ = 0;
  double copy_share_[2];
  int64_t now_ = 0;
  std::vector<RankState> ranks_;
  std::vector<NodeState> nodes_;
  std::vector<Transfer> transfers_;
  std::vector<int32_t> dirty_, unblocked_;
  std::map<std::pair<int32_t, int64_t>, int64_t> rank_turn_;
  std::map<std::pair<int64_t, int64_t>, std::vector<int32_t>> sequences_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  EngineOutput out_;
};

}  // namespace

Result<EngineOutput> RunEngine(const EngineInput& input, const CostModel& model) { return Engine(input, model).Run(); }

}  // namespace interlace
