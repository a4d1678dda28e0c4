// parse_internal.h — the parser: one pass over the text; every number is range-checked, nesting is bounded, and tables
// grow only with the file. Its methods live in parse_parts.cc (names, types, literals), parse_lines.cc (declarations),
// parse_rule.cc (rules), parse_func.cc (regions), parse.cc (phases).
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/scan.h"
#include "ir/program.h"

namespace interlace {

class TextParser {
 public:
  TextParser(std::string_view text, std::string_view file) : scan_(text, file) {}
  Result<Program> Run();

 private:
  // ---- errors ----
  Error FailAt(size_t pos, std::string message) const;
  // At a place, and where the scanner stands; the message as for MakeError.
  template <typename... Parts>
  Error Fail(size_t pos, const Parts&... parts) const {
    return FailAt(pos, MakeError(parts...).message);
  }
  template <typename... Parts>
  Error Fail(std::string_view first, const Parts&... parts) const {
    return Fail(scan_.pos(), first, parts...);
  }
  Error Expected(std::string_view what) const;
  Status Want(char c);
  template <typename Item>
  Status Items(char close, Item item);
  template <typename Item>
  Status InParentheses(Item item);
  Status WantWord(std::string_view word);
  Status EndLine();

  // ---- small pieces; blanks before them are skipped ----
  size_t Here() {
    scan_.SkipBlanks();
    return scan_.pos();
  }
  bool Eat(char c) {
    scan_.SkipBlanks();
    return scan_.Eat(c);
  }
  bool EatWord(std::string_view word) {
    scan_.SkipBlanks();
    return scan_.EatWord(word);
  }
  Result<std::string> Name(std::string_view what, bool dots = false);
  Result<int64_t> Int(int64_t min, int64_t max, std::string_view what);
  Result<std::string> String();
  Result<ValueId> ValueName();
  // A value that must be defined somewhere in the file.
  Result<ValueId> Use();
  Result<UnitId> UnitName();
  Result<DType> ParseDTypeHere();
  bool IsSymbol(std::string_view word) const;
  // The extent of a dim or number: up to a separator outside parentheses.
  std::string_view Token() const;
  Result<Dim> ParseDim();
  Status CheckSymbols(Dim dim, size_t pos);
  Result<std::vector<Dim>> DimList(char close);
  Result<Type> ParseType();
  // %id: type [place]
  Result<ValueId> Decl(ValueKind kind);

  // ---- literals ----
  Result<Arg> Literal(int depth);
  Result<Arg> ListLiteral(int depth);
  // Integers, floats, words, dims: told apart by the whole token.
  Result<Arg> Scalar();

  // ---- lines before the phases ----
  Status Header();
  Status ParseAll();
  Status Line();
  Status Meta();
  Status Mesh();
  Status StageLine();
  Status SharedBy(Param& param);
  Status SymbolLine();
  Status Step();
  Status RunLine();
  // Ids of groups, modules, sources and units count from 0 in the order of the lines.
  Result<int32_t> NextId(size_t next, std::string_view what);
  Status GroupLine();
  Result<Orthogonal> OrthogonalWords();
  Result<Factored> FactoredWords();
  // A rule's lines, down to its closing brace (parse_rule.cc).
  Status RuleLines();
  Result<RuleForm> RuleFormLines(const UpdateRule& rule);
  Result<RuleOp> RuleOpLine(const UpdateRule& rule);
  Result<RuleOperand> RuleRegister(const UpdateRule& rule, bool or_number);
  Status FuncLines();  // parse_func.cc
  Status ModuleLine();
  Status SourceLine();
  Result<std::string> AxisName();
  Result<std::string> AxisList();
  Status UnitLine();
  Result<bool> OneOf(std::string_view yes, std::string_view no);
  Status CutOf(Param& param);
  Status ParamLine();
  Status BufferLine();
  Status InputLine();
  Status ConstLine();
  Status StateLine();

  // ---- phases ----
  // "(", values that are defined somewhere, ")".
  Status Uses(std::vector<ValueId>& out);
  Status PhaseLine();
  // The ops up to a closing brace; `what`, which began at `pos`, is named where there is none.
  Status OpLines(const std::string& what, size_t pos, Phase& phase);
  Status CheckPending();
  Result<OpId> OpLine();
  Status CalledFunc(std::string_view& name);
  Status Results(Op& op);
  // Whether WORD "=" stands here.
  bool AtName();
  Status Args(Op& op);
  Status Tail(Op& op);
  Status Tag(Op& op, std::string_view word, size_t pos);
  Status Attribute(Op& op, std::string_view name, size_t pos);

  Scanner scan_;
  Program program_;
  std::unordered_set<std::string> symbols_;          // declared ones and rank_AXIS
  std::vector<bool> checked_dims_;                   // by expression: its symbols are known
  std::vector<std::pair<ValueId, size_t>> pending_;  // used before (or without) a definition
  int64_t value_limit_ = 0;                          // of ids in the body at hand; 0: in none
};

// Items with commas between them, down to the closing character.
template <typename Item>
Status TextParser::Items(char close, Item item) {
  if (Eat(close)) return Ok{};
  while (true) {
    INTERLACE_TRY(item());
    if (Eat(close)) return Ok{};
    if (!scan_.Eat(',')) return Expected("',' or '" + std::string(1, close) + "'");
  }
}

template <typename Item>
Status TextParser::InParentheses(Item item) {
  INTERLACE_TRY(Want('('));
  return Items(')', item);
}

}  // namespace interlace
