// text.h — printing and parsing of programs; docs/ir.md has the grammar. Print(Parse(t)) == t for every printed t.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ir/program.h"

namespace interlace {

// The whole program as text.
std::string Print(const Program& program);
// The text with line numbers (from 1; 0: not printed), for messages.
struct PrintedProgram {
  std::string text;
  std::vector<int32_t> op_line;     // by op id
  std::vector<int32_t> value_line;  // by value id: the line that declares or defines it
  std::vector<int32_t> unit_line;   // by unit id
  std::vector<int32_t> run_line;    // by index in Program::order; empty when that is the default
  std::vector<int32_t> phase_line;  // by index in Program::phases
};
PrintedProgram PrintWithLines(const Program& program);
// One op, one type, for messages.
std::string PrintOp(const Program& program, const Op& op);
std::string PrintType(const Program& program, const Type& type);
// The body of a region (func.h) under a name: lines with a line end each.
std::string PrintFunc(const Program& body, std::string_view name);

// Parses text; `file` names it in messages. Errors: "file:line:col: what" and two more lines, the offending
// line and a caret. A newer version, a file that ends too early (no closing brace) and unknown lines are said as such.
Result<Program> Parse(std::string_view text, std::string_view file = "program");

}  // namespace interlace
