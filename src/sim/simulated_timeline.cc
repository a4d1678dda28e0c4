#include "sim/simulated_timeline.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "ir/op_table.h"
#include "sim/critical_path.h"

namespace interlace {

Timeline SimulatedTimeline(const ClusterSpec& cluster, int64_t ranks) {
  Timeline out;
  out.producer = "simulated on " + cluster.name;
  out.backend = cluster.cpu ? "tcp" : "nccl";
  out.world_size = ranks;
  out.device_name = cluster.device_name;
  out.device_memory_bytes = cluster.MemoryLimitBytes();
  return out;
}

void AddRank(Timeline& out, const Lowered& lowered, const MemoryCurve& memory, const EngineOutput& output,
             int32_t rank) {
  const Program& program = *lowered.program;
  auto describe = [&](TraceEvent& e, const Op& op) {
    e.op = op.name;
    e.module = ModuleOf(program, op);
    e.part = kPartNames[static_cast<size_t>(op.part)];
    if (op.source >= 0 && op.source < static_cast<int32_t>(program.sources.size()))
      e.source = program.sources[op.source].place;
    for (UnitId unit : op.units) e.detail += (e.detail.empty() ? "u" : " u") + std::to_string(unit);
  };
  auto elements = [&](ValueId id, int64_t& sum) {
    Result<int64_t> bytes = program.StorageBytes(program.value(id).type);
    if (bytes.ok()) sum += *bytes / DTypeBytes(program.value(id).type.dtype);
  };
  const RankRecord& r = output.ranks[rank];
  std::vector<int32_t> event_of(output.transfers.size(), -1);
  const std::vector<const LoweredOp*> issued = IssuedOps(lowered, r);
  for (size_t i = 0; i < issued.size(); ++i) {
    const int32_t id = r.transfers[i];
    const TransferRecord& t = output.transfers[id];
    const Op& op = program.op(issued[i]->op);
    event_of[id] = static_cast<int32_t>(out.events.size());
    TraceEvent& e = out.events.emplace_back();
    e.rank = rank;
    e.lane = static_cast<TraceLane>(issued[i]->lane);
    e.axis = std::string(ActivationAxisOf(program, op));
    e.start_ns = t.start_ps / 1000;
    e.duration_ns = t.end_ps / 1000 - e.start_ns;
    e.bytes = lowered.costs[issued[i]->cost].bytes;
    e.group_size = issued[i]->IsMessage() ? 2 : lowered.costs[issued[i]->cost].group_ranks;
    describe(e, op);
    ForEachOperand(op, [&](ValueId value) {
      elements(value, e.in_elements);
      e.dtype = std::string(DTypeName(program.value(value).type.dtype));
    });
    for (ValueId value : op.results) {
      if (value != kNone) elements(value, e.out_elements);
    }
  }
  TraceCounterTrack& live = out.counters.emplace_back();
  live.name = kLiveBytes;
  std::vector<int32_t> in_flight(program.num_values(), -1);
  std::map<std::pair<std::string_view, int64_t>, int32_t> saved;  // by name and micro-batch
  int64_t last_bytes = -1;
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    int32_t p = lowered.run[run];
    for (size_t i = 0; i < lowered.ops[p].size(); ++i) {
      const LoweredOp& lop = lowered.ops[p][i];
      int64_t instance = lowered.first[run] + static_cast<int64_t>(i);
      const Op& op = program.op(lop.op);
      int64_t start_ns = r.start_ps[instance] / 1000, end_ns = r.end_ps[instance] / 1000;
      if (const int64_t bytes = memory.At(lowered, run, i); bytes != last_bytes) {
        last_bytes = bytes;
        live.samples.push_back({rank, start_ns, static_cast<double>(last_bytes)});
      }
      if (lop.kind == LoweredOp::Kind::kStart) {
        for (ValueId value : op.results) {
          if (value != kNone) in_flight[value] = r.transfer_of[instance];
        }
      }
      bool wait = lop.kind == LoweredOp::Kind::kWait;
      if (!wait && end_ns == start_ns) continue;
      int32_t index = static_cast<int32_t>(out.events.size());
      TraceEvent& e = out.events.emplace_back();
      e.rank = rank, e.start_ns = start_ns, e.duration_ns = end_ns - start_ns, e.wait = wait;
      describe(e, op);
      if (program.stage && lowered.micro_batch[run] != kNone)  // whose turn it is, in a schedule of several
        e.detail += (e.detail.empty() ? "micro-batch " : ", micro-batch ") + std::to_string(lowered.micro_batch[run]);
      if (!wait) continue;
      std::vector<int32_t> arrows;
      ForEachOperand(op, [&](ValueId value) {
        if (in_flight[value] >= 0) arrows.push_back(in_flight[value]);
      });
      std::sort(arrows.begin(), arrows.end());
      arrows.erase(std::unique(arrows.begin(), arrows.end()), arrows.end());
      for (int32_t transfer : arrows) out.flows.push_back({event_of[transfer], index});
    }
    if (run + 1 == lowered.run.size()) continue;
    const int64_t micro_batch = lowered.micro_batch[run], next_micro_batch = lowered.micro_batch[run + 1];
    for (const Carried& save : lowered.phases[p]->saves) {
      if (in_flight[save.value] >= 0) saved[{save.name, micro_batch}] = in_flight[save.value];
    }
    std::vector<int32_t> given;
    for (ValueId id : lowered.phases[p]->gives) given.push_back(in_flight[id]);
    const Phase& next = *lowered.phases[lowered.run[run + 1]];
    for (size_t i = 0; i < next.takes.size(); ++i) in_flight[next.takes[i]] = i < given.size() ? given[i] : -1;
    for (const Carried& load : next.loads) {
      const auto found = saved.find({load.name, next_micro_batch});
      in_flight[load.value] = found == saved.end() ? -1 : found->second;
    }
  }
}

}  // namespace interlace
