// op_schema.h — from an op of the program to an operator of torch: its handle, its arguments in schema order, its
// `.out` form.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/file_operators.h"
#include "runtime/op_kernel.h"

namespace interlace {

// How one argument reaches the stack.
struct Push {
  enum class Kind : uint8_t { kConst, kSlot, kMoveSlot, kTensorList, kOptionalTensorList, kGenerator, kTarget };
  Kind kind = Kind::kConst;
  int32_t index = 0;  // of a constant, a value, or a list
};

struct BoundCall {
  std::optional<c10::OperatorHandle> op;
  std::vector<Push> pushes;
  std::vector<c10::IValue> constants;
  std::vector<std::vector<ValueId>> lists;  // kNone: an absent optional tensor
  std::vector<ValueCheck> value_checks;  // before each call, of programs from files
  bool takes_generator = false;
};

// "aten.sum.dim_IntList" → {"aten::sum", "dim_IntList"}.
c10::OperatorName OperatorNameOf(const std::string& name);

// Finds the operator and converts the op's arguments by the types of its schema: numbers where a tensor is wanted
// become 0-dim tensors that do not take part in type promotion, as in eager; dtype words become ScalarTypes; an omitted
// device is `device`. Error: unknown operator (a near one is suggested), missing, surplus or ill-typed arguments.
Result<BoundCall> BindCall(const BuildContext& context, const Op& op);

// The operator that computes the same straight into an output tensor: same arguments, one result, one trailing out
// argument, and a kernel of its own (forms generated as "compute, then copy" do not count). nullopt when there is none.
std::optional<c10::OperatorHandle> FindOutForm(const c10::OperatorHandle& op);

}  // namespace interlace
