// verifier.h — the rules of docs/ir.md. Structural rules first (ids, defs before uses, places), then meaning (release,
// gathers and waits, phases, levels, units).
#pragma once

#include <vector>

#include "ir/program.h"

namespace interlace {

// All violations, in program order; empty means the program is valid at its level. `where` is the line's number in
// the printed program; the message ends with that line and a caret.
std::vector<Error> VerifyAll(const Program& program);
// Whether a place lies within its root's bytes, as far as numbers tell (rank_* at both ends of its axis).
// Error: it does not.
Status CheckPlace(const Program& program, const Value& value);
// The first violations (at most five) as one error.
Status Verify(const Program& program);

}  // namespace interlace
