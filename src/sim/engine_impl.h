// engine_impl.h — the state of the simulation and who changes it (engine.h says what it does).
//
//   engine.cc            the clock: events in order, the rates after each
//   engine_compute.cc    the compute lane of a rank: ops, starts, waits, phases
//   engine_transfer.cc   transfers: who meets whom, when they begin and end, what they use
#pragma once

#include <array>
#include <deque>
#include <map>
#include <queue>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/engine.h"

namespace interlace::sim {

inline constexpr int kLanes = kLaneCount;
inline constexpr int kHorizon = 256;  // ops looked ahead when the next event of a compute lane is computed

inline int64_t Mul(int64_t a, int64_t b) {
  if (b == kOne) return a;
  return static_cast<int64_t>((static_cast<__int128>(a) * b + (kOne - 1)) >> 20);
}

struct Transfer {
  const OpCost* cost = nullptr;
  int32_t arrived = 0;
  bool active = false;   // past its latency: uses links, interferes
  bool planned = false;  // its end is in the queue, at the rate `slow`
  bool finished = false;
  int64_t remaining_ps = 0;
  int64_t since_ps = 0;  // remaining_ps is as of this time
  int64_t slow = kOne;
  uint32_t version = 0;
  int32_t after = 0;                   // steps on the host that had not ended when it was issued
  std::vector<int32_t> followers;      // of a step on the host: transfers that wait for it
  int32_t sender = -1, receiver = -1;  // of a message
};

struct RankState {
  // Compute lane.
  const Lowered* program = nullptr;
  size_t run_index = 0;
  int64_t place = 0;  // in the phase
  int64_t instance = 0;
  int64_t launched_ps = 0;      // when the host has launched the op in hand
  int64_t remaining_ps = 0;     // of the op in hand
  bool begun = false;           // it has a start time
  bool in_thread_work = false;  // the op in hand is a start or a wait, whose own work on the thread is under way
  int64_t since_ps = 0;
  bool running = true;  // not held by a wait, not at the end
  bool finished = false;
  int32_t blocked_on = -1;  // transfer
  int64_t own_slow = kOne;  // of this rank's device
  int64_t slow = kOne;
  uint32_t version = 0;
  bool dirty = false;
  // Transfers.
  std::deque<int32_t> lanes[kLanes];
  // By 2 * the other rank, + 1 of those that it sends, and channel.
  std::map<std::pair<int32_t, int32_t>, std::deque<int32_t>> messages;
  std::vector<int32_t> active;
  int32_t sending[2] = {0, 0}, receiving[2] = {0, 0};  // transfers on the links within a node and between nodes
  int32_t classes[4] = {0, 0, 0, 0};
  std::vector<int32_t> in_flight;                                 // by value id: the transfer that makes it
  std::map<std::pair<std::string_view, int64_t>, int32_t> saved;  // by name and micro-batch: messages under way
  std::set<int32_t> thread_finished;                              // transfers with a finish_ps, whose finish is done
  int ClassSet() const {
    return (classes[0] > 0) | (classes[1] > 0) << 1 | (classes[2] > 0) << 2 | (classes[3] > 0) << 3;
  }
};

struct NodeState {
  int64_t copies[2] = {0, 0};  // h2d, d2h, counted per device
  int64_t files[2] = {0, 0};   // read, written: shares of the store, fixed point
  int64_t steps = 0;           // optimizer steps on the host, per device
  int64_t demand = 0;          // of cores, fixed point
  std::vector<int32_t> ranks;
};

struct Event {
  int64_t time;
  int32_t id;  // a rank's compute lane, or ranks + transfer
  uint32_t version;
  bool operator>(const Event& o) const { return time != o.time ? time > o.time : id > o.id; }
};

class Engine {
 public:
  Engine(const EngineInput& in, const CostModel& model) : in_(in), model_(model), cluster_(model.cluster()) {
    for (int set = 0; set < 16; ++set) {
      for (int member = 0; member < 4; ++member)
        factor_[set][member] = FixedPoint(model.interference().factor[set][member]);
    }
    issue_ps_ = IssuePs(cluster_);
    cores_ = FixedPoint(cluster_.cores);
    threads_ = cluster_.cpu ? FixedPoint(cluster_.compute_threads) : 0;
    copy_share_[0] = cluster_.h2d_gb_per_s / cluster_.host_gb_per_s;
    copy_share_[1] = cluster_.d2h_gb_per_s / cluster_.host_gb_per_s;
  }

  Result<EngineOutput> Run();

 private:
  Status Handle(const Event& event);
  Status SetUp();
  int32_t num_ranks() const { return static_cast<int32_t>(in_.programs.size()); }
  size_t NodeIndex(int32_t r) const {
    return static_cast<size_t>(in_.stages ? in_.stages->node[static_cast<size_t>(r)] : r / model_.ranks_per_node());
  }
  NodeState& NodeOf(int32_t r) { return nodes_[NodeIndex(r)]; }
  const char* RankWord() const { return in_.stages ? "stage" : "rank"; }
  int64_t FoldOf(int32_t r) const { return in_.stages ? in_.stages->fold[static_cast<size_t>(r)] : in_.fold; }
  const std::vector<LoweredOp>& PhaseOps(const RankState& rank) const {
    return rank.program->ops[rank.program->run[rank.run_index]];
  }
  void MarkDirty(int32_t r) {
    if (ranks_[r].dirty) return;
    ranks_[r].dirty = true;
    dirty_.push_back(r);
  }

  // ---- the compute lane: engine_compute.cc ----

  static bool IsWork(const LoweredOp& op) {
    return op.kind == LoweredOp::Kind::kCompute || op.kind == LoweredOp::Kind::kFree;
  }
  // Lets the compute lane do its ops until `until`; stops at a start, a wait or the end of the phase.
  void Walk(int32_t r, int64_t until);
  // When Walk will next have to stop, at most kHorizon ops ahead.
  int64_t NextStop(const RankState& rank) const;
  // Passes starts, waits and ends of phases that are due now.
  Status Proceed(int32_t r);
  void Step(RankState& rank) {
    rank.launched_ps += issue_ps_[PhaseOps(rank)[static_cast<size_t>(rank.place)].backward];
    ++rank.place;
    ++rank.instance;
    rank.begun = false;
  }
  // The rest of a start or a wait, as work of the compute lane; then the op is done.
  void ThreadWork(RankState& rank, int64_t work_ps);
  // What remains to be done with the data that a wait has waited for; once for each transfer.
  int64_t FinishOf(RankState& rank, const LoweredOp& op);
  // A transfer that the op must still wait for, or -1.
  int32_t PendingOf(RankState& rank, const LoweredOp& op);
  void Unblock(int32_t r, int32_t transfer);
  // Values that the phase gives are what the next one takes.
  Status NextPhase(int32_t r);
  void SetComputing(int32_t r, bool on);
  void ChangeDemand(int32_t r, int64_t change);

  // ---- transfers: engine_transfer.cc ----

  // Rank r's place along an axis and the others of its group. The last axis is innermost.
  Status Issue(int32_t r, const LoweredOp& op);
  // The other rank of a message; -1: no message, or one to itself.
  int32_t PeerOf(int32_t r, const LoweredOp& op) const;
  // The simulated ranks of a collective; one: it is alone, or stands for ranks like it.
  std::vector<int32_t> MembersOf(int32_t r, const AxisGroup& group) const;
  // The lane of a transfer that is no message: its own, or on CPUs that of all collectives.
  int LaneIndex(const LoweredOp& op) const;
  // The queue of a transfer: its lane; of messages, those of a channel to one rank or from one.
  std::deque<int32_t>& QueueOf(int32_t r, const LoweredOp& op);
  // A message comes whether its receiver has asked for it or not.
  bool ComesByItself(int32_t id) const { return cluster_.cpu && transfers_[id].sender >= 0; }
  // Directions of a link that a transfer fills on a rank.
  bool Sends(int32_t r, int32_t id) const;
  bool Receives(int32_t r, int32_t id) const;
  int32_t NewTransfer(int32_t r, const LoweredOp& op, std::vector<int32_t> members);
  Status SameCollective(int32_t r, const LoweredOp& op, int32_t id) const;
  // The transfer heads its lane on rank r now, because it was just issued or because `before` has ended.
  void Arrive(int32_t r, int32_t id, int64_t instance, int32_t before);
  Status TransferEvent(int32_t id);
  // Adds or removes a transfer from what is busy on rank r.
  void Use(int32_t r, int32_t id, int change);
  static int64_t FixedPointShare(double share) { return static_cast<int64_t>(share * static_cast<double>(kOne)); }

  // ---- rates ----

  int64_t CoreSlow(int32_t r);
  int64_t TransferSlowOn(int32_t r, int32_t id);
  void UpdateRates();
  void UpdateRatesOf(int32_t r);
  Error Deadlock(int32_t r) const;

  const EngineInput& in_;
  const CostModel& model_;
  const ClusterSpec& cluster_;
  int64_t factor_[16][4];
  std::array<int64_t, 2> issue_ps_{};
  int64_t cores_ = kOne, threads_ = 0;
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

}  // namespace interlace::sim
