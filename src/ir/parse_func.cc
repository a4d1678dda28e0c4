// Parsing of regions (func.h).
#include <algorithm>
#include <utility>

#include "ir/func.h"
#include "ir/parse_internal.h"
#include "ir/text.h"

namespace interlace {

// The lines of a body are those of a phase, with values of its own; ids are checked against the body's own length.
Status TextParser::FuncLines() {
  const size_t pos = Here();
  INTERLACE_ASSIGN(const std::string name, Name("a func's name, such as f0"));
  const std::string wanted = "f" + std::to_string(program_.funcs.size());
  if (name != wanted) return Fail(pos, "funcs count up from f0: this one is ", wanted);
  const std::string_view text = scan_.text();
  const size_t end = std::min(text.find("\n}", pos), text.size());
  Program outer = std::move(program_);
  program_ = Program();
  auto outer_symbols = std::exchange(symbols_, {});
  auto outer_checked = std::exchange(checked_dims_, {});
  auto outer_pending = std::exchange(pending_, {});
  value_limit_ = static_cast<int64_t>(end - pos);
  Phase phase{"body", {}, {}, {}};
  INTERLACE_TRY(InParentheses([&]() -> Status {
    INTERLACE_ASSIGN(ValueId id, Decl(ValueKind::kInput));
    program_.inputs.push_back({id, std::to_string(program_.inputs.size())});
    return Ok{};
  }));
  INTERLACE_TRY(WantWord("gives"));
  INTERLACE_TRY(Uses(phase.gives));
  INTERLACE_TRY(Want('{'));
  INTERLACE_TRY(EndLine());
  INTERLACE_TRY(OpLines("func '" + name + "'", pos, phase));
  INTERLACE_TRY(CheckPending());
  program_.phases.push_back(std::move(phase));
  Func func = MakeFunc(std::move(program_));
  program_ = std::move(outer);
  program_.funcs.push_back(std::move(func));
  symbols_ = std::move(outer_symbols);
  checked_dims_ = std::move(outer_checked);
  pending_ = std::move(outer_pending);
  value_limit_ = 0;
  return EndLine();
}

}  // namespace interlace
