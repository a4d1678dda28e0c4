// Parsing: one pass over the text. Every number is range-checked, nesting is bounded, and tables grow only with the file.
#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <unordered_set>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/text.h"

namespace interlace {
namespace {

constexpr int64_t kVersion = 1;
constexpr int kMaxNesting = 64;
constexpr int64_t kSpareValueIds = 65536;  // ids may have gaps, but not beyond the file's size plus this

std::string Quoted(std::string_view word) {
  std::string out = "'";
  out += word;
  out += '\'';
  return out;
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  Parser(std::string_view text, std::string_view file) : scan_(text, file) {}

  Result<Program> Run() {
    Status status = ParseAll();
    if (status.ok()) return std::move(program_);
    return status.error();
  }

 private:
  // ---- errors ----
  Error Fail(size_t pos, std::string message) const {
    std::string_view text = scan_.text();
    bool last_line = text.find('\n', std::min(pos, text.size())) == std::string_view::npos;
    if (last_line && !text.empty() && text.back() != '\n') {
      message += "; the file ends in the middle of this line, so it seems to be cut";
    }
    return scan_.ErrorAt(pos, message);
  }
  Error Fail(std::string message) const { return Fail(scan_.pos(), std::move(message)); }
  Error Expected(std::string_view what) const { return Fail("expected " + std::string(what) + ", found " + scan_.Found()); }
  Status Want(char c) {
    scan_.SkipBlanks();
    if (!scan_.Eat(c)) return Expected(std::string{'\'', c, '\''});
    return Ok{};
  }
  Status WantWord(std::string_view word) {
    scan_.SkipBlanks();
    if (!scan_.EatWord(word)) return Expected(Quoted(word));
    return Ok{};
  }
  Status EndLine() {
    scan_.SkipBlanks();
    if (!scan_.AtLineEnd()) return Expected("the end of the line");
    scan_.NextLine();
    return Ok{};
  }

  // ---- small pieces ----
  Result<std::string> Name(std::string_view what, bool dots = false) {
    scan_.SkipBlanks();
    std::string_view word = scan_.Word(dots);
    if (word.empty()) return Expected(what);
    return std::string(word);
  }
  Result<int64_t> Int(int64_t min, int64_t max, std::string_view what) {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    if (!IsDigit(scan_.Peek()) && scan_.Peek() != '-') return Expected(what);
    INTERLACE_ASSIGN(int64_t value, scan_.Int());
    if (value < min || value > max) {
      return Fail(pos, std::string(what) + " must be from " + std::to_string(min) + " to " + std::to_string(max) +
                           ", not " + std::to_string(value));
    }
    return value;
  }
  Result<std::string> String() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    if (scan_.Peek() != '"') return Expected("a quoted string");
    Result<std::string> text = scan_.String();
    if (!text.ok() && scan_.AtEnd()) return Fail(pos, "this string has no closing quote");  // and why, when the file is cut
    return text;
  }
  Result<ValueId> ValueName() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    if (!scan_.Eat('%') || !IsDigit(scan_.Peek())) {
      scan_.Seek(pos);
      return Expected("a value such as %1");
    }
    INTERLACE_ASSIGN(int64_t id, scan_.Int());
    int64_t limit = std::min<int64_t>(kMaxValues, static_cast<int64_t>(scan_.text().size()) + kSpareValueIds);
    if (id >= limit) {
      return Fail(pos, "value id %" + std::to_string(id) + " is too large for a file of this size (limit " +
                           std::to_string(limit - 1) + "); number values from %0 on");
    }
    return static_cast<ValueId>(id);
  }
  // A value that must be defined somewhere in the file.
  Result<ValueId> Use() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(ValueId id, ValueName());
    if (!program_.HasValue(id)) pending_.emplace_back(id, pos);
    return id;
  }
  Result<UnitId> UnitName() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    if (scan_.Peek() != 'u' || !IsDigit(scan_.PeekAt(1))) return Expected("a unit such as u0");
    scan_.Advance();
    INTERLACE_ASSIGN(int64_t id, scan_.Int());
    if (id >= static_cast<int64_t>(program_.units.size())) {
      return Fail(pos, "unit u" + std::to_string(id) + " is not declared above");
    }
    return static_cast<UnitId>(id);
  }
  Result<DType> ParseDTypeHere() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    std::string_view word = scan_.Word();
    if (auto dtype = ParseDType(word)) return *dtype;
    scan_.Seek(pos);
    if (word.empty()) return Expected("a dtype such as f32");
    static const std::vector<std::string_view>& known = *[] {
      auto* names = new std::vector<std::string_view>();
      for (int i = 0; i <= static_cast<int>(DType::kF8E5M2); ++i) names->push_back(DTypeName(static_cast<DType>(i)));
      return names;
    }();
    return Fail("unknown dtype '" + std::string(word) + "'" + DidYouMean(word, known));
  }

  bool IsSymbol(std::string_view word) const { return symbols_.count(std::string(word)) > 0; }

  // The extent of a dim or number: up to a separator outside parentheses.
  std::string_view Token() const {
    std::string_view text = scan_.text();
    size_t end = scan_.pos();
    int depth = 0;
    for (; end < text.size(); ++end) {
      char c = text[end];
      if (c == '(') ++depth;
      if (c == ')' && depth-- == 0) break;
      if (c == ',' && depth == 0) break;
      if (c == ']' || c == '}' || c == '{' || c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '#' || c == '=') break;
    }
    return text.substr(scan_.pos(), end - scan_.pos());
  }

  Result<Dim> ParseDim() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    std::string_view token = Token();
    if (token.empty()) return Expected("a number or an expression");
    int64_t value = 0;
    auto [end, problem] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (problem == std::errc() && end == token.data() + token.size()) {
      scan_.Seek(pos + token.size());
      return Dim(value);
    }
    Result<Dim> dim = program_.dims.Parse(token);
    if (!dim.ok()) return Fail(pos, dim.error().message + " in '" + std::string(token.substr(0, 64)) + "'");
    INTERLACE_TRY(CheckSymbols(*dim, pos));
    scan_.Seek(pos + token.size());
    return *dim;
  }

  Status CheckSymbols(Dim dim, size_t pos) {
    if (dim.is_const()) return Ok{};
    if (checked_dims_.size() <= static_cast<size_t>(dim.expr)) checked_dims_.resize(dim.expr + 1, false);
    if (checked_dims_[dim.expr]) return Ok{};
    for (const std::string& name : program_.dims.SymbolsOf(dim)) {
      if (IsSymbol(name)) continue;
      std::vector<std::string_view> known(symbols_.begin(), symbols_.end());
      std::sort(known.begin(), known.end());
      return Fail(pos, "unknown symbol '" + name + "'" + DidYouMean(name, known) +
                           (name.starts_with("rank_") ? " (declare the mesh axis first)" : " (declare it with a 'symbol' line)"));
    }
    checked_dims_[dim.expr] = true;
    return Ok{};
  }

  Result<std::vector<Dim>> DimList(char close) {
    std::vector<Dim> list;
    scan_.SkipBlanks();
    if (scan_.Eat(close)) return list;
    while (true) {
      scan_.SkipBlanks();
      size_t pos = scan_.pos();
      INTERLACE_ASSIGN(Dim dim, ParseDim());
      if (dim.is_const() && dim.value < 0) return Fail(pos, "a size or stride must not be negative");
      list.push_back(dim);
      scan_.SkipBlanks();
      if (scan_.Eat(close)) return list;
      INTERLACE_TRY(Want(','));
    }
  }

  Result<Type> ParseType() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
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
    if (type.strides.size() != type.sizes.size()) return Fail(pos, "this type has another number of strides than of sizes");
    Result<int64_t> bytes = program_.StorageBytes(type);
    if (!bytes.ok() && bytes.error().message.find("64 bits") != std::string::npos) {
      return Fail(pos, "the bytes of this type do not fit in 64 bits");
    }
    return type;
  }

  // %id: type [place]
  Result<ValueId> Decl(ValueKind kind) {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(ValueId id, ValueName());
    INTERLACE_TRY(Want(':'));
    INTERLACE_ASSIGN(Type type, ParseType());
    Result<ValueId> added = program_.AddValueWithId(id, kind, std::move(type));
    if (!added.ok()) return Fail(pos, added.error().message);
    scan_.SkipBlanks();
    bool placed = scan_.EatWord("into");
    if (!placed && !scan_.EatWord("in")) return id;
    scan_.SkipBlanks();
    size_t root_pos = scan_.pos();
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
  Result<Arg> Literal(int depth) {
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

  Result<Arg> ListLiteral(int depth) {
    if (depth >= kMaxNesting) return Fail("lists are nested deeper than " + std::to_string(kMaxNesting));
    scan_.Advance();
    std::vector<Arg> list;
    scan_.SkipBlanks();
    if (scan_.Eat(']')) return Arg::List(std::move(list));
    while (true) {
      INTERLACE_ASSIGN(Arg item, Literal(depth + 1));
      list.push_back(std::move(item));
      scan_.SkipBlanks();
      if (scan_.Eat(']')) return Arg::List(std::move(list));
      if (!scan_.Eat(',')) return Expected("',' or ']'");
    }
  }

  // Integers, floats, words, dims: told apart by the whole token.
  Result<Arg> Scalar() {
    size_t pos = scan_.pos();
    std::string_view token = Token();
    if (token.empty()) return Expected("an argument");
    const char* begin = token.data();
    const char* end = begin + token.size();
    auto done = [&](Arg arg) -> Result<Arg> {
      scan_.Seek(pos + token.size());
      return arg;
    };
    int64_t integer = 0;
    auto as_int = std::from_chars(begin, end, integer);
    if (as_int.ptr == end && as_int.ec == std::errc()) return done(Arg::Int(integer));
    if (token == "none") return done(Arg::None());
    if (token == "true") return done(Arg::Bool(true));
    if (token == "false") return done(Arg::Bool(false));
    if (token == "inf") return done(Arg::Float(std::numeric_limits<double>::infinity()));
    if (token == "-inf") return done(Arg::Float(-std::numeric_limits<double>::infinity()));
    if (token == "nan") return done(Arg::Float(std::numeric_limits<double>::quiet_NaN()));
    bool starts_number = IsDigit(token[0]) || token[0] == '.' || (token[0] == '-' && token.size() > 1 && IsDigit(token[1]));
    if (starts_number && token.find_first_of(".eE") != std::string_view::npos) {
      double real = 0;
      auto as_real = std::from_chars(begin, end, real);
      if (as_real.ptr == end && as_real.ec == std::errc()) return done(Arg::Float(real));
      if (as_real.ec == std::errc::result_out_of_range) return Fail(pos, "this number does not fit in a double");
    }
    std::string_view word = scan_.Word(/*dots=*/true);
    if (word.size() == token.size() && !IsSymbol(word)) return Arg::Word(std::string(word));
    scan_.Seek(pos);
    INTERLACE_ASSIGN(Dim dim, ParseDim());
    return Arg::Int(dim);
  }

  // ---- lines before the phases ----
  Status Header() {
    scan_.SkipToContent();
    if (scan_.AtEnd()) return Fail("the file is empty; an interlace program begins with 'interlace 1 captured|sharded|scheduled'");
    if (!scan_.EatWord("interlace")) {
      return scan_.ErrorHere("this is no interlace program; the first line must be 'interlace 1 captured|sharded|scheduled'");
    }
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(int64_t version, Int(0, std::numeric_limits<int64_t>::max(), "the format version"));
    if (version > kVersion) {
      return Fail(pos, "format version " + std::to_string(version) + " is newer than this build reads (version " +
                           std::to_string(kVersion) + "); use a newer interlace or write the file with this one");
    }
    if (version < kVersion) return Fail(pos, "format version " + std::to_string(version) + " does not exist; this build reads version 1");
    scan_.SkipBlanks();
    size_t level_pos = scan_.pos();
    std::string_view level = scan_.Word();
    const std::vector<std::string_view> levels = {"captured", "sharded", "scheduled"};
    auto found = std::find(levels.begin(), levels.end(), level);
    if (found == levels.end()) {
      scan_.Seek(level_pos);
      return Fail("the level must be captured, sharded or scheduled, found " + scan_.Found() + DidYouMean(level, levels));
    }
    program_.level = static_cast<Level>(found - levels.begin());
    return EndLine();
  }

  Status ParseAll() {
    INTERLACE_TRY(Header());
    while (true) {
      scan_.SkipToContent();
      if (scan_.AtEnd()) break;
      INTERLACE_TRY(Line());
    }
    for (const auto& [id, pos] : pending_) {
      if (!program_.HasValue(id)) return scan_.ErrorAt(pos, "%" + std::to_string(id) + " is used but nothing defines it");
    }
    return Ok{};
  }

  Status Line() {
    size_t pos = scan_.pos();
    std::string_view word = scan_.Word();
    if (word == "meta") return Meta();
    if (word == "mesh") return Mesh();
    if (word == "symbol") return SymbolLine();
    if (word == "step") return Step();
    if (word == "group") return GroupLine();
    if (word == "module") return ModuleLine();
    if (word == "source") return SourceLine();
    if (word == "unit") return UnitLine();
    if (word == "param") return ParamLine();
    if (word == "buffer") return BufferLine();
    if (word == "input") return InputLine();
    if (word == "const") return ConstLine();
    if (word == "state") return StateLine();
    if (word == "phase") return PhaseLine();
    scan_.Seek(pos);
    if (word.empty()) return Expected("a declaration or a phase");
    return Fail("unknown line '" + std::string(word) + "'" +
                DidYouMean(word, {"meta", "mesh", "symbol", "step", "group", "module", "source", "unit", "param", "buffer",
                                  "input", "const", "state", "phase"}));
  }

  Status Meta() {
    INTERLACE_ASSIGN(std::string key, Name("a key", true));
    INTERLACE_ASSIGN(std::string text, String());
    program_.meta.emplace_back(std::move(key), std::move(text));
    return EndLine();
  }

  Status Mesh() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(std::string name, Name("an axis name"));
    INTERLACE_ASSIGN(int64_t size, Int(1, 1 << 24, "the size of an axis"));
    for (const Axis& axis : program_.mesh) {
      if (axis.name == name) return Fail(pos, "axis '" + name + "' is declared twice");
    }
    symbols_.insert("rank_" + name);
    program_.mesh.push_back({std::move(name), size});
    return EndLine();
  }

  Status SymbolLine() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(std::string name, Name("a symbol's name"));
    for (std::string_view reserved : {"true", "false", "none", "inf", "nan", "max", "min", "in", "into"}) {
      if (name == reserved) return Fail(pos, "'" + name + "' is a reserved word and cannot be a symbol");
    }
    if (ParseDType(name) || name.starts_with("rank_") || name.size() > 64) {
      return Fail(pos, "'" + name.substr(0, 64) + "' cannot be a symbol (dtypes, rank_* and names over 64 letters are taken)");
    }
    if (!symbols_.insert(name).second) return Fail(pos, "symbol '" + name + "' is declared twice");
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    INTERLACE_ASSIGN(int64_t min, Int(0, kMax, "the least value of a symbol"));
    INTERLACE_ASSIGN(int64_t max, Int(min, kMax, "the largest value of a symbol"));
    program_.symbols.push_back({std::move(name), min, max});
    return EndLine();
  }

  Status Step() {
    INTERLACE_ASSIGN(program_.accumulation, Int(1, 1 << 24, "the number of micro-batches"));
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    std::string_view mode = scan_.Word();
    if (mode != "reduce_each" && mode != "reduce_last") {
      scan_.Seek(pos);
      return Fail("the accumulation mode must be reduce_each or reduce_last, found " + scan_.Found() +
                  DidYouMean(mode, {"reduce_each", "reduce_last"}));
    }
    program_.accumulate_mode = std::string(mode);
    return EndLine();
  }

  // Ids of groups, modules, sources and units count from 0 in the order of the lines.
  Result<int32_t> NextId(size_t next, std::string_view what) {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(int64_t id, Int(0, std::numeric_limits<int32_t>::max(), std::string(what) + "'s id"));
    if (id != static_cast<int64_t>(next)) {
      return Fail(pos, std::string(what) + " ids count up from 0: expected " + std::to_string(next) + ", found " +
                           std::to_string(id));
    }
    return static_cast<int32_t>(id);
  }

  Status GroupLine() {
    Group group;
    INTERLACE_ASSIGN(group.id, NextId(program_.groups.size(), "group"));
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(group.optimizer, Name("an optimizer"));
    if (group.optimizer != "adamw" && group.optimizer != "adam" && group.optimizer != "sgd") {
      return Fail(pos, "unknown optimizer '" + group.optimizer + "'" + DidYouMean(group.optimizer, {"adamw", "adam", "sgd"}) +
                           " (known: adamw, adam, sgd)");
    }
    program_.groups.push_back(std::move(group));
    return EndLine();
  }

  Status ModuleLine() {
    Module module;
    INTERLACE_ASSIGN(module.id, NextId(program_.modules.size(), "module"));
    INTERLACE_ASSIGN(module.path, String());
    INTERLACE_ASSIGN(module.class_name, String());
    program_.modules.push_back(std::move(module));
    return EndLine();
  }

  Status SourceLine() {
    Source source;
    INTERLACE_ASSIGN(source.id, NextId(program_.sources.size(), "source"));
    INTERLACE_ASSIGN(source.place, String());
    program_.sources.push_back(std::move(source));
    return EndLine();
  }

  Status UnitLine() {
    Unit unit;
    scan_.SkipBlanks();
    if (!scan_.Eat('u')) return Expected("a unit such as u0");
    INTERLACE_ASSIGN(unit.id, NextId(program_.units.size(), "unit"));
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(unit.axis, Name("an axis"));
    if (std::none_of(program_.mesh.begin(), program_.mesh.end(), [&](const Axis& a) { return a.name == unit.axis; })) {
      std::vector<std::string_view> known;
      for (const Axis& axis : program_.mesh) known.push_back(axis.name);
      return Fail(pos, "unknown axis '" + unit.axis + "'" + DidYouMean(unit.axis, known) + " (declare it with a 'mesh' line)");
    }
    INTERLACE_ASSIGN(unit.dtype, ParseDTypeHere());
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 32;  // bytes still fit in 64 bits
    INTERLACE_TRY(WantWord("numel"));
    INTERLACE_ASSIGN(unit.numel, Int(0, kMax, "numel"));
    INTERLACE_TRY(WantWord("shard"));
    INTERLACE_ASSIGN(unit.shard, Int(0, kMax, "shard"));
    program_.units.push_back(std::move(unit));
    return EndLine();
  }

  Result<bool> OneOf(std::string_view yes, std::string_view no) {
    scan_.SkipBlanks();
    if (scan_.EatWord(yes)) return true;
    if (scan_.EatWord(no)) return false;
    return Expected("'" + std::string(yes) + "' or '" + std::string(no) + "'");
  }

  Status ParamLine() {
    Param param;
    INTERLACE_ASSIGN(param.value, Decl(ValueKind::kParam));
    INTERLACE_ASSIGN(param.name, String());
    INTERLACE_ASSIGN(param.trainable, OneOf("trainable", "frozen"));
    scan_.SkipBlanks();
    if (scan_.EatWord("group")) {
      scan_.SkipBlanks();
      size_t pos = scan_.pos();
      INTERLACE_ASSIGN(int64_t group, Int(0, std::numeric_limits<int32_t>::max(), "a group's id"));
      if (group >= static_cast<int64_t>(program_.groups.size())) {
        return Fail(pos, "group " + std::to_string(group) + " is not declared above");
      }
      param.group = static_cast<int32_t>(group);
    }
    scan_.SkipBlanks();
    if (scan_.EatWord("unit")) {
      INTERLACE_ASSIGN(param.unit, UnitName());
      INTERLACE_TRY(Want('+'));
      INTERLACE_ASSIGN(param.unit_offset, Int(0, std::numeric_limits<int64_t>::max() / 32, "the offset in a unit"));
    }
    scan_.SkipBlanks();
    while (scan_.EatWord("alias")) {
      INTERLACE_ASSIGN(std::string alias, String());
      param.aliases.push_back(std::move(alias));
      scan_.SkipBlanks();
    }
    program_.params.push_back(std::move(param));
    return EndLine();
  }

  Status BufferLine() {
    Buffer buffer;
    INTERLACE_ASSIGN(buffer.value, Decl(ValueKind::kBuffer));
    INTERLACE_ASSIGN(buffer.name, String());
    INTERLACE_ASSIGN(buffer.persistent, OneOf("persistent", "plain"));
    program_.buffers.push_back(std::move(buffer));
    return EndLine();
  }

  Status InputLine() {
    Input input;
    INTERLACE_ASSIGN(input.value, Decl(ValueKind::kInput));
    INTERLACE_ASSIGN(input.name, String());
    program_.inputs.push_back(std::move(input));
    return EndLine();
  }

  Status ConstLine() {
    Const constant;
    INTERLACE_ASSIGN(constant.value, Decl(ValueKind::kConst));
    INTERLACE_ASSIGN(constant.name, String());
    INTERLACE_TRY(Want('='));
    scan_.SkipBlanks();
    if (scan_.Peek() != '[') return Expected("a list");
    INTERLACE_ASSIGN(constant.data, Literal(0));
    program_.consts.push_back(std::move(constant));
    return EndLine();
  }

  Status StateLine() {
    State state;
    INTERLACE_ASSIGN(state.value, Decl(ValueKind::kState));
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    std::string_view word = scan_.Word();
    bool is_unit = word.size() > 1 && word[0] == 'u' && scan_.Peek() == '.' &&
                   std::all_of(word.begin() + 1, word.end(), IsDigit);
    if (is_unit) {
      scan_.Seek(pos);
      INTERLACE_ASSIGN(state.unit, UnitName());
      INTERLACE_TRY(Want('.'));
      word = scan_.Word();
    }
    if (word.empty()) return Expected("a role such as u0.shard");
    state.role = std::string(word);
    INTERLACE_ASSIGN(state.persistent, OneOf("persistent", "step"));
    program_.states.push_back(std::move(state));
    return EndLine();
  }

  // ---- phases ----
  Status PhaseLine() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    Phase phase;
    INTERLACE_ASSIGN(phase.name, Name("a phase's name", true));
    if (program_.FindPhase(phase.name) != nullptr) return Fail(pos, "phase '" + phase.name + "' is declared twice");
    INTERLACE_TRY(WantWord("takes"));
    INTERLACE_TRY(Want('('));
    scan_.SkipBlanks();
    if (!scan_.Eat(')')) {
      while (true) {
        INTERLACE_ASSIGN(ValueId id, Decl(ValueKind::kTake));
        phase.takes.push_back(id);
        scan_.SkipBlanks();
        if (scan_.Eat(')')) break;
        if (!scan_.Eat(',')) return Expected("',' or ')'");
      }
    }
    INTERLACE_TRY(WantWord("gives"));
    INTERLACE_TRY(Want('('));
    scan_.SkipBlanks();
    if (!scan_.Eat(')')) {
      while (true) {
        INTERLACE_ASSIGN(ValueId id, Use());
        phase.gives.push_back(id);
        scan_.SkipBlanks();
        if (scan_.Eat(')')) break;
        if (!scan_.Eat(',')) return Expected("',' or ')'");
      }
    }
    INTERLACE_TRY(Want('{'));
    INTERLACE_TRY(EndLine());
    while (true) {
      scan_.SkipToContent();
      if (scan_.AtEnd()) {
        return scan_.ErrorAt(pos, "phase '" + phase.name + "' has no closing '}'; the file seems to be cut");
      }
      if (scan_.Eat('}')) break;
      INTERLACE_ASSIGN(OpId op, OpLine());
      phase.ops.push_back(op);
    }
    program_.phases.push_back(std::move(phase));
    return EndLine();
  }

  Result<OpId> OpLine() {
    Op& op = program_.AddOp("");
    bool skipped = scan_.Peek() == '_' && (scan_.PeekAt(1) == ',' || scan_.PeekAt(1) == ' ');
    if (scan_.Peek() == '%' || skipped) INTERLACE_TRY(Results(op));
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    std::string_view name = scan_.Word(/*dots=*/true);
    if (name.empty()) return Expected("an op");
    if (scan_.Peek() != '(') {
      // A new declaration where an op should be: the closing brace was lost.
      if (name == "phase" || name == "param") return Fail(pos, "'" + std::string(name) + "' inside a phase: a closing '}' is missing above");
      return Expected("'('");
    }
    scan_.Advance();
    op.name = std::string(name);
    INTERLACE_TRY(Args(op));
    scan_.SkipBlanks();
    if (scan_.Eat('{')) INTERLACE_TRY(Tail(op));
    INTERLACE_TRY(EndLine());
    return op.id;
  }

  Status Results(Op& op) {
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
      scan_.SkipBlanks();
      if (scan_.Eat('=')) return Ok{};
      if (!scan_.Eat(',')) return Expected("',' or '='");
    }
  }

  // Whether WORD "=" stands here.
  bool AtName() {
    size_t pos = scan_.pos();
    bool named = !scan_.Word().empty() && scan_.Peek() == '=';
    scan_.Seek(pos);
    return named;
  }

  Status Args(Op& op) {
    scan_.SkipBlanks();
    if (scan_.Eat(')')) return Ok{};
    while (true) {
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
      scan_.SkipBlanks();
      if (scan_.Eat(')')) return Ok{};
      if (!scan_.Eat(',')) return Expected("',' or ')'");
    }
  }

  Status Tail(Op& op) {
    while (true) {
      scan_.SkipBlanks();
      if (scan_.Eat('}')) return Ok{};
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

  Status Tag(Op& op, std::string_view word, size_t pos) {
    if (word == "fwd" || word == "bwd" || word == "upd") {
      if (op.part != Part::kNone) return Fail(pos, "an op has one of fwd, bwd, upd");
      op.part = word == "fwd" ? Part::kForward : word == "bwd" ? Part::kBackward : Part::kUpdate;
      return Ok{};
    }
    bool numbered = word.size() > 1 && std::all_of(word.begin() + 1, word.end(), IsDigit);
    if (numbered && (word[0] == 'm' || word[0] == 's')) {
      bool module = word[0] == 'm';
      size_t count = module ? program_.modules.size() : program_.sources.size();
      int64_t id = -1;
      auto [end, problem] = std::from_chars(word.data() + 1, word.data() + word.size(), id);
      if (problem != std::errc() || id >= static_cast<int64_t>(count)) {
        return Fail(pos, std::string(module ? "module " : "source ") + std::string(word.substr(1)) + " is not declared above");
      }
      (module ? op.module : op.source) = static_cast<int32_t>(id);
      return Ok{};
    }
    return Fail(pos, "unknown tag '" + std::string(word) + "'" + DidYouMean(word, {"fwd", "bwd", "upd"}));
  }

  Status Attribute(Op& op, std::string_view name, size_t pos) {
    if (name == "lane") {
      size_t lane_pos = scan_.pos();
      std::string_view word = scan_.Word();
      op.lane = ParseLane(word);
      if (!op.lane) {
        return Fail(lane_pos, "unknown lane '" + std::string(word) + "'" +
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
      scan_.SkipBlanks();
      if (scan_.Eat(']')) return Ok{};
      while (true) {
        if (name == "units") {
          INTERLACE_ASSIGN(UnitId unit, UnitName());
          op.units.push_back(unit);
        } else {
          INTERLACE_ASSIGN(ValueId id, Use());
          op.writes.push_back(id);
        }
        scan_.SkipBlanks();
        if (scan_.Eat(']')) return Ok{};
        if (!scan_.Eat(',')) return Expected("',' or ']'");
      }
    }
    if (op.Attr(name) != nullptr) return Fail(pos, "attribute '" + std::string(name) + "' is given twice");
    INTERLACE_ASSIGN(Arg arg, Literal(0));
    op.attrs.push_back({std::string(name), std::move(arg)});
    return Ok{};
  }

  Scanner scan_;
  Program program_;
  std::unordered_set<std::string> symbols_;             // declared ones and rank_AXIS
  std::vector<bool> checked_dims_;                      // by expression: its symbols are known
  std::vector<std::pair<ValueId, size_t>> pending_;     // used before (or without) a definition
};

}  // namespace

Result<Program> Parse(std::string_view text, std::string_view file) { return Parser(text, file).Run(); }

}  // namespace interlace
