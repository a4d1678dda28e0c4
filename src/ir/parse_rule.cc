// Parsing and printing of rules (rule.h): the only declarations of more than one line.
#include <algorithm>

#include "base/append.h"
#include "base/suggest.h"
#include "ir/parse_internal.h"
#include "ir/print_rule.h"

namespace interlace {
namespace {

// The index in "t12", "n3"; -1: it is no such word.
int IndexIn(std::string_view word, char letter) {
  if (word.size() < 2 || word[0] != letter || (word.size() > 2 && word[1] == '0')) return -1;
  const int index = ParseNumber<int>(word.substr(1)).value_or(-1);
  return index < 100000 ? index : -1;
}

bool IsReserved(std::string_view word) {
  return word == "w" || word == "g" || IndexIn(word, 't') >= 0 || IndexIn(word, 'n') >= 0;
}

void PrintOperand(const UpdateRule& rule, RuleOperand operand, std::string& out) {
  const int named = 2 + static_cast<int>(rule.states.size());
  if (IsNumber(operand)) return Append(out, 'n', NumberIndex(operand));
  if (operand < 2) return Append(out, operand == 0 ? 'w' : 'g');
  if (operand < named) return Append(out, rule.states[operand - 2]);
  Append(out, 't', operand - named);
}

}  // namespace

void PrintRule(const UpdateRule& rule, std::string& out) {
  Append(out, "rule ", rule.id, ' ');
  AppendQuoted(out, rule.name);
  out += " (";
  for (size_t i = 0; i < rule.states.size(); ++i) out += (i == 0 ? "" : ", ") + rule.states[i];
  out += ") {\n";
  for (const RuleForm& form : rule.forms) {
    out += "  form {\n";
    for (const RuleOp& op : form.ops) {
      out += "    ";
      PrintOperand(rule, op.result, out);
      Append(out, " = ", TraitsOf(op.code).name, '(');
      for (int i = 0; i < TraitsOf(op.code).operands; ++i) {
        if (i > 0) out += ", ";
        PrintOperand(rule, op.operands[i], out);
      }
      out += ")\n";
    }
    out += "  }\n";
  }
  out += "}\n";
}

Result<RuleOperand> TextParser::RuleRegister(const UpdateRule& rule, bool or_number) {
  const size_t pos = Here();
  INTERLACE_ASSIGN(const std::string word, Name(or_number ? "w, g, a state, t0 or n0" : "w, g, a state or t0"));
  if (word == "w") return RuleOperand{0};
  if (word == "g") return RuleOperand{1};
  const auto state = std::find(rule.states.begin(), rule.states.end(), word);
  if (state != rule.states.end()) return static_cast<RuleOperand>(2 + (state - rule.states.begin()));
  const int first = 2 + static_cast<int>(rule.states.size());
  const int temporary = IndexIn(word, 't'), number = IndexIn(word, 'n');
  if (temporary >= 0 && first + temporary < kMaxRuleRegisters) return static_cast<RuleOperand>(first + temporary);
  if (or_number && number >= 0 && number < kMaxRuleNumbers) return static_cast<RuleOperand>(-1 - number);
  if (temporary >= 0 || (or_number && number >= 0)) return Fail(pos, "'", word, "' is beyond what a rule may have");
  std::vector<std::string_view> known(rule.states.begin(), rule.states.end());
  return Fail(pos, "'", word, "' is not of this rule", DidYouMean(word, known),
              or_number ? "; it has w, g, its states, t0, t1, ... and n0, n1, ..."
                        : "; what an op writes is w, g, a state or t0, t1, ...");
}

Result<RuleOp> TextParser::RuleOpLine(const UpdateRule& rule) {
  RuleOp op;
  INTERLACE_ASSIGN(op.result, RuleRegister(rule, /*or_number=*/false));
  INTERLACE_TRY(Want('='));
  const size_t pos = Here();
  INTERLACE_ASSIGN(const std::string name, Name("an op of one element"));
  const std::optional<RuleCode> code = RuleCodeOf(name);
  if (!code) return Fail(pos, "unknown op of a rule '", name, "'", DidYouMean(name, RuleOpNames()));
  op.code = *code;
  const RuleTraits& traits = TraitsOf(op.code);
  for (int i = 0; i < traits.operands; ++i) {
    INTERLACE_TRY(Want(i == 0 ? '(' : ','));
    const size_t at = Here();
    INTERLACE_ASSIGN(op.operands[i], RuleRegister(rule, /*or_number=*/true));
    const bool number = IsNumber(op.operands[i]);
    if (number && (traits.numbers >> i & 1) == 0) return Fail(at, "operand ", i + 1, " of ", name, " is no number");
    if (!number && traits.scaled && i == traits.operands - 1)
      return Fail(at, "the last operand of ", name, " is a number: n0, n1, ...");
  }
  INTERLACE_TRY(Want(')'));
  INTERLACE_TRY(EndLine());
  return op;
}

// What a form reads within one element it has written before.
Result<RuleForm> TextParser::RuleFormLines(const UpdateRule& rule) {
  RuleForm form;
  const int named = 2 + static_cast<int>(rule.states.size());
  form.registers = named;
  std::array<bool, kMaxRuleRegisters> written = {};
  std::fill_n(written.begin(), named, true);
  while (true) {
    scan_.SkipToContent();
    if (Eat('}')) break;
    if (scan_.AtEnd()) return Fail("a form of rule ", rule.id, " has no closing '}'");
    const size_t pos = scan_.pos();
    INTERLACE_ASSIGN(const RuleOp op, RuleOpLine(rule));
    for (int i = 0; i < TraitsOf(op.code).operands; ++i) {
      const RuleOperand operand = op.operands[i];
      if (IsNumber(operand)) {
        form.numbers = std::max(form.numbers, NumberIndex(operand) + 1);
      } else if (!written[operand]) {
        return Fail(pos, "t", operand - named, " is read before it is written");
      }
    }
    written[op.result] = true;
    form.registers = std::max(form.registers, op.result + 1);
    form.ops.push_back(op);
  }
  INTERLACE_TRY(EndLine());
  return form;
}

Status TextParser::RuleLines() {
  UpdateRule rule;
  INTERLACE_ASSIGN(rule.id, NextId(program_.rules.size(), "rule"));
  INTERLACE_ASSIGN(rule.name, String());
  INTERLACE_TRY(Want('('));
  scan_.SkipBlanks();
  while (!scan_.Eat(')')) {
    if (!rule.states.empty()) INTERLACE_TRY(Want(','));
    const size_t pos = Here();
    INTERLACE_ASSIGN(std::string state, Name("a state's name"));
    if (IsReserved(state)) return Fail(pos, "a state cannot be called '", state, "': that word has a meaning in rules");
    if (std::find(rule.states.begin(), rule.states.end(), state) != rule.states.end())
      return Fail(pos, "this rule has two states '", state, "'");
    if (rule.states.size() == kMaxRuleStates) return Fail(pos, "a rule has ", kMaxRuleStates, " states at most");
    rule.states.push_back(std::move(state));
    scan_.SkipBlanks();
  }
  INTERLACE_TRY(Want('{'));
  INTERLACE_TRY(EndLine());
  while (true) {
    scan_.SkipToContent();
    if (Eat('}')) break;
    INTERLACE_TRY(WantWord("form"));
    INTERLACE_TRY(Want('{'));
    INTERLACE_TRY(EndLine());
    INTERLACE_ASSIGN(RuleForm form, RuleFormLines(rule));
    rule.forms.push_back(std::move(form));
  }
  if (rule.forms.empty()) return Fail("rule ", rule.id, " has no form");
  program_.rules.push_back(std::move(rule));
  return EndLine();
}

}  // namespace interlace
