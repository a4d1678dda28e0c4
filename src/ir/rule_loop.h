// rule_loop.h — a rule's form (rule.h) as C++: one loop over the elements, for a compiler to make fast.
//
//   extern "C" void rule_0123456789abcdef(char* const* flats, const double* numbers, double scale, long begin,
//                                         long end) {
//     typedef float F;
//     float* __restrict const p0 = (float*)flats[0];                  flats: weight, gradient, states
//     ...
//     const F n0 = (F)numbers[0], ...
//     for (long i = begin; i < end; ++i) {
//       F w = F(p0[i]), g = F(p1[i]) * s, s0 = F(p2[i]), t0;
//       s0 = mul(s0, n0);                                             the form's own lines
//       ...
//       p0[i] = float(w);
//     }
//   }
//
// Ops are functions that the text begins with. Each rounds by itself, in the order of the form, as in the runtime's
// kernel that goes op after op over pieces (runtime/kernels_rule.cc). So both give the same bits when the compiler
// neither contracts nor reorders: g++ -O3 -ffp-contract=off. No word of a program's text gets into it.
#pragma once

#include <string>
#include <vector>

#include "ir/dtype.h"
#include "ir/program.h"
#include "ir/rule.h"

namespace interlace {

struct RuleLoopText {
  std::string name;  // of the function; of what it computes alone, so that equal forms are one
  std::string text;
};

// `states`: how many flats follow weight and gradient. `dtype`: of all of them, a float.
RuleLoopText LoopOf(const RuleForm& form, int states, DType dtype);
// A file with the loops of all forms that a program's updates may take; empty: it has none. `on_host`: those alone that
// run on the host whatever the device is.
std::string RuleLoopsOf(const Program& program, bool on_host = false);
// A file with these, each once.
std::string FileOf(const std::vector<RuleLoopText>& loops);

}  // namespace interlace
