// plan.h — a phase as the runtime runs it: a flat list of kernels, each with the slots to drop after it.
#pragma once

#include <memory>
#include <vector>

#include "base/result.h"
#include "runtime/allocator.h"
#include "runtime/op_kernel.h"

namespace interlace {

struct Instruction {
  Kernel::Run run = nullptr;
  void* data = nullptr;
  OpId op = kNone;
  int32_t index = 0;                         // of the op in its phase
  int32_t free_begin = 0, free_end = 0;      // range of Plan::frees: values whose last use this was
  int32_t expect_begin = 0, expect_end = 0;  // range of Plan::expected: what it asks the allocator for
  bool with_next = false;                    // the next one does its work (JoinUpdates)
};

struct Plan {
  const Phase* phase = nullptr;
  std::vector<Instruction> instructions;
  std::vector<ValueId> frees;
  std::vector<ExpectedBlock> expected;
  std::vector<ValueId> unused;  // inputs, takes and loads that no op of the phase uses: dropped at once
  std::vector<std::unique_ptr<KernelData>> data;
};

// `keep_operands`: operands stay in their slots until after the op (debug runs look at them).
// `receive_buffers`: by place, of reductions in the arena; or nullptr.
// Error: an op that cannot be run; it names the op.
Result<Plan> BuildPlan(const BuildContext& context, const Phase& phase, bool keep_operands,
                       const std::vector<at::Tensor>* receive_buffers = nullptr);

}  // namespace interlace
