// Kernels of the collectives. On an axis of one rank nothing is sent: results alias their sources where that is safe.
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ir/memory_plan.h"
#include "ir/op_table.h"
#include "runtime/op_kernel.h"
#include "runtime/stream.h"

namespace interlace {

namespace {

void ThrowIfError(const Status& status) {
  if (!status.ok()) TORCH_CHECK(false, status.error().ToString());
}

int32_t Record(Frame& frame, Comm* comm, Result<Ticket> ticket) {
  if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
  frame.transfers.push_back({comm, *ticket, {}});
  return static_cast<int32_t>(frame.transfers.size()) - 1;
}

enum class Collective { kGather, kReduce, kAllReduce };

struct StartKernel final : KernelData {
  struct Item {
    ValueId operand, result;
    const Geometry* geometry;
    bool placed = false;
    bool may_alias = false;  // the result may share the operand's memory
    Target target;
  };
  Collective collective;
  Comm* comm = nullptr;  // nullptr: one rank
  // Of a reduction with replicas: on the grid of all its ranks, or (no grid) `comm` along the row and then `column`.
  RankGrid grid;
  Comm* column = nullptr;
  int64_t rows = 1;  // along the column, each of which ends with a part of the row's sum; 1: with all of it
  std::shared_ptr<LaneStreams> lanes;
  std::vector<Item> items;
  std::string label;
  at::Tensor receive_buffer;
  // > 0: not into a buffer that the transport keeps for the next one, which lives longer than the memory plan says.
  int64_t receive_bytes = 0;

  void OfferReceiveBuffer() const {
    comm->OfferReceiveBuffer(receive_bytes > 0 ? at::empty({receive_bytes}, at::kByte) : receive_buffer);
  }

  at::Tensor ResultOf(Frame& frame, const Item& item) const {
    return item.placed ? item.target.Get(frame) : Allocate(*item.geometry, frame.device, false);
  }

  void Run(Frame& frame) {
    if (comm == nullptr || collective == Collective::kAllReduce) {
      for (const Item& item : items) {
        const at::Tensor& source = frame.slots[item.operand];
        if (item.may_alias) {
          frame.slots[item.result] = source;
          continue;
        }
        at::Tensor out = ResultOf(frame, item);
        if (out.data_ptr() != source.data_ptr()) out.copy_(source);
        frame.slots[item.result] = std::move(out);
      }
      if (comm == nullptr) return;
      if (items.size() == 1) OfferReceiveBuffer();
      for (const Item& item : items) {
        frame.transfer_of[item.result] = Record(frame, comm, comm->StartAllReduce(frame.slots[item.result], label));
      }
      return;
    }
    std::vector<at::Tensor> sources, results;
    sources.reserve(items.size());
    results.reserve(items.size());
    for (const Item& item : items) {
      sources.push_back(frame.slots[item.operand]);
      results.push_back(ResultOf(frame, item));
      frame.slots[item.result] = results.back();
    }
    if (collective == Collective::kReduce) OfferReceiveBuffer();
    int64_t used = 0;
    for (size_t i = 0; i < results.size() && rows > 1; ++i) {
      const int64_t numbers = results[i].numel() * rows, bytes = numbers * results[i].element_size();
      results[i] = receive_buffer.defined() ? receive_buffer.narrow(0, used, bytes).view(results[i].scalar_type())
                                            : at::empty({numbers}, results[i].options());
      used += ArenaBytes(bytes);
    }
    Result<Ticket> ticket = collective == Collective::kGather ? comm->StartGather(sources, std::move(results), label)
                            : grid.within.empty()             ? comm->StartReduce(sources, results, label)
                                                  : comm->StartGridReduce(sources, std::move(results), grid, label);
    if (column != nullptr) {
      if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
      return ReduceAlongColumn(frame, *ticket, sources, results);
    }
    const int32_t index = Record(frame, comm, std::move(ticket));
    for (const Item& item : items) frame.transfer_of[item.result] = index;
  }

  // On a device neither this thread nor the compute stream waits for the row, but a stream of the lane, behind which
  // the column begins. The row's sources are then still read: they stay until the column has been waited for.
  void ReduceAlongColumn(Frame& frame, Ticket row, const std::vector<at::Tensor>& sources,
                         const std::vector<at::Tensor>& sums) {
    std::optional<OnStream> aside;
    if (lanes != nullptr) aside.emplace(*lanes, Lane::kReduce);
    ThrowIfError(comm->Wait(row));
    for (size_t i = 0; i < items.size(); ++i) {
      const at::Tensor& result = frame.slots[items[i].result];
      frame.transfer_of[items[i].result] =
          Record(frame, column,
                 rows > 1 ? column->StartReduce({sums[i]}, {result}, label) : column->StartAllReduce(result, label));
      frame.transfers.back().landed = [sources, sums] {};
    }
  }
};

struct WaitKernel final : KernelData {
  std::vector<ValueId> operands;
  void Run(Frame& frame) {
    for (ValueId id : operands) {
      const int32_t index = frame.transfer_of[id];
      if (index < 0) continue;
      frame.transfer_of[id] = -1;
      Transfer& transfer = frame.transfers[index];
      if (transfer.ticket == 0) continue;
      const Ticket ticket = transfer.ticket;
      transfer.ticket = 0;
      ThrowIfError(transfer.comm->Wait(ticket));
      if (transfer.landed) std::exchange(transfer.landed, {})();
    }
  }
};

}  // namespace

namespace {

// A rank's indices along the axes of a group, in its order.
std::vector<int> Along(const std::vector<Axis>& group, const std::string& axes, int64_t rank) {
  const AxisGroup along = GroupOf(group, axes);
  std::vector<int> out;
  for (int64_t i = 0; i < along.size; ++i) out.push_back(static_cast<int>(along.BaseOf(rank) + i * along.stride));
  return out;
}

// Whom a reduction meets beyond its own row.
Status JoinReplicas(const BuildContext& context, const Op& op, const Unit& unit, StartKernel& kernel) {
  if (context.program.AxisSize(unit.replicas) < 2) return Ok{};
  if (const auto grid = context.comms.find(context.program.DataAxes(unit)); grid != context.comms.end()) {
    std::vector<Axis> group;
    for (const Axis& axis : context.program.mesh) {
      if (NamesAxis(grid->first, axis.name)) group.push_back(axis);
    }
    const int64_t rank = grid->second->spec().rank;
    kernel.comm = grid->second;
    kernel.grid = {Along(group, unit.axis, rank), Along(group, unit.replicas, rank), unit.parted()};
    return Ok{};
  }
  const auto column = context.comms.find(unit.replicas);
  if (column == context.comms.end())
    return OpError(context, op, "no process group was given for the replicas \"" + unit.replicas + "\"");
  if (context.program.AxisSize(unit.axis) < 2) {  // a row of one: the column alone
    kernel.collective = Collective::kAllReduce;
    kernel.comm = column->second;
    return Ok{};
  }
  kernel.column = column->second;
  kernel.rows = unit.parted() ? context.program.AxisSize(unit.replicas) : 1;
  kernel.lanes = context.lanes;
  return Ok{};
}

}  // namespace

Result<Kernel> BuildCommKernel(const BuildContext& context, const Op& op) {
  INTERLACE_ASSIGN(std::vector<ValueId> operands, OperandsOf(op));
  if (IsWait(op)) {
    auto kernel = std::make_unique<WaitKernel>();
    // A coalesced start has one ticket under several values, a view of a result has none: the roots' own entries count.
    kernel->operands = operands;
    return MakeKernel(std::move(kernel));
  }
  const bool of_activations = TraitsOf(op).family == OpFamily::kCollective || TraitsOf(op).family == OpFamily::kPeer;
  if (of_activations && op.kind != OpKind::kAllReduceStart) return BuildExchangeKernel(context, op);
  auto kernel = std::make_unique<StartKernel>();
  kernel->receive_buffer = context.receive_buffer;
  if (context.on_heap) kernel->receive_bytes = ReceiveBytes(context.program, op);
  std::string axis;
  if (op.kind == OpKind::kGatherStart || op.kind == OpKind::kReduceStart) {
    kernel->collective = op.kind == OpKind::kGatherStart ? Collective::kGather : Collective::kReduce;
    if (op.units.empty() || op.units.size() != operands.size())
      return OpError(context, op, op.name + " needs units=[...], one per operand");
    const Unit& first = context.program.units[op.units[0]];
    axis = AxisOf(context.program, op);
    for (UnitId unit : op.units) {
      if (!SameAxes(context.program.units[unit], first))
        return OpError(context, op, "units of one collective must share their axes");
    }
    if (op.kind == OpKind::kReduceStart) INTERLACE_TRY(JoinReplicas(context, op, first, *kernel));
  } else if (op.kind == OpKind::kAllReduceStart) {
    kernel->collective = Collective::kAllReduce;
    const Arg* name = op.Attr("axis");
    if (!name) return OpError(context, op, "all_reduce.start needs axis=NAME");
    axis = name->text;
  } else {
    return OpError(context, op, "this runtime does not have the op " + op.name + " yet");
  }
  if (op.results.size() != operands.size()) return OpError(context, op, op.name + " needs as many results as operands");
  const int64_t size = context.program.AxisSize(axis);
  if (size > 1 && kernel->comm == nullptr) {
    const auto found = context.comms.find(axis);
    if (found == context.comms.end())
      return OpError(context, op, "no process group was given for the mesh axis \"" + axis + "\"");
    kernel->comm = found->second;
  }
  const bool whole = kernel->collective == Collective::kAllReduce;
  const int64_t factor = whole ? 1 : context.program.AxisSize(RanksOf(context.program, op).axes);
  kernel->label = op.name;
  for (UnitId unit : op.units) kernel->label += " u" + std::to_string(unit);
  for (size_t i = 0; i < operands.size(); ++i) {
    if (op.results[i] == kNone) return OpError(context, op, "every result of a collective must have a value");
    StartKernel::Item item;
    item.operand = operands[i];
    item.result = op.results[i];
    item.geometry = &context.geometry[op.results[i]];
    const Value& result = context.program.value(op.results[i]);
    item.placed = context.has_place(result.id);
    if (item.placed) item.target = TargetOf(context, result.id);
    const Geometry& from = context.geometry[operands[i]];
    const bool gather = kernel->collective == Collective::kGather;
    if ((gather ? item.geometry->elements : from.elements) !=
            factor * (gather ? from.elements : item.geometry->elements) ||
        from.dtype != item.geometry->dtype || !from.contiguous || !item.geometry->contiguous) {
      return OpError(
          context, op,
          "operand and result sizes of " + op.name + " do not fit an axis of " + std::to_string(size) + " ranks");
    }
    const bool fixed = context.is_fixed(operands[i]);
    if (!item.placed && from.sizes == item.geometry->sizes) {
      if (kernel->collective == Collective::kAllReduce) {
        item.may_alias = !fixed && context.dies_here(operands[i]);
      } else {
        // One rank: a gathered buffer is only read until the next update; a reduced gradient has no other writer.
        item.may_alias = kernel->comm == nullptr && (gather || !fixed);
      }
    }
    kernel->items.push_back(std::move(item));
  }
  return MakeKernel(std::move(kernel));
}

}  // namespace interlace
