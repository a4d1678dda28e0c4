#include "cost/cost_model.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "cost/kernel_model.h"
#include "cost/signature.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/text.h"

namespace interlace {
namespace {

// Two transfers of one op: a sum within the shard axes, and then over the replicas.
OpCost OneAfterTheOther(const OpCost& a, const OpCost& b) {
  OpCost out = a.resource == Resource::kInterLink || b.group_ranks < 2 ? a : b;
  const auto time = [](const OpCost& cost) { return static_cast<double>(cost.latency_ps + cost.work_ps); };
  out.latency_ps = a.latency_ps + b.latency_ps;
  out.work_ps = a.work_ps + b.work_ps;
  out.finish_ps = a.finish_ps + b.finish_ps;
  out.bytes = a.bytes + b.bytes;
  out.group_ranks = a.group_ranks * b.group_ranks;
  const double total = time(a) + time(b);
  if (total > 0) out.core_share = (a.core_share * time(a) + b.core_share * time(b)) / total;
  return out;
}

Error AtOp(const Program& program, const Op& op, Error error) {
  if (error.where.empty()) error.where = PrintOp(program, op);
  return error;
}

}  // namespace

Result<int64_t> Picoseconds(double us) {
  double ps = std::ceil(us * 1e6);
  if (!(ps >= 0 && ps < static_cast<double>(kMaxOpPicoseconds)))
    return MakeError("one op takes ", us, " us, which does not fit in 64 bits");
  return static_cast<int64_t>(ps);
}

Result<CostModel> CostModel::Create(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile) {
  CostModel model(program, cluster, profile);
  model.ranks_ = program.Ranks();
  if (model.ranks_ < 1) return MakeError("the mesh has more ranks than fit in 64 bits");
  if (model.ranks_ > cluster.devices) {
    return MakeError("the program's mesh has ", model.ranks_, " ranks, the cluster '", cluster.name, "' has ",
                     cluster.devices, cluster.devices == 1 ? " device" : " devices",
                     "; take a larger cluster or a smaller mesh");
  }
  const std::vector<double>& given =
      profile != nullptr && !profile->interference.empty() ? profile->interference : cluster.interference_factors;
  if (given.size() == 28) {
    std::array<double, 28> factors;
    std::copy(given.begin(), given.end(), factors.begin());
    model.interference_ = Interference::FromFactors(factors);
  } else if (!cluster.interference.empty() && cluster.interference != "none") {
    int64_t nodes = (model.ranks_ + cluster.per_node - 1) / cluster.per_node;
    model.interference_ = *InterferenceOn(cluster, model.ranks_per_node(), nodes);
  }
  if (profile != nullptr) model.ReadPairs(*profile);
  return model;
}

// The classes are those of cluster.h. Where the tier is a file, its reads and writes are the two directions of copies.
void CostModel::ReadPairs(const ProfileTable& profile) {
  const std::string_view names[] = {"compute", "collective", cluster_.file_tier ? "file_read" : "h2d",
                                    cluster_.file_tier ? "file_write" : "d2h"};
  std::array<std::array<double, Interference::kClasses>, Interference::kClasses> slower;
  for (auto& row : slower) row.fill(0.0);
  for (const auto& [kinds, factors] : profile.together) {
    const auto a = std::find(std::begin(names), std::end(names), kinds.first) - names;
    const auto b = std::find(std::begin(names), std::end(names), kinds.second) - names;
    if (a == Interference::kClasses || b == Interference::kClasses) continue;  // of another tier
    slower[a][b] = factors.first;
    slower[b][a] = factors.second;
  }
  interference_.Measured(slower);
}

Result<OpCost> CostModel::Cost(const Op& op) {
  Result<OpCost> cost = OpCost{};
  if (const Exchange kind = TraitsOf(op).exchange; IsStart(op) && kind != Exchange::kNone) {
    cost = Collective(op, kind);
  } else if (op.kind == OpKind::kOffloadStart || op.kind == OpKind::kReloadStart) {
    if (!IsClean(op) && !IsFresh(op)) cost = Copy(op, op.kind == OpKind::kReloadStart);
  } else if (StepsOnHost(op)) {
    cost = HostStep(op);
  } else {
    cost = Compute(op);
  }
  if (!cost.ok()) return AtOp(*program_, op, cost.error());
  return cost;
}

Result<OpCost> CostModel::Compute(const Op& op) {
  OpCost cost;
  if (TakesNoTime(op)) return cost;
  key_.clear();
  INTERLACE_TRY(AppendProfileKey(*program_, op, key_));
  auto known = known_.find(std::string_view(key_));
  if (known != known_.end()) return known->second;
  cost.resource = Resource::kCompute;
  const OpTiming* timing = nullptr;
  if (profile_ != nullptr) {
    auto found = profile_->ops.find(std::string_view(key_));
    if (found != profile_->ops.end()) timing = &found->second;
  }
  INTERLACE_ASSIGN(KernelWork work, WorkOf(*program_, op));
  if (timing != nullptr) {
    INTERLACE_ASSIGN(cost.work_ps, Picoseconds(timing->us));
    cost.transient_bytes = timing->transient_bytes;
    cost.source = timing->measured ? OpCost::Source::kMeasured : OpCost::Source::kEstimated;
  } else if (work.kind == KernelWork::Kind::kFree) {
    cost.resource = Resource::kNone;
  } else {
    INTERLACE_ASSIGN(cost.work_ps, Picoseconds(KernelUs(cluster_, work)));
    cost.source = OpCost::Source::kEstimated;
  }
  if (work.kind != KernelWork::Kind::kFree) {
    ++coverage_.ops;
    coverage_.measured += cost.source == OpCost::Source::kMeasured;
  }
  known_.emplace(key_, cost);
  return cost;
}

Result<double> CostModel::OperandBytes(const Op& op, bool results) const {
  double bytes = 0;
  Status status = Ok{};
  auto add = [&](ValueId id) {
    if (id == kNone || !status.ok()) return;
    Result<int64_t> size = program_->StorageBytes(program_->value(id).type);
    if (size.ok()) {
      bytes += static_cast<double>(*size);
    } else {
      status = size.error();
    }
  };
  if (results) {
    for (ValueId id : op.results) add(id);
  } else {
    ForEachOperand(op, add);
  }
  INTERLACE_TRY(status);
  return bytes;
}

Result<OpCost> CostModel::Collective(const Op& op, Exchange kind) {
  auto [axis, replicas] = RanksOf(*program_, op);
  if (axis.empty() && program_->mesh.size() == 1) axis = program_->mesh[0].name;
  // A gather's whole buffer is its results, everything else is counted by what goes in (recv by what comes out).
  bool by_results = kind == Exchange::kGather || op.kind == OpKind::kRecvStart;
  INTERLACE_ASSIGN(double bytes, OperandBytes(op, by_results));
  int64_t units = std::max<int64_t>(static_cast<int64_t>(by_results ? op.results.size() : op.args.size()), 1);
  // Onto parts of shards a process group, too, goes along the rows first.
  const bool parts = op.kind == OpKind::kReduceStart && program_->units[op.units[0]].parted() && !cluster_.cpu;
  INTERLACE_ASSIGN(OpCost cost,
                   parts ? InRowsAndColumns(kind, axis, bytes, units) : CollectiveCost(kind, axis, bytes, units));
  if (!replicas.empty()) {
    INTERLACE_ASSIGN(cost, OntoReplicas(op, cost, bytes, units));
  }
  cost.sends = op.kind != OpKind::kRecvStart;
  cost.receives = op.kind != OpKind::kSendStart;
  return cost;
}

// A sum within the shard axes and then over the replicas: as measured together, or one after the other.
Result<OpCost> CostModel::OntoReplicas(const Op& op, const OpCost& within, double bytes, int64_t units) {
  const Unit& unit = program_->units[op.units[0]];
  const std::string ranks = RanksWord(program_->mesh, unit.axis, unit.replicas);
  if (profile_ != nullptr && profile_->collectives.contains({"reduce", ranks})) {
    GroupShape group = GroupShapeOf(program_->mesh, unit.replicas, cluster_.per_node);
    group.ranks *= program_->AxisSize(unit.axis);
    INTERLACE_ASSIGN(OpCost cost, Timed(Exchange::kReduce, group, ranks, bytes, units));
    cost.resource = Resource::kInterLink;  // gathers within the shard axes go on beside it
    return cost;
  }
  INTERLACE_ASSIGN(const double part, OperandBytes(op, /*results=*/true));
  INTERLACE_ASSIGN(const OpCost across, CollectiveCost(Exchange::kAllReduce, unit.replicas, part, units));
  return OneAfterTheOther(within, across);
}

// As our transport does: along the columns of a grid of ranks with a row's part of the bytes, along its rows with all.
Result<OpCost> CostModel::InRowsAndColumns(Exchange kind, std::string_view axes, double bytes, int64_t units) {
  AxisGroup column = GroupOf(program_->mesh, axes), row = column;
  row.size = RowOf(program_->mesh, axes);
  column.size /= row.size;
  column.stride *= row.size;
  const double part = bytes / static_cast<double>(row.size);
  INTERLACE_ASSIGN(const OpCost slow, Timed(kind, GroupShapeOf(column, cluster_.per_node), "", part, units));
  INTERLACE_ASSIGN(const OpCost fast, Timed(kind, GroupShapeOf(row, cluster_.per_node), "", bytes, units));
  return OneAfterTheOther(slow, fast);
}

Result<OpCost> CostModel::CollectiveCost(Exchange kind, std::string_view axis, double bytes, int64_t units) {
  const std::string ranks = RanksWord(program_->mesh, axis);
  if (cluster_.cpu && (kind == Exchange::kGather || kind == Exchange::kReduce) && RowOf(program_->mesh, axis) > 0 &&
      (profile_ == nullptr || !profile_->collectives.contains({std::string(ExchangeName(kind)), ranks})))
    return InRowsAndColumns(kind, axis, bytes, units);
  return Timed(kind, GroupShapeOf(program_->mesh, axis, cluster_.per_node), ranks, bytes, units);
}

Result<OpCost> CostModel::Timed(Exchange kind, GroupShape group, const std::string& ranks, double bytes,
                                int64_t units) {
  OpCost cost;
  cost.group_ranks = group.ranks;
  cost.resource = group.within_node() ? Resource::kIntraLink : Resource::kInterLink;
  cost.sends = cost.receives = true;
  if (kind == Exchange::kPointToPoint && group.ranks < 2) group.ranks = 2;
  if (group.ranks < 2) return cost;
  int64_t messages = cluster_.coalesce ? 1 : units;
  CollectiveTime time = CollectiveTimeOf(cluster_, group, kind, bytes, messages);
  cost.source = OpCost::Source::kEstimated;
  double core_us = cluster_.comm_core_us_per_mb * time.moved_bytes / 1e6, finish_us = 0;
  if (profile_ != nullptr) {
    std::pair<std::string, std::string> key{ExchangeName(kind), ranks};
    // A message has two ends whatever its group: on a host it takes what was measured between two of all ranks.
    if (kind == Exchange::kPointToPoint && group.within_node() && !profile_->collectives.contains(key))
      key.second = std::to_string(ranks_);
    double size = bytes / static_cast<double>(messages), count = static_cast<double>(messages);
    auto at = [&](const ProfileTable::Sweeps& sweeps, double where) {
      auto sweep = sweeps.find(key);
      return sweep == sweeps.end() ? std::nullopt : sweep->second.Us(where);
    };
    if (std::optional<double> total = at(profile_->collectives, size)) {
      // In a profile a collective's time holds all three: the latency of the smallest, the transfer, and what the
      // rank's own thread does when the data has come.
      std::optional<double> core = at(profile_->core, size);
      // Where ranks share cores, none of which is idle while another rank can run: no less than what all of them work.
      if (cluster_.cpu && core && ranks_per_node() > cluster_.cores) total = std::max(*total, *core / FairCores());
      double finish = std::min(at(profile_->finish, size).value_or(0), *total);
      double moving = *total - finish;
      double least = std::min(moving, *at(profile_->collectives, 0));
      time.latency_us = least * count;
      time.transfer_us = (moving - least) * count;
      if (core) core_us = std::max(*core - finish, 0.0) * count;
      finish_us = finish * count;
      cost.source = OpCost::Source::kMeasured;
      if (cluster_.cpu) {
        INTERLACE_ASSIGN(cost.issue_ps, Picoseconds(profile_->issue_us.value_or(0)));
      }
    }
  }
  INTERLACE_ASSIGN(cost.latency_ps, Picoseconds(time.latency_us));
  INTERLACE_ASSIGN(cost.work_ps, Picoseconds(time.transfer_us));
  cost.bytes = static_cast<int64_t>(std::min(time.moved_bytes, 9e18));
  double total_us = time.latency_us + time.transfer_us;
  if (cluster_.cpu && total_us > 0) {
    // All ranks of a host transfer at once, and the time measured so holds what they take from one another: a transfer
    // that runs beside nothing else must come out as measured.
    cost.core_share = std::min(FairCores(), core_us / total_us);
    if (cost.source != OpCost::Source::kMeasured) cost.core_share = std::min(cost.core_share, 1.0);
    INTERLACE_ASSIGN(cost.finish_ps, Picoseconds(finish_us));
  }
  return cost;
}

Result<OpCost> CostModel::Copy(const Op& op, bool to_device) {
  INTERLACE_ASSIGN(double bytes, OperandBytes(op, /*results=*/false));
  return CopyCost(LaneOf(op), to_device, bytes);
}

// On CPUs the host's cores are the device's: the same kernel, on a core beside the compute lane.
Result<OpCost> CostModel::HostStep(const Op& op) {
  OpCost cost;
  if (cluster_.cpu) {
    INTERLACE_ASSIGN(cost, Compute(op));
    cost.core_share = 1;
  }
  INTERLACE_ASSIGN(const KernelWork work, WorkOf(*program_, op));
  if (!cluster_.cpu) {
    INTERLACE_ASSIGN(cost.work_ps, Picoseconds(work.bytes / (cluster_.HostMemoryGbPerS() * 1e3)));
    cost.source = OpCost::Source::kEstimated;
  }
  cost.resource = Resource::kHostMemory;
  cost.bytes = static_cast<int64_t>(std::min(work.bytes, 9e18));
  return cost;
}

Result<OpCost> CostModel::CopyCost(Lane lane, bool to_device, double bytes) {
  OpCost cost;
  const char* kind;
  double gb_per_s;
  const bool link = lane == (to_device ? Lane::kH2D : Lane::kD2H);
  if (lane == Lane::kFile || (link && cluster_.file_tier)) {
    cost.resource = Resource::kFile;
    cost.receives = to_device;
    cost.sends = !to_device;
    kind = to_device ? "file_read" : "file_write";
    gb_per_s = to_device ? cluster_.file_read_gb_per_s : cluster_.file_write_gb_per_s;
  } else if (link) {
    cost.resource = to_device ? Resource::kHostToDevice : Resource::kDeviceToHost;
    kind = to_device ? "h2d" : "d2h";
    gb_per_s = to_device ? cluster_.h2d_gb_per_s : cluster_.d2h_gb_per_s;
  } else {
    return MakeError("'", to_device ? "reload.start" : "offload.start", "' cannot run on the lane '", LaneName(lane),
                     "'");
  }
  double latency_us = cluster_.copy_us, transfer_us = bytes / (gb_per_s * 1e3);
  cost.source = OpCost::Source::kEstimated;
  if (profile_ != nullptr) {
    auto sweep = profile_->copies.find(kind);
    if (sweep != profile_->copies.end()) {
      double us = *sweep->second.Us(bytes);
      latency_us = std::min(us, *sweep->second.Us(0));
      transfer_us = us - latency_us;
      cost.source = OpCost::Source::kMeasured;
    }
  }
  if (cost.resource == Resource::kFile && cluster_.tier_gb_per_s > 0) {  // the rest of the store is for other ranks
    const double limited_us = bytes / (cluster_.tier_gb_per_s * 1e3);
    if (limited_us > transfer_us) {
      cost.store_share = transfer_us / limited_us;
      transfer_us = limited_us;
    }
  }
  INTERLACE_ASSIGN(cost.latency_ps, Picoseconds(latency_us));
  INTERLACE_ASSIGN(cost.work_ps, Picoseconds(transfer_us));
  cost.bytes = static_cast<int64_t>(std::min(bytes, 9e18));
  return cost;
}

}  // namespace interlace
