// Kernels of offload.* and reload.*: they tell the bank (tier_bank.h) which storage moves.
#include "ir/residency.h"
#include "runtime/op_kernel.h"
#include "runtime/tier_bank.h"

namespace interlace {

namespace {

struct MoveKernel final : KernelData {
  TierBank* bank;
  std::vector<ValueId> roots;
  Place to;
  bool clean, fresh;
  void Run(Frame& frame) {
    for (ValueId root : roots) {
      const c10::Storage& storage = frame.slots[root].storage();
      Status status = Ok{};
      switch (to) {
        case Place::kLeaving:
          status = bank->StartOut(root, storage, clean);
          break;
        case Place::kOut:
          status = bank->FinishOut(root, storage);
          break;
        case Place::kComing:
          status = bank->StartIn(root, storage, fresh);
          break;
        case Place::kIn:
          status = bank->FinishIn(root);
          break;
      }
      TORCH_CHECK(status.ok(), status.error().ToString());
    }
  }
};

}  // namespace

Result<Kernel> BuildMoveKernel(const BuildContext& context, const Op& op) {
  INTERLACE_ASSIGN(std::vector<ValueId> operands, OperandsOf(op));
  auto kernel = std::make_unique<MoveKernel>();
  for (ValueId root : operands) {
    if (!context.bank->Has(root)) {  // a result: states were added by name
      INTERLACE_ASSIGN(const int64_t bytes, context.program.StorageBytes(context.program.value(root).type));
      const Status added = context.bank->Add(root, "value %" + std::to_string(root), bytes);
      if (!added.ok()) return OpError(context, op, added.error().message);
    }
  }
  kernel->bank = context.bank;
  kernel->roots = std::move(operands);
  kernel->to = MoveOf(op)->to;
  kernel->clean = IsClean(op);
  kernel->fresh = IsFresh(op);
  return MakeKernel(std::move(kernel));
}

}  // namespace interlace
