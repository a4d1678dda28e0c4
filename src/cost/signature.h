// signature.h — the key of an op in profile tables: what its time depends on, and nothing else.
//
//   %9: f32[4,32] = aten.mm(%2, %8)        →  aten.mm(f32[4,32],f32[32,32]{1,32})->f32[4,32]
// Operands and results by type (strides only when not contiguous), integers, booleans, words and strings as they are,
// floats as "f" (a learning rate changes no time), "rank" for an
// expression of the rank's number, "!" before a placed result. Modules, tags, units and streams do not
// count.
#pragma once

#include <string>

#include "ir/program.h"

namespace interlace {

// Appends the key of `op` to `out`. Error: a size that is not yet a number.
Status AppendSignature(const Program& program, const Op& op, std::string& out);
// The key under which profiles hold the op: its signature, and the attributes of our own ops that change the work.
Status AppendProfileKey(const Program& program, const Op& op, std::string& out);

}  // namespace interlace
