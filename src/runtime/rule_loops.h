// rule_loops.h — what the forms of rules were compiled to (ir/rule_loop.h), in this process.
//
//   an executor is built      PlaceOf(form) → its place, still empty: steps go op after op (kernels_rule.cc)
//   a library is there        UseRuleLoops(path): the places of its loops are filled, and the next steps call them
//
// A loop is put to use if it gives the bits of the kernel that goes op after op. So places may be filled between any
// two steps and while one runs, and no rank has to know which of the two another one uses.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/rule.h"
#include "runtime/kernels.h"

namespace interlace {

using RulePlace = std::atomic<RuleLoop>;

// The place of a form on flats of `dtype`, `states` of which follow weight and gradient; the same one whenever it is
// asked for. nullptr: forms of this dtype have no loops.
const RulePlace* PlaceOf(const RuleForm& form, int states, c10::ScalarType dtype);

// Loads a library, which stays, and fills the places of the loops that it has. Gives the names of those that are left
// out because their bits are others. Error: it cannot be loaded.
Result<std::vector<std::string>> UseRuleLoops(const std::string& path);

}  // namespace interlace
