// text.h — printing and parsing of programs; docs/ir.md has the grammar. Print(Parse(t)) == t for every printed t.
#pragma once

#include <string>
#include <string_view>

#include "ir/program.h"

namespace interlace {

// The whole program as text.
std::string Print(const Program& program);
// One op, one type, for messages.
std::string PrintOp(const Program& program, const Op& op);
std::string PrintType(const Program& program, const Type& type);

// Parses text; `file` names it in messages. Errors: "file:line:col: what" and a second and third line with the offending line
// and a caret. A newer version, a file that ends too early (no closing brace) and unknown lines are said as such.
Result<Program> Parse(std::string_view text, std::string_view file = "program");

}  // namespace interlace
