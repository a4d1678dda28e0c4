// The report all parts of the verifier write to, and what they ask about places.
#include <algorithm>

#include "base/append.h"
#include "base/scan.h"
#include "base/sort.h"
#include "ir/verifier.h"
#include "ir/verify_internal.h"

namespace interlace {

// ---- report ----

void VerifyReport::Print() {
  if (printed_) return;
  printed_ = PrintWithLines(program_);
  line_begin_ = {0, 0};
  for (size_t i = 0; i < printed_->text.size(); ++i) {
    if (printed_->text[i] == '\n') line_begin_.push_back(i + 1);
  }
}

std::string_view VerifyReport::LineText(int32_t line) {
  if (line <= 0 || static_cast<size_t>(line) + 1 >= line_begin_.size()) return {};
  std::string_view text = printed_->text;
  return text.substr(line_begin_[line], line_begin_[line + 1] - 1 - line_begin_[line]);
}

void VerifyReport::Add(int32_t line, std::string what, std::string_view needle, bool after_paren) {
  std::string_view text = LineText(line);
  size_t indent = text.find_first_not_of(' ');
  size_t column = indent == std::string_view::npos ? 0 : indent;
  for (size_t from = after_paren ? std::min(text.find('('), text.size()) : 0; !needle.empty();) {
    size_t at = text.find(needle, from);
    if (at == std::string_view::npos) {
      if (!after_paren) break;
      after_paren = false;  // not an operand: look among the results too
      from = 0;
      continue;
    }
    char next = at + needle.size() < text.size() ? text[at + needle.size()] : ' ';
    if (needle[0] != '%' || next < '0' || next > '9') {
      column = at;
      break;
    }
    from = at + 1;
  }
  Error error;
  error.where = line > 0 ? "line " + std::to_string(line) : "";
  error.message = std::move(what);
  if (!text.empty()) error.message += "\n" + LineWithCaret(text.substr(indent), column - indent);
  found_.push_back({line, std::move(error)});
}

void VerifyReport::AtOp(const Op& op, std::string what, ValueId at) {
  Print();
  int32_t line = op.id >= 0 && op.id < static_cast<OpId>(printed_->op_line.size()) ? printed_->op_line[op.id] : 0;
  if (at != kNone) return Add(line, std::move(what), "%" + std::to_string(at), true);
  Add(line, std::move(what), op.name + "(", false);
}
void VerifyReport::AtValue(ValueId value, std::string what) {
  Print();
  Add(printed_->value_line[value], std::move(what), "%" + std::to_string(value), false);
}
void VerifyReport::AtUnit(UnitId unit, std::string what) {
  Print();
  Add(printed_->unit_line[unit], std::move(what), "", false);
}
void VerifyReport::AtPhase(const Phase& phase, std::string what) {
  Print();
  Add(printed_->phase_line[&phase - program_.phases.data()], std::move(what), "", false);
}
void VerifyReport::AtRun(size_t index, std::string what) {
  Print();
  Add(index < printed_->run_line.size() ? printed_->run_line[index] : 1, std::move(what), "", false);
}
void VerifyReport::AtProgram(std::string what) {
  Print();
  Add(1, std::move(what), "", false);
}

std::vector<Error> VerifyReport::Take() {
  StableSort(found_, [](const Found& a, const Found& b) { return a.line < b.line; });
  std::vector<Error> out;
  for (Found& found : found_) out.push_back(std::move(found.error));
  return out;
}

// ---- checks of single ops ----

bool OpChecks::ValueOperands(const Op& op) {
  for (const Arg& arg : op.args) {
    if (arg.kind == Arg::Kind::kValue) continue;
    report_.AtOp(op, op.name + " takes values only");
    return false;
  }
  if (op.named.empty()) return true;
  report_.AtOp(op, op.name + " takes attributes in braces, not named arguments");
  return false;
}

bool OpChecks::Shape(const Op& op, size_t min_args, size_t max_args, size_t results) {
  if (!ValueOperands(op)) return false;
  const auto number = [](size_t n) { return std::to_string(static_cast<int64_t>(n)); };
  if (op.args.size() < min_args || op.args.size() > max_args) {
    const std::string range = min_args == max_args ? number(min_args) : number(min_args) + " to " + number(max_args);
    report_.AtOp(op, op.name + " takes " + range + " operands, not " + number(op.args.size()));
    return false;
  }
  const bool skipped = std::find(op.results.begin(), op.results.end(), kNone) != op.results.end();
  if (op.results.size() == results && !skipped) return true;
  report_.AtOp(op, op.name + " has " + number(results) + " results, not " + number(op.results.size()) +
                       (skipped ? " or '_'" : ""));
  return false;
}

void OpChecks::Elements(const Op& op, ValueId id, int64_t wanted, const std::string& meaning) {
  const auto count = NumericElements(TypeOf(id));
  if (count && *count == wanted) return;
  report_.AtOp(op, Joined("%", id, " must have ", wanted, wanted == 1 ? " element (" : " elements (", meaning, ")"),
               id);
}

// ---- places ----

std::optional<int64_t> NumericElements(const Type& type) {
  int64_t count = 1;
  for (const Dim& size : type.sizes) {
    if (!size.is_const() || __builtin_mul_overflow(count, size.value, &count)) return std::nullopt;
  }
  return count;
}

ByteRange RangeOf(const Program& program, ValueId id) {
  const Value& value = program.value(id);
  ByteRange range{value.root, 0, 0, false};
  Result<int64_t> bytes = program.StorageBytes(value.type);
  if (!bytes.ok() || !value.offset.is_const()) return range;
  if (__builtin_mul_overflow(value.offset.value, DTypeBytes(value.type.dtype), &range.begin)) return range;
  if (__builtin_add_overflow(range.begin, *bytes, &range.end)) return range;
  range.known = true;
  return range;
}

Status CheckPlace(const Program& program, const Value& value) {
  if (value.root == value.id) return Ok{};
  Result<int64_t> bytes = program.StorageBytes(value.type);
  Result<int64_t> room = program.StorageBytes(program.value(value.root).type);
  if (!bytes.ok() || !room.ok()) return Ok{};  // symbolic: checked when bound
  Binding low, high;
  for (const Axis& axis : program.mesh) {
    low["rank_" + axis.name] = 0;
    high["rank_" + axis.name] = axis.size - 1;
  }
  int64_t element = DTypeBytes(value.type.dtype);
  for (const Binding& ranks : {low, high}) {
    Result<int64_t> offset = program.dims.Evaluate(value.offset, ranks);
    if (!offset.ok()) {
      if (program.dims.Evaluate(value.offset, {}).ok()) return offset.error();
      return Ok{};
    }
    int64_t begin, end;
    bool fits = *offset >= 0 && !__builtin_mul_overflow(*offset, element, &begin) &&
                !__builtin_add_overflow(begin, *bytes, &end) && end <= *room;
    if (!fits) {
      return MakeError("%", value.id, " lies outside its storage: ", *bytes, " bytes from element ", *offset, " of %",
                       value.root, ", which has ", *room, " bytes");
    }
    if (value.offset.is_const()) break;
  }
  return Ok{};
}

}  // namespace interlace
