#include "cost/toml.h"

#include <charconv>
#include <cmath>
#include <set>

#include "base/scan.h"

namespace interlace {
namespace {

class TomlReader {
 public:
  TomlReader(std::string_view text, std::string_view file) : in_(text, file) {}

  Result<std::vector<TomlEntry>> Run() {
    in_.SkipToContent();
    while (!in_.AtEnd()) {
      INTERLACE_TRY(in_.Peek() == '[' ? Table() : Entry());
      INTERLACE_TRY(in_.EndLine());
    }
    return std::move(out_);
  }

 private:
  Result<std::string> Name(const char* what) {
    size_t begin = in_.pos();
    auto part = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
    };
    while (!in_.AtEnd() && part(in_.Peek())) in_.Advance();
    if (in_.pos() == begin) return in_.ErrorHere(std::string("expected ") + what + ", found " + in_.Found());
    return std::string(in_.text().substr(begin, in_.pos() - begin));
  }

  Status Table() {
    size_t begin = in_.pos();
    in_.Advance();
    if (in_.Peek() == '[') return in_.ErrorHere("lists of tables are not used here");
    table_.clear();
    do {
      in_.SkipBlanks();
      INTERLACE_ASSIGN(std::string name, Name("the name of a table"));
      table_ += (table_.empty() ? "" : ".") + name;
      in_.SkipBlanks();
    } while (in_.Eat('.'));
    INTERLACE_TRY(in_.Expect("]"));
    if (!tables_.insert(table_).second) return in_.ErrorAt(begin, "the table [" + table_ + "] is given twice");
    return Ok{};
  }

  Status Entry() {
    TomlEntry entry;
    entry.table = table_;
    entry.key_pos = in_.pos();
    if (in_.Peek() == '"') {
      INTERLACE_ASSIGN(entry.key, in_.String());
    } else {
      INTERLACE_ASSIGN(entry.key, Name("a key"));
    }
    if (!keys_.insert(table_ + "." + entry.key).second) {
      return in_.ErrorAt(entry.key_pos, "the key '" + entry.key + "' is given twice");
    }
    INTERLACE_TRY(in_.Expect("="));
    entry.value_pos = in_.pos();
    INTERLACE_TRY(Value(entry.value, true));
    out_.push_back(std::move(entry));
    return Ok{};
  }

  Status Value(TomlValue& out, bool list_allowed) {
    char c = in_.Peek();
    if (c == '"') {
      out.kind = TomlValue::Kind::kString;
      INTERLACE_ASSIGN(out.text, in_.String());
      return Ok{};
    }
    if (c == '[') {
      if (!list_allowed) return in_.ErrorHere("a list in a list is not used here");
      return List(out);
    }
    if (in_.EatWord("true") || in_.EatWord("false")) {
      out.kind = TomlValue::Kind::kBool;
      out.boolean = in_.text()[in_.pos() - 2] == 'u';
      return Ok{};
    }
    return Number(out);
  }

  Status List(TomlValue& out) {
    out.kind = TomlValue::Kind::kList;
    in_.Advance();
    for (;;) {
      in_.SkipToContent();  // lists may span lines
      in_.SkipBlanks();
      if (in_.Eat(']')) return Ok{};
      INTERLACE_TRY(Value(out.list.emplace_back(), false));
      in_.SkipToContent();
      in_.SkipBlanks();
      if (!in_.Eat(',') && in_.Peek() != ']') return in_.ErrorHere("expected ',' or ']', found " + in_.Found());
    }
  }

  Status Number(TomlValue& out) {
    size_t begin = in_.pos();
    std::string digits;
    bool real = false;
    for (char c = in_.Peek(); !in_.AtEnd(); c = in_.Peek()) {
      bool sign = c == '-' || c == '+';
      if (!(c >= '0' && c <= '9') && c != '_' && c != '.' && c != 'e' && c != 'E' && !sign) break;
      real = real || c == '.' || c == 'e' || c == 'E';
      if (c != '_' && !(c == '+' && digits.empty())) digits.push_back(c);
      in_.Advance();
    }
    const char* end = digits.data() + digits.size();
    if (digits.empty())
      return in_.ErrorAt(begin, "expected a string, a number, true, false or a list, found " + in_.Found());
    out.kind = real ? TomlValue::Kind::kFloat : TomlValue::Kind::kInt;
    if (!real) {
      auto [stop, error] = std::from_chars(digits.data(), end, out.integer);
      if (error == std::errc::result_out_of_range) return in_.ErrorAt(begin, "an integer that does not fit in 64 bits");
      if (error != std::errc() || stop != end) return in_.ErrorAt(begin, "not a number");
      out.number = static_cast<double>(out.integer);
      return Ok{};
    }
    auto [stop, error] = std::from_chars(digits.data(), end, out.number);
    if (error != std::errc() || stop != end || !std::isfinite(out.number)) return in_.ErrorAt(begin, "not a number");
    return Ok{};
  }

  Scanner in_;
  std::string table_;
  std::set<std::string> tables_, keys_;
  std::vector<TomlEntry> out_;
};

}  // namespace

Result<std::vector<TomlEntry>> ParseToml(std::string_view text, std::string_view file) {
  return TomlReader(text, file).Run();
}

}  // namespace interlace
