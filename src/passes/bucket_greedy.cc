#include "passes/bucket_greedy.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "passes/phase_memory.h"

namespace interlace {
namespace {

// From the first use of a gather to that of the next one.
struct ComputeStep {
  int64_t time_ps = 0;  // Tc_i
  int64_t peak = 0;     // Mc_i
};

struct OpenBucket {
  std::vector<size_t> gathers;
  int64_t bytes = 0, units = 0;  // of the gather
  int64_t reduce_bytes = 0, reduce_units = 0;
  int64_t time_ps = 0;  // compute of its step
  int64_t peak = 0;     // Mc
};

class GreedyWalk {
 public:
  GreedyWalk(const Program& program, const Transfers& transfers, CostModel& model, const GreedyOptions& options)
      : program_(program), transfers_(transfers), model_(model), options_(options) {
    for (const Reduce& reduce : transfers.reduces) {
      for (size_t i = 0; i < reduce.units.size(); ++i) flat_of_[reduce.units[i]] = reduce.flats[i];
    }
  }

  // Gathers `first` to before `last`, which lie in one part that ends before skeleton op `end`.
  Status Run(size_t first, size_t last, int32_t end, bool backward, std::vector<std::vector<size_t>>& out) {
    OpenBucket open, current, before;  // step k, k - 1, k - 2
    bool any = false;
    for (size_t i = first; i < last; ++i) {
      const Gather& gather = transfers_.gathers[i];
      INTERLACE_ASSIGN(ComputeStep step, StepOf(gather.need, i + 1 < last ? transfers_.gathers[i + 1].need : end));
      INTERLACE_ASSIGN(bool joins, any ? Joins(open, current, before, gather, step, backward) : Result<bool>(false));
      if (any && !joins) {
        out.push_back(open.gathers);
        before = std::move(current);
        current = std::move(open);
        open = {};
      }
      any = true;
      INTERLACE_TRY(Add(open, i, step));
    }
    if (any) out.push_back(open.gathers);
    return Ok{};
  }

 private:
  Result<bool> Joins(const OpenBucket& open, const OpenBucket& current, const OpenBucket& before, const Gather& gather,
                     const ComputeStep& step, bool backward) {
    const Unit& unit = program_.units[gather.units[0]];
    const std::string& axis = unit.axis;
    if (!SameAxes(program_.units[transfers_.gathers[open.gathers[0]].units[0]], unit)) return false;
    const auto units = static_cast<int64_t>(gather.units.size());
    INTERLACE_ASSIGN(double time, Time(Exchange::kGather, axis, open.bytes + gather.bytes, open.units + units));
    if (backward) {
      INTERLACE_ASSIGN(double reduce, Time(Exchange::kReduce, axis, before.reduce_bytes, before.reduce_units));
      time += reduce;
    }
    return time <= static_cast<double>(current.time_ps) && step.peak <= options_.limit - open.peak;
  }

  Status Add(OpenBucket& open, size_t i, const ComputeStep& step) {
    const Gather& gather = transfers_.gathers[i];
    open.gathers.push_back(i);
    open.bytes += gather.bytes;
    open.units += static_cast<int64_t>(gather.units.size());
    for (UnitId unit : gather.units) {
      auto flat = flat_of_.find(unit);
      if (flat == flat_of_.end()) continue;
      INTERLACE_ASSIGN(int64_t bytes, program_.StorageBytes(program_.value(flat->second).type));
      open.reduce_bytes += bytes;
      ++open.reduce_units;
    }
    open.time_ps += step.time_ps;
    open.peak += step.peak;
    return Ok{};
  }

  // Picoseconds.
  Result<double> Time(Exchange kind, const std::string& axis, int64_t bytes, int64_t units) {
    if (units == 0) return 0.0;
    if (options_.model_time) {
      INTERLACE_ASSIGN(OpCost cost, model_.CollectiveCost(kind, axis, static_cast<double>(bytes), units));
      return static_cast<double>(TimeAlone(cost));
    }
    const ClusterSpec& cluster = model_.cluster();
    const LinkSpec& link = cluster.devices > cluster.per_node ? cluster.inter : cluster.intra;
    return (link.alpha_us + static_cast<double>(bytes) / (link.gb_per_s * 1e3)) * 1e6;
  }

  Result<ComputeStep> StepOf(int32_t first, int32_t end) {
    ComputeStep step;
    for (int32_t i = first; i < end; ++i) {
      const Op& op = transfers_.op(i);
      INTERLACE_ASSIGN(OpCost cost, model_.Cost(op));
      if (cost.resource != Resource::kCompute) continue;
      step.time_ps += cost.work_ps;
      int64_t bytes = cost.transient_bytes;
      std::unordered_set<ValueId> storages;
      Status status = Ok{};
      auto add = [&](ValueId id) {
        if (id == kNone || !status.ok() || !storages.insert(program_.RootOf(id)).second) return;
        Result<int64_t> size = program_.StorageBytes(program_.value(program_.RootOf(id)).type);
        if (size.ok()) bytes += *size;
        if (!size.ok()) status = size.error();
      };
      ForEachOperand(op, add);
      for (ValueId id : op.results) add(id);
      INTERLACE_TRY(status);
      step.peak = std::max(step.peak, bytes);
    }
    return step;
  }

  const Program& program_;
  const Transfers& transfers_;
  CostModel& model_;
  const GreedyOptions& options_;
  std::unordered_map<UnitId, ValueId> flat_of_;  // gradients that this phase reduces
};

}  // namespace

Result<std::vector<std::vector<size_t>>> GreedyBuckets(const Program& program, const Transfers& transfers,
                                                       CostModel& model, const GreedyOptions& options) {
  GreedyWalk walk(program, transfers, model, options);
  const std::vector<Gather>& gathers = transfers.gathers;  // by need
  size_t backward = 0, end = 0;
  while (backward < gathers.size() && gathers[backward].need < transfers.backward_begin()) ++backward;
  for (end = backward; end < gathers.size() && gathers[end].need < transfers.size();) ++end;
  std::vector<std::vector<size_t>> out;
  INTERLACE_TRY(walk.Run(0, backward, transfers.backward_begin(), false, out));
  INTERLACE_TRY(walk.Run(backward, end, transfers.size(), true, out));
  return out;
}

}  // namespace interlace
