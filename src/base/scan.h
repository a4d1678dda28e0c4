// scan.h — a scanner over a text of lines, and errors that show the line with a caret.
//
// Positions are byte offsets; lines and columns (from 1) are computed only for an error. Nothing here recurses or
// allocates beyond the strings it returns, so hostile input costs no more than its size.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace interlace {

// `line` with unprintable bytes as '?', cut to a window round `column` (from 0), and a second line with a caret; both
// indented by two blanks and separated by a newline.
std::string LineWithCaret(std::string_view line, size_t column);
// Escapes for the text format: quotes, backslash, newline, tab, \xNN for other control characters.
void AppendQuoted(std::string& out, std::string_view text);

inline bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}
inline bool IsWordStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
inline bool IsWordPart(char c) {
  return IsWordStart(c) || IsDigit(c);
}
// Whether all of it is one word, [A-Za-z_][A-Za-z0-9_]*.
bool IsWord(std::string_view text);
// The number that all of the text is; none: it is another text, or the number does not fit.
template <typename Number>
std::optional<Number> ParseNumber(std::string_view text) {
  Number number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  return problem == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}
// "a+b" at '+': "a", "b". An empty text is one empty part.
std::vector<std::string_view> Split(std::string_view text, char separator);
// 'word' in single quotes, for messages.
std::string InQuotes(std::string_view word);

class Scanner {
 public:
  Scanner(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  size_t pos() const { return pos_; }
  void Seek(size_t pos) { pos_ = pos; }
  std::string_view text() const { return text_; }
  bool AtEnd() const { return pos_ >= text_.size(); }
  char Peek() const { return pos_ < text_.size() ? text_[pos_] : '\0'; }
  char PeekAt(size_t ahead) const { return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0'; }
  void Advance() { ++pos_; }

  // Blanks and tabs, not newlines.
  void SkipBlanks() {
    while (Peek() == ' ' || Peek() == '\t') ++pos_;
  }
  // At the end of the text, a newline or a comment.
  bool AtLineEnd() const {
    if (AtEnd() || text_[pos_] == '\n' || text_[pos_] == '#') return true;
    return text_[pos_] == '\r' && (pos_ + 1 == text_.size() || text_[pos_ + 1] == '\n');
  }
  // To the first byte after the next newline.
  void NextLine();
  // Skips empty and comment lines; stands at the first character of a line that says something, or at the end.
  void SkipToContent();

  bool Eat(char c) {
    if (Peek() != c || AtEnd()) return false;
    ++pos_;
    return true;
  }
  // Eats a whole word: not a prefix of a longer one.
  bool EatWord(std::string_view word);
  // [A-Za-z_][A-Za-z0-9_]*, with '.' inside when `dots`; empty when there is none here.
  std::string_view Word(bool dots = false);
  Result<int64_t> Int();
  // A quoted string, unescaped.
  Result<std::string> String();

  // ---- what files of one fact a line are made of: plans, models, profiles ----

  // The first line, "interlace-WHAT VERSION". Error: another kind of file; a version that is not read (`remedy`: what
  // to do then).
  Result<int64_t> Header(std::string_view what, int64_t oldest, int64_t newest, std::string_view remedy);
  // The line must end here; goes on to the next one that says something.
  Status EndLine();
  // This word, or character, with blanks around it.
  Status Expect(std::string_view word);
  Result<int64_t> IntFrom(int64_t low, int64_t high);
  Result<double> Real();  // finite
  // One of these words. Error: "unknown WHAT 'word'" (did you mean).
  Result<std::string_view> OneOf(std::string_view what, const std::vector<std::string_view>& known);

  // "file:line:col" with the message, the line and a caret.
  Error ErrorAt(size_t pos, std::string_view message) const;
  Error ErrorHere(std::string_view message) const { return ErrorAt(pos_, message); }
  // What stands here, for "expected x, found y".
  std::string Found() const;

 private:
  std::string_view text_;
  std::string_view file_;
  size_t pos_ = 0;
};

}  // namespace interlace
