// Parsing of phases and ops.
#include <algorithm>
#include <limits>

#include "base/suggest.h"
#include "ir/func.h"
#include "ir/op_table.h"
#include "ir/parse_internal.h"
#include "ir/text.h"

namespace interlace {
// ---- phases ----

Status TextParser::PhaseLine() {
  const size_t pos = Here();
  Phase phase;
  INTERLACE_ASSIGN(phase.name, Name("a phase's name", true));
  if (program_.FindPhase(phase.name) != nullptr) return Fail(pos, "phase '", phase.name, "' is declared twice");
  if (EatWord("once")) phase.kind = PhaseKind::kStep;
  INTERLACE_TRY(WantWord("takes"));
  INTERLACE_TRY(InParentheses([&]() -> Status {
    INTERLACE_ASSIGN(ValueId id, Decl(ValueKind::kTake));
    phase.takes.push_back(id);
    return Ok{};
  }));
  INTERLACE_TRY(WantWord("gives"));
  INTERLACE_TRY(Uses(phase.gives));
  if (EatWord("saves")) {
    INTERLACE_TRY(InParentheses([&]() -> Status {
      INTERLACE_ASSIGN(ValueId id, Use());
      INTERLACE_TRY(WantWord("as"));
      INTERLACE_ASSIGN(std::string name, Name("a name for what is saved", true));
      phase.saves.push_back({std::move(name), id});
      return Ok{};
    }));
    scan_.SkipBlanks();
  }
  if (scan_.EatWord("loads")) {
    INTERLACE_TRY(InParentheses([&]() -> Status {
      INTERLACE_ASSIGN(ValueId id, Decl(ValueKind::kTake));
      INTERLACE_TRY(WantWord("of"));
      INTERLACE_ASSIGN(std::string name, Name("the name of what was saved", true));
      phase.loads.push_back({std::move(name), id});
      return Ok{};
    }));
  }
  INTERLACE_TRY(Want('{'));
  INTERLACE_TRY(EndLine());
  INTERLACE_TRY(OpLines("phase '" + phase.name + "'", pos, phase));
  program_.phases.push_back(std::move(phase));
  return EndLine();
}

Status TextParser::OpLines(const std::string& what, size_t pos, Phase& phase) {
  while (true) {
    scan_.SkipToContent();
    if (scan_.AtEnd()) return scan_.ErrorAt(pos, what + " has no closing '}'; the file seems to be cut");
    if (scan_.Eat('}')) return Ok{};
    INTERLACE_ASSIGN(OpId op, OpLine());
    phase.ops.push_back(op);
  }
}

Result<OpId> TextParser::OpLine() {
  Op& op = program_.AddOp("");
  bool skipped = scan_.Peek() == '_' && (scan_.PeekAt(1) == ',' || scan_.PeekAt(1) == ' ');
  if (scan_.Peek() == '%' || skipped) INTERLACE_TRY(Results(op));
  const size_t pos = Here();
  std::string_view name = scan_.Word(/*dots=*/true);
  if (name.empty()) return Expected("an op");
  if (name == "call" && scan_.Peek() == ' ') INTERLACE_TRY(CalledFunc(name));
  if (scan_.Peek() != '(') {
    // A new declaration where an op should be: the closing brace was lost.
    if (name == "phase" || name == "param")
      return Fail(pos, "'", name, "' inside a phase: a closing '}' is missing above");
    return Expected("'('");
  }
  scan_.Advance();
  op.SetName(std::string(name));
  INTERLACE_TRY(Args(op));
  if (Eat('{')) INTERLACE_TRY(Tail(op));
  INTERLACE_TRY(EndLine());
  return op.id;
}

// Of "call f0(": `name` becomes "call f0".
Status TextParser::CalledFunc(std::string_view& name) {
  const size_t pos = Here();
  const std::string_view func = scan_.Word();
  if (func.empty()) return Expected("the func that is called, such as f0");
  const std::string_view all(name.data(), static_cast<size_t>(func.data() + func.size() - name.data()));
  Op call;
  call.SetName(std::string(all));
  if (CallOf(FuncOf(program_, call)) != all) return Fail(pos, "'", func, "' is no func that is declared above");
  name = all;
  return Ok{};
}

Status TextParser::Results(Op& op) {
  while (true) {
    scan_.SkipBlanks();
    if (scan_.Peek() == '_') {
      scan_.Advance();
      op.results.push_back(kNone);
    } else {
      INTERLACE_ASSIGN(ValueId id, Decl(ValueKind::kResult));
      program_.value(id).def = op.id;
      program_.value(id).result_index = static_cast<int32_t>(op.results.size());
      op.results.push_back(id);
    }
    if (Eat('=')) return Ok{};
    if (!scan_.Eat(',')) return Expected("',' or '='");
  }
}

bool TextParser::AtName() {
  size_t pos = scan_.pos();
  bool named = !scan_.Word().empty() && scan_.Peek() == '=';
  scan_.Seek(pos);
  return named;
}

Status TextParser::Args(Op& op) {
  return Items(')', [&]() -> Status {
    scan_.SkipBlanks();
    if (AtName()) {
      std::string name(scan_.Word());
      scan_.Advance();
      INTERLACE_ASSIGN(Arg arg, Literal(0));
      op.named.push_back({std::move(name), std::move(arg)});
    } else {
      if (!op.named.empty()) return Fail("a positional argument must not follow a named one");
      INTERLACE_ASSIGN(Arg arg, Literal(0));
      op.args.push_back(std::move(arg));
    }
    return Ok{};
  });
}

Status TextParser::Tail(Op& op) {
  while (true) {
    if (Eat('}')) return Ok{};
    size_t pos = scan_.pos();
    std::string_view word = scan_.Word();
    if (word.empty()) return Expected("a tag or '}'");
    if (scan_.Eat('=')) {
      INTERLACE_TRY(Attribute(op, word, pos));
    } else {
      INTERLACE_TRY(Tag(op, word, pos));
    }
  }
}

Status TextParser::Tag(Op& op, std::string_view word, size_t pos) {
  if (const auto part = std::ranges::find(kPartNames, word); part != std::end(kPartNames)) {
    if (op.part != Part::kNone) return Fail(pos, "an op has one of fwd, bwd, upd");
    op.part = static_cast<Part>(part - std::begin(kPartNames));
    return Ok{};
  }
  bool numbered = word.size() > 1 && std::all_of(word.begin() + 1, word.end(), IsDigit);
  if (numbered && (word[0] == 'm' || word[0] == 's')) {
    bool module = word[0] == 'm';
    size_t count = module ? program_.modules.size() : program_.sources.size();
    const std::optional<int64_t> id = ParseNumber<int64_t>(word.substr(1));
    if (!id || *id >= static_cast<int64_t>(count))
      return Fail(pos, module ? "module " : "source ", word.substr(1), " is not declared above");
    (module ? op.module : op.source) = static_cast<int32_t>(*id);
    return Ok{};
  }
  return Fail(pos, "unknown tag '", word, "'", DidYouMean(word, {"fwd", "bwd", "upd"}));
}

Status TextParser::Attribute(Op& op, std::string_view name, size_t pos) {
  if (name == "lane") {
    size_t lane_pos = scan_.pos();
    std::string_view word = scan_.Word();
    op.lane = ParseLane(word);
    if (!op.lane) {
      return Fail(lane_pos, "unknown lane '", word, "'",
                  DidYouMean(word, {"compute", "gather", "reduce", "h2d", "d2h", "file", "p2p"}));
    }
    return Ok{};
  }
  if (name == "rng") {
    INTERLACE_ASSIGN(int64_t key, Int(0, std::numeric_limits<int64_t>::max(), "a random stream key"));
    op.rng = key;
    return Ok{};
  }
  if (name == "units" || name == "writes") {
    INTERLACE_TRY(Want('['));
    return Items(']', [&]() -> Status {
      if (name == "units") {
        INTERLACE_ASSIGN(UnitId unit, UnitName());
        op.units.push_back(unit);
      } else {
        INTERLACE_ASSIGN(ValueId id, Use());
        op.writes.push_back(id);
      }
      return Ok{};
    });
  }
  if (op.Attr(name) != nullptr) return Fail(pos, "attribute '", name, "' is given twice");
  INTERLACE_ASSIGN(Arg arg, Literal(0));
  op.attrs.push_back({std::string(name), std::move(arg)});
  return Ok{};
}

Result<Program> TextParser::Run() {
  Status status = ParseAll();
  if (status.ok()) return std::move(program_);
  return status.error();
}

Result<Program> Parse(std::string_view text, std::string_view file) {
  return TextParser(text, file).Run();
}

}  // namespace interlace
