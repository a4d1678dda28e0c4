#include "plan/model_text.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/scan.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::plan {
namespace {

constexpr std::string_view kRoleNames[] = {"embedding", "block", "head"};   // by Role
constexpr std::string_view kKindNames[] = {"column", "row", "vocabulary"};  // by ParallelParameter::Kind
constexpr int64_t kMaxBlocks = 100000;
constexpr int64_t kMaxSize = int64_t{1} << 40;  // of a width, a vocabulary, a sequence

class ModelReader {
 public:
  ModelReader(std::string_view text, std::string_view file) : scan_(text, file), file_(file) {}

  Result<ModelText> Run() {
    INTERLACE_TRY(scan_.Header("model", 1, 1, "read it with a newer release"));
    while (!scan_.AtEnd()) INTERLACE_TRY(Line());
    return Whole();
  }

 private:
  Status Line() {
    static const std::vector<std::string_view> kKeys = {"name",  "family",   "blocks", "dtype",    "hidden",
                                                        "heads", "kv_heads", "vocab",  "sequence", "flash",
                                                        "tied",  "parallel", "program"};
    size_t at = scan_.pos();
    INTERLACE_ASSIGN(std::string_view key, scan_.OneOf("key", kKeys));
    scan_.SkipBlanks();
    if (key == "program") return ProgramLines(at);
    if (key == "parallel") return Parallel();
    if (!seen_.insert(key).second) return scan_.ErrorAt(at, "'" + std::string(key) + "' is given twice");
    INTERLACE_TRY(Fact(key));
    return scan_.EndLine();
  }

  Status Fact(std::string_view key) {
    if (key == "name" || key == "family") {
      INTERLACE_ASSIGN((key == "name" ? model_.name : model_.family), scan_.String());
    } else if (key == "dtype") {
      size_t at = scan_.pos();
      std::optional<DType> dtype = ParseDType(scan_.Word());
      if (!dtype) return scan_.ErrorAt(at, "expected a dtype such as bf16");
      model_.dtype = *dtype;
    } else if (key == "flash") {
      INTERLACE_ASSIGN(std::string_view word, scan_.OneOf("value", {"true", "false"}));
      model_.flash = word == "true";
    } else if (key == "tied") {
      if (scan_.EatWord("none")) return Ok{};
      INTERLACE_ASSIGN(model_.tied, scan_.String());
    } else if (key == "blocks") {
      INTERLACE_ASSIGN(int64_t blocks, scan_.IntFrom(1, kMaxBlocks));
      model_.blocks = static_cast<int32_t>(blocks);
    } else {
      int64_t& fact = key == "hidden"     ? model_.hidden
                      : key == "heads"    ? model_.heads
                      : key == "kv_heads" ? model_.kv_heads
                      : key == "vocab"    ? model_.vocab
                                          : model_.sequence;
      INTERLACE_ASSIGN(fact, scan_.IntFrom(1, kMaxSize));
    }
    return Ok{};
  }

  Status Parallel() {
    ParallelParameter& cut = model_.parallel.emplace_back();
    INTERLACE_ASSIGN(std::string_view kind, scan_.OneOf("kind", {std::begin(kKindNames), std::end(kKindNames)}));
    cut.kind = static_cast<ParallelParameter::Kind>(std::find(kKindNames, std::end(kKindNames), kind) - kKindNames);
    scan_.SkipBlanks();
    INTERLACE_ASSIGN(int64_t dim, scan_.IntFrom(0, 7));
    cut.dim = static_cast<int32_t>(dim);
    scan_.SkipBlanks();
    if (scan_.Peek() == 'b') {
      INTERLACE_TRY(scan_.OneOf("word", {"blocks"}));
      scan_.SkipBlanks();
      INTERLACE_ASSIGN(cut.blocks, scan_.IntFrom(1, kMaxBlocks));
      scan_.SkipBlanks();
    }
    INTERLACE_ASSIGN(cut.name, scan_.String());
    return scan_.EndLine();
  }

  Status ProgramLines(size_t at) {
    INTERLACE_ASSIGN(std::string_view word, scan_.OneOf("layer", {std::begin(kRoleNames), std::end(kRoleNames)}));
    const auto role = static_cast<int>(std::find(kRoleNames, std::end(kRoleNames), word) - kRoleNames);
    if (has_program_[role]) return scan_.ErrorAt(at, "program " + std::string(word) + " is given twice");
    has_program_[role] = true;
    scan_.SkipBlanks();
    size_t count_at = scan_.pos();
    INTERLACE_ASSIGN(int64_t count, scan_.IntFrom(1, kMaxSize));
    scan_.SkipBlanks();
    if (!scan_.AtLineEnd()) return scan_.EndLine();  // its error
    scan_.NextLine();                                // the program's lines are its own, comments too
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
  std::set<std::string_view> seen_;
  std::array<bool, kRoles> has_program_{};
};

}  // namespace

std::string_view RoleName(Role role) {
  return kRoleNames[static_cast<int>(role)];
}

Result<ModelText> ReadModelText(std::string_view text, std::string_view file) {
  return ModelReader(text, file).Run();
}

}  // namespace interlace::plan
