#include "plan/model_text.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/scan.h"
#include "base/suggest.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::plan {
namespace {

constexpr int64_t kMaxBlocks = 100000;
constexpr int64_t kMaxSize = int64_t{1} << 40;  // of a width, a vocabulary, a sequence

class ModelReader {
 public:
  ModelReader(std::string_view text, std::string_view file) : scan_(text, file), file_(file) {}

  Result<ModelText> Run() {
    scan_.SkipToContent();
    if (!EatName("interlace-model")) return scan_.ErrorHere("expected \"interlace-model 1\": this is no model text");
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(int64_t version, scan_.Int());
    if (version != 1) return scan_.ErrorHere("a newer form than this reader knows (1); read it with a newer release");
    INTERLACE_TRY(EndLine());
    while (!scan_.AtEnd()) INTERLACE_TRY(Line());
    return Whole();
  }

 private:
  // The header's word has a hyphen, which names do not have.
  bool EatName(std::string_view word) {
    if (!scan_.text().substr(scan_.pos()).starts_with(word)) return false;
    scan_.Seek(scan_.pos() + word.size());
    return true;
  }

  Status EndLine() {
    scan_.SkipBlanks();
    if (!scan_.AtLineEnd()) return scan_.ErrorHere("expected the end of the line, found " + scan_.Found());
    scan_.NextLine();
    scan_.SkipToContent();
    return Ok{};
  }

  Result<int64_t> Number(int64_t low, int64_t high) {
    size_t at = scan_.pos();
    INTERLACE_ASSIGN(int64_t number, scan_.Int());
    if (number < low || number > high) {
      return scan_.ErrorAt(at, "expected a number from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return number;
  }

  Status Line() {
    size_t at = scan_.pos();
    std::string_view key = scan_.Word();
    scan_.SkipBlanks();
    if (key == "program") return ProgramLines(at);
    if (key == "parallel") return Parallel();
    static const std::vector<std::string_view> kKeys = {"name",  "family",   "blocks", "dtype",    "hidden",
                                                        "heads", "kv_heads", "vocab",  "sequence", "flash",
                                                        "tied",  "parallel", "program"};
    auto found = std::find(kKeys.begin(), kKeys.end(), key);
    if (found == kKeys.end())
      return scan_.ErrorAt(at, "unknown key '" + std::string(key) + "'" + DidYouMean(key, kKeys));
    uint32_t bit = 1u << (found - kKeys.begin());
    if (seen_ & bit) return scan_.ErrorAt(at, "'" + std::string(key) + "' is given twice");
    seen_ |= bit;
    INTERLACE_TRY(Fact(key));
    return EndLine();
  }

  Status Fact(std::string_view key) {
    if (key == "name" || key == "family") {
      INTERLACE_ASSIGN((key == "name" ? model_.name : model_.family), scan_.String());
    } else if (key == "blocks") {
      INTERLACE_ASSIGN(int64_t blocks, Number(1, kMaxBlocks));
      model_.blocks = static_cast<int32_t>(blocks);
    } else if (key == "dtype") {
      size_t at = scan_.pos();
      std::optional<DType> dtype = ParseDType(scan_.Word());
      if (!dtype) return scan_.ErrorAt(at, "expected a dtype such as bf16");
      model_.dtype = *dtype;
    } else if (key == "flash") {
      size_t at = scan_.pos();
      std::string_view word = scan_.Word();
      if (word != "true" && word != "false") return scan_.ErrorAt(at, "expected true or false");
      model_.flash = word == "true";
    } else if (key == "tied") {
      if (scan_.EatWord("none")) return Ok{};
      INTERLACE_ASSIGN(model_.tied, scan_.String());
    } else {
      int64_t& fact = key == "hidden"     ? model_.hidden
                      : key == "heads"    ? model_.heads
                      : key == "kv_heads" ? model_.kv_heads
                      : key == "vocab"    ? model_.vocab
                                          : model_.sequence;
      INTERLACE_ASSIGN(fact, Number(1, kMaxSize));
    }
    return Ok{};
  }

  Status Parallel() {
    ParallelParameter cut;
    size_t at = scan_.pos();
    std::string_view kind = scan_.Word();
    if (kind == "column") {
      cut.kind = ParallelParameter::Kind::kColumn;
    } else if (kind == "row") {
      cut.kind = ParallelParameter::Kind::kRow;
    } else if (kind == "vocabulary") {
      cut.kind = ParallelParameter::Kind::kVocabulary;
    } else {
      return scan_.ErrorAt(at, "expected column, row or vocabulary");
    }
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(int64_t dim, Number(0, 7));
    cut.dim = static_cast<int32_t>(dim);
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(cut.name, scan_.String());
    model_.parallel.push_back(std::move(cut));
    return EndLine();
  }

  Status ProgramLines(size_t at) {
    size_t role_at = scan_.pos();
    std::string_view word = scan_.Word();
    int role = 0;
    while (role < kRoles && RoleName(static_cast<Role>(role)) != word) ++role;
    if (role == kRoles) return scan_.ErrorAt(role_at, "expected embedding, block or head");
    if (has_program_[role]) return scan_.ErrorAt(at, "program " + std::string(word) + " is given twice");
    has_program_[role] = true;
    scan_.SkipBlanks();
    size_t count_at = scan_.pos();
    INTERLACE_ASSIGN(int64_t count, Number(1, kMaxSize));
    scan_.SkipBlanks();
    if (!scan_.AtLineEnd()) return scan_.ErrorHere("expected the end of the line, found " + scan_.Found());
    scan_.NextLine();
    size_t begin = scan_.pos(), end = begin;
    for (int64_t line = 0; line < count; ++line) {
      size_t newline = scan_.text().find('\n', end);
      if (newline == std::string_view::npos) {
        return scan_.ErrorAt(count_at, "the file ends after " + std::to_string(line) + " of the program's lines");
      }
      end = newline + 1;
    }
    scan_.Seek(end);
    scan_.SkipToContent();
    std::string part = std::string(file_) + ", program " + std::string(word);
    INTERLACE_ASSIGN(model_.programs[role], Parse(scan_.text().substr(begin, end - begin), part));
    return CheckProgram(static_cast<Role>(role), part);
  }

  Status CheckProgram(Role role, const std::string& part) const {
    const Program& program = model_.programs[static_cast<int>(role)];
    Status verified = Verify(program);
    if (!verified.ok()) {
      Error error = verified.error();
      error.where = part + (error.where.empty() ? "" : ":" + error.where);
      return error;
    }
    if (program.level != Level::kCaptured || program.MicroBatchPhase() == nullptr) {
      return Error{"a layer is a captured program with the phase micro_batch", part};
    }
    auto needs = [&](std::string_view input) {
      return std::any_of(program.inputs.begin(), program.inputs.end(), [&](const Input& i) { return i.name == input; });
    };
    if (role != Role::kEmbedding && !needs("hidden"))
      return Error{"no input \"hidden\", the activation that enters the layer", part};
    if (role != Role::kHead && !needs("hidden.grad"))
      return Error{"no input \"hidden.grad\", the gradient that enters the layer", part};
    for (const Symbol& symbol : program.symbols) {
      if (symbol.name != "b" && symbol.name != "s")
        return Error{"the symbol " + symbol.name + " is neither b nor s", part};
    }
    return Ok{};
  }

  Result<ModelText> Whole() {
    for (int role = 0; role < kRoles; ++role) {
      if (!has_program_[role]) return scan_.ErrorHere("no program " + std::string(RoleName(static_cast<Role>(role))));
    }
    const std::pair<int64_t, const char*> needed[] = {{model_.blocks, "blocks"}, {model_.hidden, "hidden"},
                                                      {model_.heads, "heads"},   {model_.kv_heads, "kv_heads"},
                                                      {model_.vocab, "vocab"},   {model_.sequence, "sequence"}};
    for (const auto& [number, key] : needed) {
      if (number == 0) return scan_.ErrorHere("no line '" + std::string(key) + "'");
    }
    return std::move(model_);
  }

  Scanner scan_;
  std::string_view file_;
  ModelText model_;
  uint32_t seen_ = 0;  // bit per key
  std::array<bool, kRoles> has_program_{};
};

std::string_view KindName(ParallelParameter::Kind kind) {
  switch (kind) {
    case ParallelParameter::Kind::kColumn:
      return "column";
    case ParallelParameter::Kind::kRow:
      return "row";
    case ParallelParameter::Kind::kVocabulary:
      return "vocabulary";
  }
  return "";
}

}  // namespace

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kEmbedding:
      return "embedding";
    case Role::kBlock:
      return "block";
    case Role::kHead:
      return "head";
  }
  return "";
}

Result<ModelText> ReadModelText(std::string_view text, std::string_view file) {
  return ModelReader(text, file).Run();
}

std::string WriteModelText(const ModelText& model) {
  std::string out = "interlace-model 1\nname ";
  AppendQuoted(out, model.name);
  out += "\nfamily ";
  AppendQuoted(out, model.family);
  auto fact = [&](const char* key, int64_t number) { (out += key) += ' ' + std::to_string(number) + '\n'; };
  out += '\n';
  fact("blocks", model.blocks);
  out += "dtype " + std::string(DTypeName(model.dtype)) + '\n';
  fact("hidden", model.hidden);
  fact("heads", model.heads);
  fact("kv_heads", model.kv_heads);
  fact("vocab", model.vocab);
  fact("sequence", model.sequence);
  out += model.flash ? "flash true\n" : "flash false\n";
  out += "tied ";
  if (model.tied.empty()) {
    out += "none";
  } else {
    AppendQuoted(out, model.tied);
  }
  out += '\n';
  for (const ParallelParameter& cut : model.parallel) {
    out += "parallel " + std::string(KindName(cut.kind)) + ' ' + std::to_string(cut.dim) + ' ';
    AppendQuoted(out, cut.name);
    out += '\n';
  }
  for (int role = 0; role < kRoles; ++role) {
    std::string program = Print(model.programs[role]);
    out += "program " + std::string(RoleName(static_cast<Role>(role))) + ' ' +
           std::to_string(std::count(program.begin(), program.end(), '\n')) + '\n' + program;
  }
  return out;
}

}  // namespace interlace::plan
