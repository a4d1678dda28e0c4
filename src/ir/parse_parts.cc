// Parsing of names, numbers, types, places and literals.
#include <algorithm>
#include <charconv>
#include <limits>

#include "base/suggest.h"
#include "ir/parse_internal.h"

namespace interlace {
namespace {

constexpr int kMaxNesting = 64;
constexpr int64_t kSpareValueIds = 65536;  // ids may have gaps, but not beyond the file's size plus this

}  // namespace

// ---- errors ----

Error TextParser::FailAt(size_t pos, std::string message) const {
  std::string_view text = scan_.text();
  bool last_line = text.find('\n', std::min(pos, text.size())) == std::string_view::npos;
  if (last_line && !text.empty() && text.back() != '\n') {
    message += "; the file ends in the middle of this line, so it seems to be cut";
  }
  return scan_.ErrorAt(pos, message);
}

Error TextParser::Expected(std::string_view what) const {
  return Fail("expected ", what, ", found ", scan_.Found());
}

Status TextParser::Want(char c) {
  if (!Eat(c)) return Expected(std::string{'\'', c, '\''});
  return Ok{};
}

Status TextParser::WantWord(std::string_view word) {
  scan_.SkipBlanks();
  if (!scan_.EatWord(word)) return Expected(InQuotes(word));
  return Ok{};
}

Status TextParser::EndLine() {
  scan_.SkipBlanks();
  if (!scan_.AtLineEnd()) return Expected("the end of the line");
  scan_.NextLine();
  return Ok{};
}

// ---- small pieces ----

Result<std::string> TextParser::Name(std::string_view what, bool dots) {
  scan_.SkipBlanks();
  std::string_view word = scan_.Word(dots);
  if (word.empty()) return Expected(what);
  return std::string(word);
}

Result<int64_t> TextParser::Int(int64_t min, int64_t max, std::string_view what) {
  const size_t pos = Here();
  if (!IsDigit(scan_.Peek()) && scan_.Peek() != '-') return Expected(what);
  INTERLACE_ASSIGN(int64_t value, scan_.Int());
  if (value < min || value > max) {
    return Fail(pos, what, " must be from ", min, " to ", max, ", not ", value);
  }
  return value;
}

Result<std::string> TextParser::String() {
  const size_t pos = Here();
  if (scan_.Peek() != '"') return Expected("a quoted string");
  Result<std::string> text = scan_.String();
  if (!text.ok() && scan_.AtEnd())
    return Fail(pos, "this string has no closing quote");  // and why, when the file is cut
  return text;
}

Result<ValueId> TextParser::ValueName() {
  const size_t pos = Here();
  if (!scan_.Eat('%') || !IsDigit(scan_.Peek())) {
    scan_.Seek(pos);
    return Expected("a value such as %1");
  }
  INTERLACE_ASSIGN(int64_t id, scan_.Int());
  int64_t limit = value_limit_ > 0 ? value_limit_ : static_cast<int64_t>(scan_.text().size()) + kSpareValueIds;
  limit = std::min<int64_t>(kMaxValues, limit);
  if (id >= limit) {
    return Fail(pos, "value id %", id, " is too large for a file of this size (limit ", limit - 1,
                "); number values from %0 on");
  }
  return static_cast<ValueId>(id);
}

Status TextParser::Uses(std::vector<ValueId>& out) {
  return InParentheses([&]() -> Status {
    INTERLACE_ASSIGN(ValueId id, Use());
    out.push_back(id);
    return Ok{};
  });
}

Result<ValueId> TextParser::Use() {
  const size_t pos = Here();
  INTERLACE_ASSIGN(ValueId id, ValueName());
  if (!program_.HasValue(id)) pending_.emplace_back(id, pos);
  return id;
}

Result<UnitId> TextParser::UnitName() {
  const size_t pos = Here();
  if (scan_.Peek() != 'u' || !IsDigit(scan_.PeekAt(1))) return Expected("a unit such as u0");
  scan_.Advance();
  INTERLACE_ASSIGN(int64_t id, scan_.Int());
  if (id >= static_cast<int64_t>(program_.units.size())) {
    return Fail(pos, "unit u", id, " is not declared above");
  }
  return static_cast<UnitId>(id);
}

Result<DType> TextParser::ParseDTypeHere() {
  const size_t pos = Here();
  std::string_view word = scan_.Word();
  if (auto dtype = ParseDType(word)) return *dtype;
  scan_.Seek(pos);
  if (word.empty()) return Expected("a dtype such as f32");
  static const std::vector<std::string_view>& known = *[] {
    auto* names = new std::vector<std::string_view>();
    for (int i = 0; i <= static_cast<int>(DType::kF8E5M2); ++i) names->push_back(DTypeName(static_cast<DType>(i)));
    return names;
  }();
  return Fail("unknown dtype '", word, "'", DidYouMean(word, known));
}

bool TextParser::IsSymbol(std::string_view word) const {
  return symbols_.count(std::string(word)) > 0;
}

std::string_view TextParser::Token() const {
  std::string_view text = scan_.text();
  size_t end = scan_.pos();
  int depth = 0;
  for (; end < text.size(); ++end) {
    char c = text[end];
    if (c == '(') ++depth;
    if (c == ')' && depth-- == 0) break;
    if (c == ',' && depth == 0) break;
    if (c == ']' || c == '}' || c == '{' || c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '#' || c == '=')
      break;
  }
  return text.substr(scan_.pos(), end - scan_.pos());
}

Result<Dim> TextParser::ParseDim() {
  const size_t pos = Here();
  std::string_view token = Token();
  if (token.empty()) return Expected("a number or an expression");
  if (const auto number = ParseNumber<int64_t>(token)) {
    scan_.Seek(pos + token.size());
    return Dim(*number);
  }
  Result<Dim> dim = program_.dims.Parse(token);
  if (!dim.ok()) return Fail(pos, dim.error().message, " in '", token.substr(0, 64), "'");
  INTERLACE_TRY(CheckSymbols(*dim, pos));
  scan_.Seek(pos + token.size());
  return *dim;
}

Status TextParser::CheckSymbols(Dim dim, size_t pos) {
  if (dim.is_const()) return Ok{};
  if (checked_dims_.size() <= static_cast<size_t>(dim.expr)) checked_dims_.resize(dim.expr + 1, false);
  if (checked_dims_[dim.expr]) return Ok{};
  for (const std::string& name : program_.dims.SymbolsOf(dim)) {
    if (IsSymbol(name)) continue;
    std::vector<std::string_view> known(symbols_.begin(), symbols_.end());
    std::sort(known.begin(), known.end());
    return Fail(pos, "unknown symbol '", name, "'", DidYouMean(name, known),
                name.starts_with("rank_") ? " (declare the mesh axis first)" : " (declare it with a 'symbol' line)");
  }
  checked_dims_[dim.expr] = true;
  return Ok{};
}

Result<std::vector<Dim>> TextParser::DimList(char close) {
  std::vector<Dim> list;
  if (Eat(close)) return list;
  while (true) {
    const size_t pos = Here();
    INTERLACE_ASSIGN(Dim dim, ParseDim());
    if (dim.is_const() && dim.value < 0) return Fail(pos, "a size or stride must not be negative");
    list.push_back(dim);
    if (Eat(close)) return list;
    INTERLACE_TRY(Want(','));
  }
}

Result<Type> TextParser::ParseType() {
  const size_t pos = Here();
  Type type;
  INTERLACE_ASSIGN(type.dtype, ParseDTypeHere());
  INTERLACE_TRY(Want('['));
  INTERLACE_ASSIGN(type.sizes, DimList(']'));
  Dim elements = DTypeBytes(type.dtype);
  for (const Dim& size : type.sizes) {
    if (size.is_const() && size.value <= 1) continue;
    Result<Dim> product = program_.dims.CheckedMul(elements, size);
    if (!product.ok()) return Fail(pos, "the bytes of this type do not fit in 64 bits");
    elements = *product;
  }
  if (scan_.Peek() != '{') {
    type.strides = program_.ContiguousStrides(type.sizes);
    return type;
  }
  scan_.Advance();
  INTERLACE_ASSIGN(type.strides, DimList('}'));
  if (type.strides.size() != type.sizes.size())
    return Fail(pos, "this type has another number of strides than of sizes");
  Result<int64_t> bytes = program_.StorageBytes(type);
  if (!bytes.ok() && bytes.error().message.find("64 bits") != std::string::npos) {
    return Fail(pos, "the bytes of this type do not fit in 64 bits");
  }
  return type;
}

Result<ValueId> TextParser::Decl(ValueKind kind) {
  const size_t pos = Here();
  INTERLACE_ASSIGN(ValueId id, ValueName());
  INTERLACE_TRY(Want(':'));
  INTERLACE_ASSIGN(Type type, ParseType());
  Result<ValueId> added = program_.AddValueWithId(id, kind, std::move(type));
  if (!added.ok()) return Fail(pos, added.error().message);
  scan_.SkipBlanks();
  bool placed = scan_.EatWord("into");
  if (!placed && !scan_.EatWord("in")) return id;
  const size_t root_pos = Here();
  INTERLACE_ASSIGN(ValueId root, Use());
  if (root == id) return Fail(root_pos, "a value cannot be placed in itself");
  Dim offset;
  if (scan_.Eat('+')) {
    INTERLACE_ASSIGN(offset, ParseDim());
  }
  Value& value = program_.value(id);
  value.root = root;
  value.offset = offset;
  value.placed = placed;
  return id;
}

// ---- literals ----

Result<Arg> TextParser::Literal(int depth) {
  scan_.SkipBlanks();
  char c = scan_.Peek();
  if (c == '%') {
    INTERLACE_ASSIGN(ValueId id, Use());
    return Arg::Of(id);
  }
  if (c == '"') {
    INTERLACE_ASSIGN(std::string text, String());
    return Arg::String(std::move(text));
  }
  if (c == '[') return ListLiteral(depth);
  return Scalar();
}

Result<Arg> TextParser::ListLiteral(int depth) {
  if (depth >= kMaxNesting) return Fail("lists are nested deeper than ", kMaxNesting);
  scan_.Advance();
  std::vector<Arg> list;
  INTERLACE_TRY(Items(']', [&]() -> Status {
    INTERLACE_ASSIGN(Arg item, Literal(depth + 1));
    list.push_back(std::move(item));
    return Ok{};
  }));
  return Arg::List(std::move(list));
}

Result<Arg> TextParser::Scalar() {
  size_t pos = scan_.pos();
  std::string_view token = Token();
  if (token.empty()) return Expected("an argument");
  auto done = [&](Arg arg) -> Result<Arg> {
    scan_.Seek(pos + token.size());
    return arg;
  };
  if (const auto integer = ParseNumber<int64_t>(token)) return done(Arg::Int(*integer));
  if (token == "none") return done(Arg::None());
  if (token == "true") return done(Arg::Bool(true));
  if (token == "false") return done(Arg::Bool(false));
  if (token == "inf") return done(Arg::Float(std::numeric_limits<double>::infinity()));
  if (token == "-inf") return done(Arg::Float(-std::numeric_limits<double>::infinity()));
  if (token == "nan") return done(Arg::Float(std::numeric_limits<double>::quiet_NaN()));
  bool starts_number =
      IsDigit(token[0]) || token[0] == '.' || (token[0] == '-' && token.size() > 1 && IsDigit(token[1]));
  if (starts_number && token.find_first_of(".eE") != std::string_view::npos) {
    double real = 0;
    const char* end = token.data() + token.size();
    auto as_real = std::from_chars(token.data(), end, real);
    if (as_real.ptr == end && as_real.ec == std::errc()) return done(Arg::Float(real));
    if (as_real.ec == std::errc::result_out_of_range) return Fail(pos, "this number does not fit in a double");
  }
  std::string_view word = scan_.Word(/*dots=*/true);
  if (word.size() == token.size() && !IsSymbol(word)) return Arg::Word(std::string(word));
  scan_.Seek(pos);
  INTERLACE_ASSIGN(Dim dim, ParseDim());
  return Arg::Int(dim);
}

}  // namespace interlace
