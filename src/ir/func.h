// func.h — regions: a body of ATen ops under a name, which `call` runs as one op.
//
//   func f0(%0: f32[4,8], %1: f32[4,8]) gives (%3) {
//     %2: f32[4,8] = aten.silu(%0)
//     %3: f32[4,8] = aten.mul.Tensor(%2, %1)
//   }
//   ...
//     %9: f32[4,8] = call f0(%7, %8) {fwd m3}
//
// The body is the meaning of the call, what its time and its compiled kernel are known by, and what runs where there is
// no kernel. It has values, numbers and storages of its own; strides are part of the types. It computes: no writes, no
// random draws, no transfers; what it gives owns its storage, is no operand and is given once. Identical bodies are one
// func. The body is kept as a program of one phase whose inputs are the operands and whose gives are the results.
#pragma once

#include <string>
#include <vector>

#include "ir/program.h"

namespace interlace {

inline constexpr std::string_view kCallPrefix = "call ";  // of the op's name: "call f0"

// The index of the func that an op calls; kNone: it is no call, or of a func that the program does not have.
int32_t FuncOf(const Program& program, const Op& op);
// The operands of a body in their order, and what it gives.
std::vector<ValueId> OperandsOf(const Func& func);
const std::vector<ValueId>& GivenBy(const Func& func);
// The name of the op that calls it.
std::string CallOf(int32_t func);
// A body, complete and with dense ids, as a func: the text's digest is its key.
Func MakeFunc(Program body);
// The func with this body, added where there is none yet; its index.
int32_t AddFunc(Program& program, Program body);

}  // namespace interlace
