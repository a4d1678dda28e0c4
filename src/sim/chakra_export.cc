#include "sim/chakra_export.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ir/op_table.h"
#include "trace/chakra.h"

namespace interlace {
namespace {

ChakraNodeType NodeTypeOf(const LoweredOp& lop, const Op& op) {
  if (lop.kind != LoweredOp::Kind::kStart) return ChakraNodeType::kComp;
  if (op.kind == OpKind::kSendStart) return ChakraNodeType::kCommSend;
  if (op.kind == OpKind::kRecvStart) return ChakraNodeType::kCommRecv;
  if (op.kind == OpKind::kOffloadStart) return ChakraNodeType::kMemStore;
  if (op.kind == OpKind::kReloadStart) return ChakraNodeType::kMemLoad;
  if (lop.lane == Lane::kHost) return ChakraNodeType::kComp;
  return ChakraNodeType::kCommColl;
}

ChakraCommType CommTypeOf(const Op& op) {
  switch (TraitsOf(op).exchange) {
    case Exchange::kGather:
      return ChakraCommType::kAllGather;
    case Exchange::kReduce:
      return ChakraCommType::kReduceScatter;
    case Exchange::kBroadcast:
      return ChakraCommType::kBroadcast;
    case Exchange::kAllToAll:
      return ChakraCommType::kAllToAll;
    default:
      return ChakraCommType::kAllReduce;
  }
}

// Walks the ops of one rank in issue order and remembers who wrote each storage.
class Exporter {
 public:
  Exporter(const Simulation& s, int32_t rank)
      : s_(s),
        lowered_(*s.lowered),
        program_(*lowered_.program),
        record_(s.output.ranks[rank]),
        writers_(program_.num_values()) {}

  std::string Run() {
    for (size_t run = 0; run < lowered_.run.size(); ++run) {
      int32_t p = lowered_.run[run];
      const Phase& phase = *lowered_.phases[p];
      for (size_t i = 0; i < phase.takes.size() && i < given_.size(); ++i)
        writers_[program_.RootOf(phase.takes[i])] = given_[i];
      for (const Carried& load : phase.loads) writers_[load.value] = saved_[{load.name, lowered_.micro_batch[run]}];
      for (size_t i = 0; i < lowered_.ops[p].size(); ++i)
        Visit(lowered_.ops[p][i], lowered_.first[run] + static_cast<int64_t>(i));
      for (const Carried& save : phase.saves) saved_[{save.name, lowered_.micro_batch[run]}] = writers_[save.value];
      given_.clear();
      for (ValueId id : phase.gives) given_.push_back(writers_[program_.RootOf(id)]);
    }
    std::vector<ChakraAttribute> metadata = {
        {"producer", s_.measured ? "interlace, measured" : "interlace, simulated on " + s_.cluster.name},
        {"world_size", s_.ranks},
        {"ranks_are_alike", record_.start_ps.size() > 0 && s_.output.ranks.size() == 1 && !s_.measured}};
    return WriteChakra(nodes_, metadata);
  }

 private:
  using Ids = std::vector<uint64_t>;

  static void AddTo(Ids& ids, const Ids& more) { ids.insert(ids.end(), more.begin(), more.end()); }
  static void Sort(Ids& ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  }

  void Visit(const LoweredOp& lop, int64_t instance) {
    const Op& op = program_.op(lop.op);
    if (lop.kind == LoweredOp::Kind::kWait) {
      // Its operands' transfers hold back all that follows on the compute lane.
      ForEachOperand(op, [&](ValueId id) { AddTo(waited_, writers_[program_.RootOf(id)]); });
      return;
    }
    if (lop.kind == LoweredOp::Kind::kFree) return;
    ChakraNode& node = nodes_.emplace_back();
    node.id = next_id_++;
    node.name = op.name;
    for (UnitId unit : op.units) node.name += " u" + std::to_string(unit);
    node.type = NodeTypeOf(lop, op);
    ForEachOperand(op, [&](ValueId id) { AddTo(node.data_deps, writers_[program_.RootOf(id)]); });
    Sort(node.data_deps);
    bool transfer = lop.kind == LoweredOp::Kind::kStart;
    if (last_compute_ >= 0) node.ctrl_deps.push_back(static_cast<uint64_t>(last_compute_));
    AddTo(node.ctrl_deps, waited_);  // a transfer is issued only after the waits before it, too
    if (transfer) {
      int64_t& last = last_on_lane_[static_cast<size_t>(lop.lane)];
      if (last >= 0) node.ctrl_deps.push_back(static_cast<uint64_t>(last));
      last = static_cast<int64_t>(node.id);
    }
    Sort(node.ctrl_deps);
    if (!transfer) {
      last_compute_ = static_cast<int64_t>(node.id);
      waited_.clear();
    }
    Times(lop, instance, node);
    Attributes(lop, op, node);
    Writes(op, node.id);
  }

  void Times(const LoweredOp& lop, int64_t instance, ChakraNode& node) const {
    int64_t start = record_.start_ps[instance], end = record_.end_ps[instance];
    if (lop.kind == LoweredOp::Kind::kStart) {
      const TransferRecord& t = s_.output.transfers[record_.transfer_of[instance]];
      start = t.start_ps, end = t.end_ps;
    }
    node.start_ns = start / 1000;
    node.duration_ns = end / 1000 - node.start_ns;
  }

  void Attributes(const LoweredOp& lop, const Op& op, ChakraNode& node) const {
    auto add = [&](const char* name, auto value) { node.attributes.push_back({name, value}); };
    add("is_cpu_op", lop.kind == LoweredOp::Kind::kStart && lop.lane == Lane::kHost);
    add("duration_ns", node.duration_ns);
    if (std::string module = ModuleOf(program_, op); !module.empty()) add("module", module);
    if (op.source >= 0 && op.source < static_cast<int32_t>(program_.sources.size()))
      add("source", program_.sources[op.source].place);
    add("lane", std::string(LaneName(lop.kind == LoweredOp::Kind::kStart ? lop.lane : Lane::kCompute)));
    if (lop.kind != LoweredOp::Kind::kStart || lop.lane == Lane::kHost) return;
    int64_t in = 0, out = 0;
    auto sum = [&](ValueId id, int64_t& bytes) {
      if (id != kNone) bytes += *program_.StorageBytes(program_.value(id).type);  // the cost model has read these sizes
    };
    ForEachOperand(op, [&](ValueId id) { sum(id, in); });
    for (ValueId id : op.results) sum(id, out);
    switch (node.type) {
      case ChakraNodeType::kMemLoad:
      case ChakraNodeType::kMemStore:
        add("tensor_size", static_cast<uint64_t>(lowered_.costs[lop.cost].bytes));
        return;
      case ChakraNodeType::kCommColl:
        add("comm_type", static_cast<int64_t>(CommTypeOf(op)));
        break;
      default:
        break;
    }
    add("comm_size", node.type == ChakraNodeType::kCommRecv ? out : in);
    const std::string_view axes = AxisOf(program_, op);
    add("pg_name", lop.group.size < 2 ? std::string("0") : axes.empty() ? program_.mesh[0].name : std::string(axes));
  }

  void Writes(const Op& op, uint64_t id) {
    for (ValueId result : op.results) {
      if (result == kNone) continue;
      const Value& value = program_.value(result);
      ValueId root = program_.RootOf(result);
      if (root == result) writers_[root].clear();  // a new storage
      if (root == result || value.placed) writers_[root].push_back(id);
    }
    for (ValueId operand : WrittenOperands(program_, op)) writers_[program_.RootOf(operand)].push_back(id);
  }

  const Simulation& s_;
  const Lowered& lowered_;
  const Program& program_;
  const RankRecord& record_;
  std::vector<Ids> writers_;                              // by root
  std::vector<Ids> given_;                                // by the last phase's gives
  std::map<std::pair<std::string, int64_t>, Ids> saved_;  // by name and micro-batch
  Ids waited_;                                            // transfers that were waited for since the last compute node
  int64_t last_compute_ = -1;
  int64_t last_on_lane_[kLaneCount] = {-1, -1, -1, -1, -1, -1, -1, -1};
  uint64_t next_id_ = 1;
  std::vector<ChakraNode> nodes_;
};

}  // namespace

std::string SimulationChakra(const Simulation& simulation, int32_t rank) {
  return Exporter(simulation, rank).Run();
}

}  // namespace interlace
