// verifier.h — the rules of docs/ir.md. Structural rules first (ids, defs before uses, places), then meaning (release,
// gathers and waits, phases, levels, units).
#pragma once

#include <vector>

#include "ir/program.h"

namespace interlace {

// All violations, in program order; empty means the program is valid at its level. Each has the op's line as `where`.
std::vector<Error> VerifyAll(const Program& program);
// The first violations (at most five) as one error.
Status Verify(const Program& program);

}  // namespace interlace
