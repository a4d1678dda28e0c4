// own_operators.h — operators of ours that stand for torch's in steps on CPUs, with the same schemas, where they are
// faster. Their bits are not torch's.
#pragma once

#include "runtime/op_kernel.h"

namespace interlace {

// For aten.mm "interlace::mm"; nullptr: there is none, it is not faster for operands of these sizes, or the user wants
// torch's.
const char* OwnOperator(const BuildContext& context, const Op& op);

}  // namespace interlace
