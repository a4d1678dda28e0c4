// explain.h — what a search decided, with its numbers, as text for people; read from the program's meta lines
// (search.*, tensor.*), so any program file explains itself.
#pragma once

#include <string>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

// Error: the program was not made by a search (says how to make one).
Result<std::string> Explain(const Program& program);

}  // namespace interlace
