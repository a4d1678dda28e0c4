#include "base/scan.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/suggest.h"

namespace interlace {
namespace {

bool IsControl(char c) {
  return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string LineWithCaret(std::string_view line, size_t column) {
  constexpr size_t kWindow = 120;
  column = std::min(column, line.size());
  size_t begin = column > kWindow * 3 / 4 && line.size() > kWindow ? column - kWindow * 3 / 4 : 0;
  std::string_view window = line.substr(begin, kWindow);
  std::string out = "  ";
  if (begin > 0) out += "...";
  size_t caret = out.size() + (column - begin);
  for (char c : window) out += IsControl(c) || static_cast<unsigned char>(c) >= 0x80 ? '?' : c;
  if (begin + window.size() < line.size()) out += "...";
  out += '\n';
  out.append(caret, ' ');
  out += '^';
  return out;
}

bool IsWord(std::string_view text) {
  return !text.empty() && IsWordStart(text[0]) && std::all_of(text.begin(), text.end(), IsWordPart);
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string InQuotes(std::string_view word) {
  std::string out = "'";
  out += word;
  out += '\'';
  return out;
}

void AppendQuoted(std::string& out, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (IsControl(c)) {
      out += "\\x";
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[static_cast<unsigned char>(c) & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

void Scanner::NextLine() {
  size_t end = text_.find('\n', pos_);
  pos_ = end == std::string_view::npos ? text_.size() : end + 1;
}

void Scanner::SkipToContent() {
  while (!AtEnd()) {
    SkipBlanks();
    if (!AtLineEnd()) return;
    NextLine();
  }
}

bool Scanner::EatWord(std::string_view word) {
  if (text_.substr(std::min(pos_, text_.size()), word.size()) != word || IsWordPart(PeekAt(word.size()))) return false;
  pos_ += word.size();
  return true;
}

std::string_view Scanner::Word(bool dots) {
  if (!IsWordStart(Peek())) return {};
  size_t begin = pos_++;
  while (IsWordPart(Peek()) || (dots && Peek() == '.')) ++pos_;
  return text_.substr(begin, pos_ - begin);
}

Result<int64_t> Scanner::Int() {
  int64_t value = 0;
  auto [end, problem] = std::from_chars(text_.data() + pos_, text_.data() + text_.size(), value);
  if (problem == std::errc::result_out_of_range) return ErrorHere("this integer does not fit in 64 bits");
  if (problem != std::errc()) return ErrorHere("expected an integer, found " + Found());
  pos_ = end - text_.data();
  return value;
}

Result<std::string> Scanner::String() {
  if (Peek() != '"') return ErrorHere("expected a quoted string, found " + Found());
  size_t begin = pos_++;
  std::string out;
  while (true) {
    if (AtEnd() || Peek() == '\n') return ErrorAt(begin, "this string has no closing quote");
    char c = text_[pos_++];
    if (c == '"') return out;
    if (c != '\\') {
      out += c;
      continue;
    }
    char escape = Peek();
    if (escape == '"' || escape == '\\') {
      out += escape;
    } else if (escape == 'n') {
      out += '\n';
    } else if (escape == 't') {
      out += '\t';
    } else if (escape == 'x' && HexDigit(PeekAt(1)) >= 0 && HexDigit(PeekAt(2)) >= 0) {
      out += static_cast<char>(HexDigit(PeekAt(1)) * 16 + HexDigit(PeekAt(2)));
      pos_ += 2;
    } else {
      return ErrorAt(pos_ - 1, "unknown escape in a string; \\\" \\\\ \\n \\t and \\xNN are known");
    }
    ++pos_;
  }
}

Result<int64_t> Scanner::Header(std::string_view what, int64_t oldest, int64_t newest, std::string_view remedy) {
  SkipToContent();
  const std::string magic = "interlace-" + std::string(what), kind(what);
  if (!text_.substr(std::min(pos_, text_.size())).starts_with(magic)) {
    return ErrorHere("not a " + kind + ": the first line must be '" + magic + " " + std::to_string(newest) + "'");
  }
  pos_ += magic.size();
  SkipBlanks();
  INTERLACE_ASSIGN(int64_t version, Int());
  if (version < oldest || version > newest) {
    return ErrorHere("the " + kind + " has version " + std::to_string(version) + ", this program reads " +
                     (oldest < newest ? std::to_string(oldest) + " and " : "") + std::to_string(newest) + "; " +
                     std::string(remedy));
  }
  INTERLACE_TRY(EndLine());
  return version;
}

Status Scanner::EndLine() {
  SkipBlanks();
  if (!AtLineEnd()) return ErrorHere("expected the end of the line, found " + Found());
  NextLine();
  SkipToContent();
  return Ok{};
}

Status Scanner::Expect(std::string_view word) {
  SkipBlanks();
  const bool here = word.size() == 1 ? Eat(word[0]) : EatWord(word);
  if (!here) return ErrorHere("expected " + InQuotes(word) + ", found " + Found());
  SkipBlanks();
  return Ok{};
}

Result<int64_t> Scanner::IntFrom(int64_t low, int64_t high) {
  const size_t begin = pos_;
  INTERLACE_ASSIGN(int64_t value, Int());
  if (value >= low && value <= high) return value;
  return ErrorAt(begin, "this number must be from " + std::to_string(low) + " to " + std::to_string(high));
}

Result<double> Scanner::Real() {
  double value = 0;
  const char* begin = text_.data() + std::min(pos_, text_.size());
  auto [end, problem] = std::from_chars(begin, text_.data() + text_.size(), value);
  if (problem != std::errc() || !std::isfinite(value)) return ErrorHere("expected a number, found " + Found());
  pos_ = end - text_.data();
  return value;
}

Result<std::string_view> Scanner::OneOf(std::string_view what, const std::vector<std::string_view>& known) {
  const size_t begin = pos_;
  const std::string_view word = Word();
  if (std::find(known.begin(), known.end(), word) != known.end()) return word;
  return ErrorAt(begin, "unknown " + std::string(what) + " " + InQuotes(word) + DidYouMean(word, known));
}

Error Scanner::ErrorAt(size_t pos, std::string_view message) const {
  pos = std::min(pos, text_.size());
  size_t line_begin = pos == 0 ? std::string_view::npos : text_.rfind('\n', pos - 1);
  line_begin = line_begin == std::string_view::npos ? 0 : line_begin + 1;
  size_t line_end = std::min(text_.find('\n', pos), text_.size());
  size_t line_number = 1 + std::count(text_.begin(), text_.begin() + line_begin, '\n');
  Error error;
  error.where = std::string(file_) + ":" + std::to_string(line_number) + ":" + std::to_string(pos - line_begin + 1);
  error.message =
      std::string(message) + "\n" + LineWithCaret(text_.substr(line_begin, line_end - line_begin), pos - line_begin);
  return error;
}

std::string Scanner::Found() const {
  if (AtEnd()) return "the end of the file";
  if (Peek() == '\n' || Peek() == '\r') return "the end of the line";
  size_t end = pos_;
  while (end < text_.size() && end < pos_ + 24 && IsWordPart(text_[end])) ++end;
  if (end == pos_) end = pos_ + 1;
  std::string out = "'";
  for (char c : text_.substr(pos_, end - pos_)) out += IsControl(c) || static_cast<unsigned char>(c) >= 0x80 ? '?' : c;
  return out + "'";
}

}  // namespace interlace
