#include "sim/lowered.h"

#include <algorithm>
#include <cmath>

#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "sim/receive_buffers.h"

namespace interlace {
namespace {

// The ranks that an op's transfer joins: along its axis, and along those that its units are replicated on.
AxisGroup TransferGroup(const Program& program, const Op& op) {
  auto [axes, replicas] = RanksOf(program, op);
  if (axes.empty() && program.mesh.size() == 1) axes = program.mesh[0].name;
  return program.GroupAlong(replicas.empty() ? axes : axes + "," + replicas);
}

// Between replicas, and on connections beside those of the shard axes.
bool Across(const Program& program, const Op& op) {
  if (TraitsOf(op).family != OpFamily::kUnit || op.units.empty()) return false;
  const bool reduces = op.kind == OpKind::kReduceStart;
  return (reduces || op.Attr(kParts) != nullptr) && program.AxisSize(program.units[op.units[0]].replicas) > 1;
}

// By index along the axis of a message: that of the other rank.
Result<std::vector<int32_t>> PeersOf(const Program& program, const Op& op, const AxisGroup& axis) {
  const Arg* peer = op.Attr("peer");
  if (peer == nullptr || peer->kind != Arg::Kind::kInt) return MakeError("no peer=");
  const std::string own = "rank_" + std::string(AxisOf(program, op));
  std::vector<int32_t> out;
  const bool unlike = program.stage && program.stage->unlike();  // the text is of its own ranks alone
  const int64_t first = unlike ? program.stage->First(program.stage->index) : 0;
  const int64_t end = unlike ? first + program.stage->ranks[static_cast<size_t>(program.stage->index)] : axis.size;
  out.assign(static_cast<size_t>(axis.size), -1);
  for (int64_t rank = first; rank < end; ++rank) {
    INTERLACE_ASSIGN(const int64_t index, program.dims.Evaluate(peer->integer, {{own, rank}}));
    if (index < 0 || index >= axis.size) return MakeError("peer= is ", index, " of ", axis.size, " ranks");
    out[static_cast<size_t>(rank)] = static_cast<int32_t>(index);
  }
  return out;
}

// What one op waits for, starts or computes.
Result<LoweredOp> LowerOp(const Program& program, const Op& op, CostModel& model, Lowered& lowered) {
  LoweredOp out;
  out.op = op.id;
  out.backward = op.part == Part::kBackward;
  out.lane = LaneOf(op);
  if (IsWait(op)) {
    out.kind = LoweredOp::Kind::kWait;
    return out;
  }
  INTERLACE_ASSIGN(OpCost cost, model.Cost(op));
  if (IsStart(op) || StepsOnHost(op)) {
    // What copies nothing (clean, fresh) waits for no copy before it.
    if (MoveOf(op) != nullptr && cost.resource == Resource::kNone) out.lane = Lane::kCompute;
    out.kind = LoweredOp::Kind::kStart;
    if (cost.group_ranks > 1) {
      out.group = TransferGroup(program, op);
      out.across = Across(program, op);
    }
    if (TraitsOf(op).family == OpFamily::kPeer) {
      out.receives = op.kind == OpKind::kRecvStart;
      out.channel = static_cast<int32_t>(ChannelOf(op));
      out.peers = static_cast<int32_t>(lowered.peers.size());
      Result<std::vector<int32_t>> peers = PeersOf(program, op, out.group);
      if (!peers.ok()) return Error{peers.error().message, PrintOp(program, op)};
      lowered.peers.push_back(std::move(*peers));
    }
    out.cost = static_cast<int32_t>(lowered.costs.size());
    lowered.costs.push_back(cost);
    return out;
  }
  if (cost.resource != Resource::kCompute) return out;
  out.kind = LoweredOp::Kind::kCompute;
  out.work_ps = cost.work_ps;
  out.transient_bytes = cost.transient_bytes;
  return out;
}

}  // namespace

std::array<int64_t, 2> IssuePs(const ClusterSpec& cluster) {
  const double us = std::min(cluster.issue_us, 1e12);
  return {static_cast<int64_t>(us * 1e6), static_cast<int64_t>(std::min(us * cluster.step.issue_backward, 1e12) * 1e6)};
}

int64_t FixedPoint(double factor) {
  double scaled = std::ceil(factor * static_cast<double>(kOne));
  return static_cast<int64_t>(std::clamp(scaled, static_cast<double>(kOne), 1e12));
}

const LoweredOp& Lowered::At(int64_t instance, size_t& run_index) const {
  run_index = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), instance) - first.begin()) - 1;
  return ops[run[run_index]][instance - first[run_index]];
}

KnownOps KnownOf(const Lowered& lowered) {
  KnownOps known(static_cast<size_t>(lowered.program->num_ops()));
  for (const std::vector<LoweredOp>& ops : lowered.ops) {
    for (const LoweredOp& op : ops) {
      if (op.kind != LoweredOp::Kind::kStart) known[op.op] = op;
    }
  }
  return known;
}

Result<Lowered> Lower(const Program& program, CostModel& model) {
  return Lower(program, model, {});
}

Result<Lowered> Lower(const Program& program, CostModel& model, const KnownOps& known) {
  Lowered out;
  out.program = &program;
  out.first.push_back(0);
  for (const auto& [phase, micro_batch, repeats] : program.RunsOfStep()) {
    const auto index =
        static_cast<int32_t>(std::find(out.phases.begin(), out.phases.end(), phase) - out.phases.begin());
    const bool fresh = index == static_cast<int32_t>(out.phases.size());
    if (fresh) {
      out.phases.push_back(phase);
      out.ops.emplace_back().reserve(phase->ops.size());
    }
    std::vector<LoweredOp>& ops = out.ops[static_cast<size_t>(index)];
    for (OpId id : fresh ? phase->ops : std::vector<OpId>()) {
      if (static_cast<size_t>(id) < known.size() && known[id].op != kNone) {
        ops.push_back(known[id]);
        continue;
      }
      INTERLACE_ASSIGN(LoweredOp op, LowerOp(program, program.op(id), model, out));
      ops.push_back(op);
    }
    int64_t count = static_cast<int64_t>(ops.size());
    if (count > 0 && repeats > (kMaxInstances - out.first.back()) / count) {
      return MakeError("a step runs '", phase->name, "' ", repeats, " times, more than ", kMaxInstances,
                       " ops in all; simulate fewer micro-batches");
    }
    for (int64_t i = 0; i < repeats; ++i) {
      out.run.push_back(index);
      out.micro_batch.push_back(micro_batch == kNone ? kNone : micro_batch + i * program.width);
      out.first.push_back(out.first.back() + count);
    }
  }
  if (out.run.empty()) return MakeError("the program has no phase that a step runs");
  out.cpu = model.cluster().cpu;
  out.receive_bytes = ReceiveBytesAtOps(program, out.phases, out.cpu);
  return out;
}

}  // namespace interlace
