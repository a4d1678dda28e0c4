// Parsing of the header and the declarations.
#include <algorithm>
#include <limits>

#include "base/suggest.h"
#include "ir/parse_internal.h"

namespace interlace {
namespace {

constexpr int64_t kVersion = 1;

}  // namespace

// ---- lines before the phases ----

Status TextParser::Header() {
  scan_.SkipToContent();
  if (scan_.AtEnd())
    return Fail("the file is empty; an interlace program begins with 'interlace 1 captured|sharded|scheduled'");
  if (!scan_.EatWord("interlace")) {
    return scan_.ErrorHere(
        "this is no interlace program; the first line must be 'interlace 1 captured|sharded|scheduled'");
  }
  const size_t pos = Here();
  INTERLACE_ASSIGN(int64_t version, Int(0, std::numeric_limits<int64_t>::max(), "the format version"));
  if (version > kVersion) {
    return Fail(pos, "format version ", version, " is newer than this build reads (version ", kVersion,
                "); use a newer interlace or write the file with this one");
  }
  if (version < kVersion) return Fail(pos, "format version ", version, " does not exist; this build reads version 1");
  const size_t level_pos = Here();
  std::string_view level = scan_.Word();
  const auto found = std::ranges::find(kLevelNames, level);
  if (found == std::end(kLevelNames)) {
    scan_.Seek(level_pos);
    return Fail("the level must be captured, sharded or scheduled, found ", scan_.Found(),
                DidYouMean(level, {std::begin(kLevelNames), std::end(kLevelNames)}));
  }
  program_.level = static_cast<Level>(found - std::begin(kLevelNames));
  return EndLine();
}

Status TextParser::ParseAll() {
  INTERLACE_TRY(Header());
  while (true) {
    scan_.SkipToContent();
    if (scan_.AtEnd()) break;
    INTERLACE_TRY(Line());
  }
  return CheckPending();
}

Status TextParser::CheckPending() {
  for (const auto& [id, pos] : pending_) {
    if (!program_.HasValue(id)) return scan_.ErrorAt(pos, "%" + std::to_string(id) + " is used but nothing defines it");
  }
  return Ok{};
}

Status TextParser::Line() {
  using Lines = Status (TextParser::*)();
  static constexpr std::pair<std::string_view, Lines> kLines[] = {
      {"meta", &TextParser::Meta},         {"mesh", &TextParser::Mesh},         {"stage", &TextParser::StageLine},
      {"symbol", &TextParser::SymbolLine}, {"step", &TextParser::Step},         {"run", &TextParser::RunLine},
      {"rule", &TextParser::RuleLines},    {"func", &TextParser::FuncLines},    {"group", &TextParser::GroupLine},
      {"module", &TextParser::ModuleLine}, {"source", &TextParser::SourceLine}, {"unit", &TextParser::UnitLine},
      {"param", &TextParser::ParamLine},   {"buffer", &TextParser::BufferLine}, {"input", &TextParser::InputLine},
      {"const", &TextParser::ConstLine},   {"state", &TextParser::StateLine},   {"phase", &TextParser::PhaseLine}};
  size_t pos = scan_.pos();
  std::string_view word = scan_.Word();
  for (const auto& [name, parse] : kLines) {
    if (word == name) return (this->*parse)();
  }
  scan_.Seek(pos);
  if (word.empty()) return Expected("a declaration or a phase");
  std::vector<std::string_view> known;
  for (const auto& line : kLines) known.push_back(line.first);
  return Fail("unknown line '", word, "'", DidYouMean(word, known));
}

Status TextParser::Meta() {
  INTERLACE_ASSIGN(std::string key, Name("a key", true));
  INTERLACE_ASSIGN(std::string text, String());
  program_.meta.emplace_back(std::move(key), std::move(text));
  return EndLine();
}

Status TextParser::Mesh() {
  const size_t pos = Here();
  INTERLACE_ASSIGN(std::string name, Name("an axis name"));
  INTERLACE_ASSIGN(int64_t size, Int(1, 1 << 24, "the size of an axis"));
  for (const Axis& axis : program_.mesh) {
    if (axis.name == name) return Fail(pos, "axis '", name, "' is declared twice");
  }
  symbols_.insert("rank_" + name);
  program_.mesh.push_back({std::move(name), size});
  return EndLine();
}

Status TextParser::StageLine() {
  const size_t pos = Here();
  if (program_.stage) return Fail(pos, "a program is one stage; this is its second 'stage' line");
  INTERLACE_ASSIGN(std::string axis, AxisName());
  INTERLACE_ASSIGN(const int64_t index, Int(0, program_.AxisSize(axis) - 1, "the index of the stage along the axis"));
  StageOf stage{std::move(axis), index};
  if (EatWord("ranks")) {
    do {
      scan_.SkipBlanks();
      INTERLACE_ASSIGN(const int64_t ranks, Int(1, 1 << 24, "the ranks of a stage"));
      stage.ranks.push_back(ranks);
    } while (scan_.Eat(','));
    if (index >= static_cast<int64_t>(stage.ranks.size()))
      return Fail(pos, "stage ", index, " of ", stage.ranks.size());
  }
  program_.stage = std::move(stage);
  return EndLine();
}

Status TextParser::SymbolLine() {
  const size_t pos = Here();
  INTERLACE_ASSIGN(std::string name, Name("a symbol's name"));
  for (std::string_view reserved : {"true", "false", "none", "inf", "nan", "max", "min", "in", "into"}) {
    if (name == reserved) return Fail(pos, "'", name, "' is a reserved word and cannot be a symbol");
  }
  if (ParseDType(name) || name.starts_with("rank_") || name.size() > 64) {
    return Fail(pos, "'", name.substr(0, 64),
                "' cannot be a symbol (dtypes, rank_* and names over 64 letters are taken)");
  }
  if (!symbols_.insert(name).second) return Fail(pos, "symbol '", name, "' is declared twice");
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  INTERLACE_ASSIGN(int64_t min, Int(0, kMax, "the least value of a symbol"));
  INTERLACE_ASSIGN(int64_t max, Int(min, kMax, "the largest value of a symbol"));
  program_.symbols.push_back({std::move(name), min, max});
  return EndLine();
}

Status TextParser::Step() {
  INTERLACE_ASSIGN(program_.accumulation, Int(1, 1 << 24, "the number of micro-batches"));
  size_t pos = Here();
  std::string_view mode = scan_.Word();
  if (mode != "reduce_each" && mode != "reduce_last") {
    scan_.Seek(pos);
    return Fail("the accumulation mode must be reduce_each or reduce_last, found ", scan_.Found(),
                DidYouMean(mode, {"reduce_each", "reduce_last"}));
  }
  program_.accumulate_mode = std::string(mode);
  pos = Here();
  if (!scan_.EatWord("by")) return EndLine();
  INTERLACE_ASSIGN(program_.width, Int(1, program_.accumulation, "the micro-batches of one run"));
  if (program_.accumulation % program_.width != 0) {
    return Fail(pos, program_.accumulation, " micro-batches cannot run by ", program_.width);
  }
  return EndLine();
}

// "run NAME" of a phase that runs once, "run NAME FIRST" or "run NAME FIRST xCOUNT" of a micro-batch phase.
Status TextParser::RunLine() {
  OrderEntry run;
  INTERLACE_ASSIGN(run.phase, Name("a phase's name", true));
  scan_.SkipBlanks();
  if (IsDigit(scan_.Peek())) {
    INTERLACE_ASSIGN(run.first, Int(0, program_.accumulation - 1, "the micro-batch of a run"));
    if (Eat('x')) {
      INTERLACE_ASSIGN(run.count, Int(2, program_.accumulation, "the number of runs"));
    }
  }
  program_.order.push_back(std::move(run));
  return EndLine();
}

Result<int32_t> TextParser::NextId(size_t next, std::string_view what) {
  const size_t pos = Here();
  INTERLACE_ASSIGN(int64_t id, Int(0, std::numeric_limits<int32_t>::max(), std::string(what) + "'s id"));
  if (id != static_cast<int64_t>(next)) {
    return Fail(pos, what, " ids count up from 0: expected ", next, ", found ", id);
  }
  return static_cast<int32_t>(id);
}

// apply 1 steps 5 by 3.4445 -4.775 2.0315 eps 1e-07 ratio original
Result<Orthogonal> TextParser::OrthogonalWords() {
  Orthogonal found;
  INTERLACE_TRY(scan_.Expect("apply"));
  INTERLACE_ASSIGN(const int64_t apply, scan_.IntFrom(0, std::numeric_limits<int32_t>::max()));
  found.apply = static_cast<int32_t>(apply);
  INTERLACE_TRY(scan_.Expect("steps"));
  INTERLACE_ASSIGN(found.steps, scan_.IntFrom(0, 99));
  INTERLACE_TRY(scan_.Expect("by"));
  for (double& coefficient : found.by) {
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(coefficient, scan_.Real());
  }
  INTERLACE_TRY(scan_.Expect("eps"));
  INTERLACE_ASSIGN(found.eps, scan_.Real());
  INTERLACE_TRY(scan_.Expect("ratio"));
  INTERLACE_ASSIGN(const std::string_view ratio, scan_.OneOf("ratio", {"original", "match_rms_adamw", "none"}));
  found.ratio = ratio;
  return found;
}

// average 1 apply 2 eps 1e-16 0.001 clip 1.0
Result<Factored> TextParser::FactoredWords() {
  Factored found;
  for (const auto& [word, group] : {std::pair("average", &found.average), std::pair("apply", &found.apply)}) {
    INTERLACE_TRY(scan_.Expect(word));
    INTERLACE_ASSIGN(const int64_t id, scan_.IntFrom(0, std::numeric_limits<int32_t>::max()));
    *group = static_cast<int32_t>(id);
  }
  INTERLACE_TRY(scan_.Expect("eps"));
  for (double& eps : found.eps) {
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(eps, scan_.Real());
  }
  INTERLACE_TRY(scan_.Expect("clip"));
  scan_.SkipBlanks();
  INTERLACE_ASSIGN(found.clip, scan_.Real());
  return found;
}

Status TextParser::GroupLine() {
  Group group;
  INTERLACE_ASSIGN(group.id, NextId(program_.groups.size(), "group"));
  const size_t pos = Here();
  INTERLACE_ASSIGN(group.optimizer, Name("an optimizer"));
  if (group.optimizer == "rule") {
    INTERLACE_ASSIGN(const int64_t rule, Int(0, std::numeric_limits<int32_t>::max(), "a rule's id"));
    if (rule >= static_cast<int64_t>(program_.rules.size())) return Fail(pos, "rule ", rule, " is not declared above");
    group.rule = static_cast<int32_t>(rule);
    if (EatWord("orthogonal")) {
      INTERLACE_ASSIGN(group.orthogonal, OrthogonalWords());
    } else if (scan_.EatWord("factored")) {
      INTERLACE_ASSIGN(group.factored, FactoredWords());
    }
  } else if (group.optimizer != "adamw" && group.optimizer != "adam" && group.optimizer != "sgd") {
    return Fail(pos, "unknown optimizer '", group.optimizer, "'",
                DidYouMean(group.optimizer, {"adamw", "adam", "sgd", "rule"}), " (known: adamw, adam, sgd, rule)");
  }
  program_.groups.push_back(std::move(group));
  return EndLine();
}

Status TextParser::ModuleLine() {
  Module module;
  INTERLACE_ASSIGN(module.id, NextId(program_.modules.size(), "module"));
  INTERLACE_ASSIGN(module.path, String());
  INTERLACE_ASSIGN(module.class_name, String());
  program_.modules.push_back(std::move(module));
  return EndLine();
}

Status TextParser::SourceLine() {
  Source source;
  INTERLACE_ASSIGN(source.id, NextId(program_.sources.size(), "source"));
  INTERLACE_ASSIGN(source.place, String());
  program_.sources.push_back(std::move(source));
  return EndLine();
}

Result<std::string> TextParser::AxisName() {
  const size_t pos = Here();
  INTERLACE_ASSIGN(std::string axis, Name("an axis"));
  std::vector<std::string_view> known;
  for (const Axis& a : program_.mesh) {
    if (a.name == axis) return axis;
    known.push_back(a.name);
  }
  return Fail(pos, "unknown axis '", axis, "'", DidYouMean(axis, known), " (declare it with a 'mesh' line)");
}

Result<std::string> TextParser::AxisList() {
  std::string axes;
  while (true) {
    INTERLACE_ASSIGN(const std::string axis, AxisName());
    axes += (axes.empty() ? "" : ",") + axis;
    if (!scan_.Eat(',')) return axes;
  }
}

Status TextParser::UnitLine() {
  Unit unit;
  if (!Eat('u')) return Expected("a unit such as u0");
  INTERLACE_ASSIGN(unit.id, NextId(program_.units.size(), "unit"));
  INTERLACE_ASSIGN(unit.axis, AxisList());
  if (EatWord("replicas")) {
    INTERLACE_ASSIGN(unit.replicas, AxisList());
  }
  INTERLACE_ASSIGN(unit.dtype, ParseDTypeHere());
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max() / 32;  // bytes still fit in 64 bits
  INTERLACE_TRY(WantWord("numel"));
  INTERLACE_ASSIGN(unit.numel, Int(0, kMax, "numel"));
  INTERLACE_TRY(WantWord("shard"));
  INTERLACE_ASSIGN(unit.shard, Int(0, kMax, "shard"));
  if (EatWord("part")) {
    INTERLACE_ASSIGN(unit.part, Int(1, kMax, "part"));
  }
  program_.units.push_back(std::move(unit));
  return EndLine();
}

Result<bool> TextParser::OneOf(std::string_view yes, std::string_view no) {
  if (EatWord(yes)) return true;
  if (scan_.EatWord(no)) return false;
  return Expected("'" + std::string(yes) + "' or '" + std::string(no) + "'");
}

// "AXIS DIM" or "AXIS DIM blocks COUNT".
Status TextParser::CutOf(Param& param) {
  Cut cut;
  INTERLACE_ASSIGN(cut.axis, AxisName());
  INTERLACE_ASSIGN(cut.dim, Int(0, 64, "the dimension that is cut"));
  if (EatWord("blocks")) {
    INTERLACE_ASSIGN(cut.blocks, Int(2, 1 << 24, "the number of blocks"));
  }
  param.cuts.push_back(std::move(cut));
  return Ok{};
}

Status TextParser::SharedBy(Param& param) {
  const size_t pos = Here();
  if (!program_.stage)
    return Fail(pos, "parameters are shared by stages, and this program is none (it needs a 'stage' line above)");
  const int64_t ranks = program_.Stages();
  do {
    INTERLACE_ASSIGN(const int64_t rank, Int(0, ranks - 1, "the index of a stage"));
    if (!param.shared.empty() && rank <= param.shared.back())
      return Fail(pos, "stages that share are written ascending");
    param.shared.push_back(rank);
  } while (scan_.Eat(','));
  const bool own = std::find(param.shared.begin(), param.shared.end(), program_.stage->index) != param.shared.end();
  if (!own || param.shared.size() < 2)
    return Fail(pos, "a shared parameter is this stage's, ", program_.stage->index, ", and another's");
  scan_.SkipBlanks();
  return Ok{};
}

Status TextParser::ParamLine() {
  Param param;
  INTERLACE_ASSIGN(param.value, Decl(ValueKind::kParam));
  INTERLACE_ASSIGN(param.name, String());
  INTERLACE_ASSIGN(param.trainable, OneOf("trainable", "frozen"));
  if (EatWord("group")) {
    const size_t pos = Here();
    INTERLACE_ASSIGN(int64_t group, Int(0, std::numeric_limits<int32_t>::max(), "a group's id"));
    if (group >= static_cast<int64_t>(program_.groups.size())) {
      return Fail(pos, "group ", group, " is not declared above");
    }
    param.group = static_cast<int32_t>(group);
  }
  if (EatWord("unit")) {
    INTERLACE_ASSIGN(param.unit, UnitName());
    INTERLACE_TRY(Want('+'));
    INTERLACE_ASSIGN(param.unit_offset, Int(0, std::numeric_limits<int64_t>::max() / 32, "the offset in a unit"));
  }
  scan_.SkipBlanks();
  while (scan_.EatWord("cut")) {
    INTERLACE_TRY(CutOf(param));
    scan_.SkipBlanks();
  }
  if (scan_.EatWord("shared")) INTERLACE_TRY(SharedBy(param));
  while (scan_.EatWord("alias")) {
    INTERLACE_ASSIGN(std::string alias, String());
    param.aliases.push_back(std::move(alias));
    scan_.SkipBlanks();
  }
  program_.params.push_back(std::move(param));
  return EndLine();
}

Status TextParser::BufferLine() {
  Buffer buffer;
  INTERLACE_ASSIGN(buffer.value, Decl(ValueKind::kBuffer));
  INTERLACE_ASSIGN(buffer.name, String());
  INTERLACE_ASSIGN(buffer.persistent, OneOf("persistent", "plain"));
  program_.buffers.push_back(std::move(buffer));
  return EndLine();
}

Status TextParser::InputLine() {
  Input input;
  INTERLACE_ASSIGN(input.value, Decl(ValueKind::kInput));
  INTERLACE_ASSIGN(input.name, String());
  program_.inputs.push_back(std::move(input));
  return EndLine();
}

Status TextParser::ConstLine() {
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

Status TextParser::StateLine() {
  State state;
  INTERLACE_ASSIGN(state.value, Decl(ValueKind::kState));
  const size_t pos = Here();
  std::string_view word = scan_.Word();
  bool is_unit =
      word.size() > 1 && word[0] == 'u' && scan_.Peek() == '.' && std::all_of(word.begin() + 1, word.end(), IsDigit);
  if (is_unit) {
    scan_.Seek(pos);
    INTERLACE_ASSIGN(state.unit, UnitName());
    INTERLACE_TRY(Want('.'));
    word = scan_.Word();
  }
  if (word.empty()) return Expected("a role such as u0.shard");
  state.role = std::string(word);
  INTERLACE_ASSIGN(state.persistent, OneOf("persistent", "step"));
  scan_.SkipBlanks();
  if (scan_.Peek() == 'o') {
    if (scan_.Word() != "out") return Expected("'out' or the end of the line");
    state.out = true;
  }
  program_.states.push_back(std::move(state));
  return EndLine();
}

}  // namespace interlace
