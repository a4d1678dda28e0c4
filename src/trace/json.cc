#include "trace/json.h"

#include <charconv>
#include <cmath>

#include "base/append.h"

namespace interlace {

size_t Utf8Length(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(0);
  size_t length = lead < 0x80                   ? 1
                  : lead >= 0xc2 && lead < 0xe0 ? 2
                  : lead >= 0xe0 && lead < 0xf0 ? 3
                  : lead >= 0xf0 && lead < 0xf5 ? 4
                                                : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond U+10FFFF.
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;
  if (lead == 0xed && byte(1) >= 0xa0) return 0;
  if (lead == 0xf0 && byte(1) < 0x90) return 0;
  if (lead == 0xf4 && byte(1) >= 0x90) return 0;
  return length;
}

void AppendJsonString(std::string& out, std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  out.push_back('"');
  for (size_t i = 0; i < text.size();) {
    char c = text[i];
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (c == '\n') {
      out.append("\\n");
    } else if (c == '\t') {
      out.append("\\t");
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out.append("\\u00");
      out.push_back(kHex[c >> 4 & 0xf]);
      out.push_back(kHex[c & 0xf]);
    } else {
      size_t length = Utf8Length(text.substr(i));
      if (length == 0) {
        out.append("\\ufffd");
        ++i;
        continue;
      }
      out.append(text.substr(i, length));
      i += length;
      continue;
    }
    ++i;
  }
  out.push_back('"');
}

void AppendJsonNumber(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out.append("null");
    return;
  }
  char buffer[32];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  out.append(buffer, end);
}

void JsonWriter::Separate() {
  if (need_comma_) out_.push_back(',');
  need_comma_ = true;
}

JsonWriter& JsonWriter::Open(char open, char close) {
  Separate();
  out_.push_back(open);
  closers_.push_back(close);
  need_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::Close() {
  out_.push_back(closers_.back());
  closers_.pop_back();
  need_comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  Separate();
  AppendJsonString(out_, key);
  out_.push_back(':');
  need_comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::String(std::string_view text) {
  Separate();
  AppendJsonString(out_, text);
  return *this;
}

JsonWriter& JsonWriter::Int(int64_t value) {
  Separate();
  Append(out_, value);
  return *this;
}

JsonWriter& JsonWriter::Number(double value) {
  Separate();
  AppendJsonNumber(out_, value);
  return *this;
}

JsonWriter& JsonWriter::Bool(bool value) {
  Separate();
  out_.append(value ? "true" : "false");
  return *this;
}

JsonWriter& JsonWriter::Null() {
  Separate();
  out_.append("null");
  return *this;
}

JsonWriter& JsonWriter::Micros(int64_t nanoseconds) {
  Separate();
  if (nanoseconds < 0) out_.push_back('-');
  uint64_t magnitude = nanoseconds < 0 ? -static_cast<uint64_t>(nanoseconds) : static_cast<uint64_t>(nanoseconds);
  const uint64_t rest = magnitude % 1000;
  Append(out_, magnitude / 1000, '.', rest / 100, rest / 10 % 10, rest % 10);
  return *this;
}

JsonWriter& JsonWriter::NewLine() {
  // The comma of the next value comes first on its line; readers do not mind.
  out_.push_back('\n');
  return *this;
}

}  // namespace interlace
