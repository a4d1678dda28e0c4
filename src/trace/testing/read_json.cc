#include "trace/testing/read_json.h"

#include <algorithm>
#include <charconv>

#include "trace/json.h"

namespace interlace {
namespace {

constexpr int kMaxDepth = 100;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Result<Json> Run() {
    Json value;
    INTERLACE_TRY(Value(value, 0));
    Blanks();
    if (pos_ < text_.size()) return Fail("text after the end of the value");
    return value;
  }

 private:
  Error Fail(std::string_view what) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < pos_ && i < text_.size(); ++i) {
      if (text_[i] == '\n') {
        ++line;
        column = 0;
      }
      ++column;
    }
    return Error{std::string(what), "json:" + std::to_string(line) + ":" + std::to_string(column)};
  }
  void Blanks() {
    while (pos_ < text_.size() &&
           (text_[pos_] == ' ' || text_[pos_] == '\n' || text_[pos_] == '\t' || text_[pos_] == '\r')) {
      ++pos_;
    }
  }
  bool Eat(char c) {
    Blanks();
    if (pos_ >= text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }
  bool EatWord(std::string_view word) {
    if (text_.substr(pos_, word.size()) != word) return false;
    pos_ += word.size();
    return true;
  }

  Status Value(Json& out, int depth) {
    if (depth > kMaxDepth) return Fail("nested too deeply");
    Blanks();
    if (pos_ >= text_.size()) return Fail("the text ends where a value should stand");
    char c = text_[pos_];
    if (c == '{') return Object(out, depth);
    if (c == '[') return Array(out, depth);
    if (c == '"') {
      out.kind = Json::Kind::kString;
      return String(out.text);
    }
    if (EatWord("null")) return Ok{};
    if (EatWord("true") || EatWord("false")) {
      out.kind = Json::Kind::kBool;
      out.boolean = text_[pos_ - 2] == 'u';
      return Ok{};
    }
    // from_chars would also take "inf", "nan" and a leading point.
    size_t digit = c == '-' ? pos_ + 1 : pos_;
    if (digit >= text_.size() || text_[digit] < '0' || text_[digit] > '9') return Fail("expected a value");
    out.kind = Json::Kind::kNumber;
    auto [end, error] = std::from_chars(text_.data() + pos_, text_.data() + text_.size(), out.number);
    if (error != std::errc()) return Fail("a number that does not fit in a double");
    pos_ = end - text_.data();
    return Ok{};
  }

  Status Object(Json& out, int depth) {
    out.kind = Json::Kind::kObject;
    ++pos_;
    if (Eat('}')) return Ok{};
    do {
      Blanks();
      if (pos_ >= text_.size() || text_[pos_] != '"') return Fail("expected a key");
      std::string key;
      INTERLACE_TRY(String(key));
      if (out.fields.size() < 64 && out.Find(key) != nullptr) return Fail("the key '" + key + "' is given twice");
      if (!Eat(':')) return Fail("expected ':'");
      out.fields.push_back({std::move(key), {}});
      INTERLACE_TRY(Value(out.fields.back().value, depth + 1));
    } while (Eat(','));
    if (!Eat('}')) return Fail("expected ',' or '}'");
    return Ok{};
  }

  Status Array(Json& out, int depth) {
    out.kind = Json::Kind::kArray;
    ++pos_;
    if (Eat(']')) return Ok{};
    do {
      INTERLACE_TRY(Value(out.items.emplace_back(), depth + 1));
    } while (Eat(','));
    if (!Eat(']')) return Fail("expected ',' or ']'");
    return Ok{};
  }

  Status String(std::string& out) {
    ++pos_;
    while (pos_ < text_.size() && text_[pos_] != '"') {
      unsigned char c = static_cast<unsigned char>(text_[pos_]);
      if (c < 0x20) return Fail("a control character in a string");
      if (c != '\\') {
        size_t length = Utf8Length(text_.substr(pos_));
        if (length == 0) return Fail("a string that is not UTF-8");
        out.append(text_.substr(pos_, length));
        pos_ += length;
        continue;
      }
      ++pos_;
      INTERLACE_TRY(Escape(out));
    }
    if (pos_ >= text_.size()) return Fail("a string that does not end");
    ++pos_;
    return Ok{};
  }

  Status Escape(std::string& out) {
    if (pos_ >= text_.size()) return Fail("a string that does not end");
    char c = text_[pos_++];
    static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (size_t at = kFrom.find(c); at != std::string_view::npos) {
      out.push_back(kTo[at]);
      return Ok{};
    }
    if (c != 'u') return Fail("an unknown escape");
    INTERLACE_ASSIGN(uint32_t code, Hex4());
    if (code >= 0xd800 && code < 0xdc00 && EatWord("\\u")) {
      INTERLACE_ASSIGN(uint32_t low, Hex4());
      if (low < 0xdc00 || low > 0xdfff) return Fail("half of a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xd800 && code < 0xe000) {
      return Fail("half of a surrogate pair");
    }
    auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | code >> 6), put(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 0x3f)), put(0x80 | (code & 0x3f));
    } else {
      put(0xf0 | code >> 18), put(0x80 | (code >> 12 & 0x3f)), put(0x80 | (code >> 6 & 0x3f)),
          put(0x80 | (code & 0x3f));
    }
    return Ok{};
  }

  Result<uint32_t> Hex4() {
    uint32_t code = 0;
    std::string_view digits = text_.substr(std::min(pos_, text_.size()), 4);
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc() || digits.size() != 4 || end != digits.data() + 4) return Fail("expected four hex digits");
    pos_ += 4;
    return code;
  }

  std::string_view text_;
  size_t pos_ = 0;
};

}  // namespace

const Json* Json::Find(std::string_view key) const {
  for (const auto& [name, value] : fields) {
    if (name == key) return &value;
  }
  return nullptr;
}

Result<Json> ParseJson(std::string_view text) {
  return Reader(text).Run();
}

}  // namespace interlace
