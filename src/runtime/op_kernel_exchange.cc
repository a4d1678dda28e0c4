// Kernels of the transfers of activations along a mesh axis: all_gather, reduce_scatter, all_to_all, broadcast, send,
// recv. The transport moves flat memory, one part a rank; what is cut or put together along a dimension behind others is
// packed before the start, and unpacked when it has come: in the memory plan's place for it (ReceiveBytes), if it has one.
//
//   all_gather dim=1 of [2,3] over two ranks:   [2,3] -> two parts [2][2,3] -> [2,2,3] -> [2,6]
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ir/memory_plan.h"
#include "ir/op_table.h"
#include "runtime/allocator.h"
#include "runtime/op_kernel.h"

namespace interlace {

namespace {

// The equal parts of x along a dimension, one after the other: [n, ...].
at::Tensor Parts(const at::Tensor& x, int64_t dim, int64_t n) {
  return x.unflatten(dim, {n, x.size(dim) / n}).movedim(dim, 0);
}

// Whether they are pieces of a contiguous x, one behind the other.
bool LieInARow(const at::Tensor& x, int64_t dim) {
  return std::all_of(x.sizes().begin(), x.sizes().begin() + dim, [](int64_t size) { return size == 1; });
}

// Parts side by side along a dimension: the inverse.
at::Tensor SideBySide(const at::Tensor& parts, int64_t dim) {
  return parts.movedim(0, dim).flatten(dim, dim + 1);
}

struct ExchangeKernel final : KernelData {
  struct Item {
    ValueId operand = kNone, result = kNone;
    const Geometry* geometry = nullptr;
    bool placed = false;
    Target target;
  };
  OpKind kind = OpKind::kUnknown;
  Comm* comm = nullptr;  // nullptr: one rank
  int64_t ranks = 1, dim = 0, to = 0, root = 0, peer = 0;
  std::vector<Item> items;
  std::string label;
  at::Tensor receive_buffer;

  void Run(Frame& frame) {
    for (const Item& item : items) {
      at::Tensor out = item.placed ? item.target.Get(frame) : Allocate(*item.geometry, frame.device, false);
      const at::Tensor source = item.operand == kNone ? at::Tensor() : frame.slots[item.operand];
      frame.slots[item.result] = out;
      if (comm == nullptr) {
        if (source.defined() && kind != OpKind::kSendStart) out.copy_(source);
        continue;
      }
      std::function<void()> landed;
      Result<Ticket> ticket = Start(source, out, landed);
      if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
      frame.transfer_of[item.result] = static_cast<int32_t>(frame.transfers.size());
      frame.transfers.push_back({comm, *ticket, std::move(landed)});
    }
  }

  Result<Ticket> Start(const at::Tensor& source, const at::Tensor& out, std::function<void()>& landed) const {
    // What travels, and where it lands, is given back when the transfer has ended: within this op or long after it.
    const ArenaHook::Outside mine;
    const auto flat = [](const at::Tensor& x) { return x.contiguous().view(-1); };
    int64_t used = 0;  // of the place
    const auto place = [&](at::IntArrayRef sizes) {
      if (!receive_buffer.defined()) return at::empty(sizes, (source.defined() ? source : out).options());
      const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(source.itemsize());
      const at::Tensor there = receive_buffer.narrow(0, used, bytes).view(source.scalar_type()).view(sizes);
      used += ArenaBytes(bytes);
      return there;
    };
    const auto packed = [&](const at::Tensor& x) {
      if (LieInARow(x, dim)) return flat(x);
      const at::Tensor parts = Parts(x, dim, ranks);
      return place(parts.sizes()).copy_(parts).view(-1);
    };
    // Where a whole result comes to.
    at::Tensor land = out;
    if (!out.is_contiguous() && kind != OpKind::kSendStart) {
      land = at::empty(out.sizes(), out.options());
      landed = [out, land] { out.copy_(land); };
    }
    switch (kind) {
      case OpKind::kAllGatherStart: {
        if (LieInARow(out, dim)) return comm->StartGather({flat(source)}, {land.view(-1)}, label);
        std::vector<int64_t> sizes = source.sizes().vec();
        sizes.insert(sizes.begin(), ranks);
        const at::Tensor parts = place(sizes);
        landed = [out, parts, along = dim] { out.copy_(SideBySide(parts, along)); };
        return comm->StartGather({flat(source)}, {parts.view(-1)}, label);
      }
      case OpKind::kReduceScatterStart: {
        const at::Tensor sent = packed(source);
        if (receive_buffer.defined())
          comm->OfferReceiveBuffer(receive_buffer.narrow(0, used, receive_buffer.numel() - used));
        return comm->StartReduce({sent}, {land.view(-1)}, label);
      }
      case OpKind::kAllToAllStart: {
        const at::Tensor sent = packed(source);
        if (LieInARow(out, to)) return comm->StartAllToAll(sent, land.view(-1), label);
        const at::Tensor parts = place(Parts(source, dim, ranks).sizes());
        landed = [out, parts, along = to] { out.copy_(SideBySide(parts, along)); };
        return comm->StartAllToAll(sent, parts.view(-1), label);
      }
      case OpKind::kBroadcastStart:
        land.copy_(source);
        return comm->StartBroadcast(land.view(-1), root, label);
      case OpKind::kSendStart:
        return comm->StartSend(flat(source), peer, label);
      default:
        return comm->StartRecv(land.view(-1), peer, label);
    }
  }
};

}  // namespace

Result<Kernel> BuildExchangeKernel(const BuildContext& context, const Op& op) {
  INTERLACE_ASSIGN(std::vector<ValueId> operands, OperandsOf(op));
  auto kernel = std::make_unique<ExchangeKernel>();
  kernel->kind = op.kind;
  kernel->label = op.name;
  const std::string axis(AxisOf(context.program, op));
  kernel->ranks = context.program.AxisSize(axis);
  for (const auto& [name, place] : {std::pair{"dim", &kernel->dim}, std::pair{"to", &kernel->to},
                                    std::pair{"root", &kernel->root}, std::pair{"peer", &kernel->peer}}) {
    const Arg* arg = op.Attr(name);
    if (arg != nullptr && arg->kind == Arg::Kind::kInt && arg->integer.is_const()) *place = arg->integer.value;
  }
  if (kernel->ranks > 1) {
    const bool message = TraitsOf(op).family == OpFamily::kPeer;
    const auto found = context.comms.find(message ? MessagesAlong(axis, ChannelOf(op)) : axis);
    if (found == context.comms.end())
      return OpError(context, op, "no process group was given for the mesh axis \"" + axis + "\"");
    kernel->comm = found->second;
  }
  for (size_t i = 0; i < op.results.size(); ++i) {
    ExchangeKernel::Item item;
    if (i < operands.size()) item.operand = operands[i];
    item.result = op.results[i];
    if (item.result == kNone) return OpError(context, op, "every result of a transfer must have a value");
    item.geometry = &context.geometry[item.result];
    item.placed = context.has_place(item.result);
    if (item.placed) item.target = TargetOf(context, item.result);
    kernel->items.push_back(std::move(item));
  }
  if (kernel->items.size() == 1) kernel->receive_buffer = context.receive_buffer;
  return MakeKernel(std::move(kernel));
}

}  // namespace interlace
