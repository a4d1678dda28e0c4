#include "ir/program_set.h"

#include "base/digest.h"
#include "base/files.h"
#include "base/scan.h"
#include "base/suggest.h"
#include "ir/text.h"

namespace interlace {
namespace {

class SetParser {
 public:
  SetParser(std::string_view text, std::string_view file, const ReadText& read) : scan_(text, file), read_(read) {}

  Result<ProgramSet> Run() {
    const size_t begin = scan_.pos();
    INTERLACE_ASSIGN([[maybe_unused]] const int64_t version,
                     scan_.Header("set", 1, 1, "write the set with this build"));
    while (!scan_.AtEnd()) {
      const size_t pos = scan_.pos();
      const std::string_view word = scan_.Word();
      if (word == "axis") {
        INTERLACE_TRY(AxisLine(pos));
      } else if (word == "stage") {
        INTERLACE_TRY(StageLine());
      } else {
        return scan_.ErrorAt(pos, "expected 'axis' or 'stage'" + DidYouMean(word, {"axis", "stage"}));
      }
    }
    if (set_.axis.empty()) return scan_.ErrorAt(begin, "no axis is named; add a line such as 'axis pp'");
    if (set_.stages.empty())
      return scan_.ErrorAt(begin, "the set has no stage; add a line 'stage 0 \"FILE\" digest \"...\"'");
    return std::move(set_);
  }

 private:
  Status AxisLine(size_t pos) {
    scan_.SkipBlanks();
    const std::string axis(scan_.Word());
    if (axis.empty()) return scan_.ErrorHere("expected the axis of the stages, found " + scan_.Found());
    if (!set_.axis.empty()) return scan_.ErrorAt(pos, "a set has one axis of stages");
    set_.axis = axis;
    return scan_.EndLine();
  }

  Status StageLine() {
    scan_.SkipBlanks();
    size_t pos = scan_.pos();
    INTERLACE_ASSIGN(const int64_t id, scan_.IntFrom(0, 1 << 20));
    if (id != static_cast<int64_t>(set_.stages.size())) {
      return scan_.ErrorAt(pos, "stages count up from 0: stage " + std::to_string(set_.stages.size()) +
                                    " is missing, found " + std::to_string(id));
    }
    scan_.SkipBlanks();
    pos = scan_.pos();
    Stage stage;
    INTERLACE_ASSIGN(stage.file, scan_.String());
    if (stage.file.empty() || stage.file.find('/') != std::string::npos)
      return scan_.ErrorAt(pos, "a stage's file lies beside the set's own; give its name without a folder");
    INTERLACE_TRY(scan_.Expect("digest"));
    const size_t digest_pos = scan_.pos();
    INTERLACE_ASSIGN(const std::string digest, scan_.String());
    Result<std::string> text = read_(stage.file);
    if (!text.ok()) return scan_.ErrorAt(pos, text.error().message);
    if (const std::string actual = Digest(*text); actual != digest) {
      return scan_.ErrorAt(digest_pos,
                           stage.file + " is not the text that the set was made of; its digest is \"" + actual + "\"");
    }
    INTERLACE_ASSIGN(stage.program, Parse(*text, stage.file));
    set_.stages.push_back(std::move(stage));
    return scan_.EndLine();
  }

  Scanner scan_;
  const ReadText& read_;
  ProgramSet set_;
};

}  // namespace

Result<ProgramSet> ParseProgramSet(std::string_view text, std::string_view file, const ReadText& read) {
  return SetParser(text, file, read).Run();
}

Result<ProgramSet> ReadProgramSet(const std::string& path) {
  INTERLACE_ASSIGN(const std::string text, ReadFile(path));
  const std::string folder = path.substr(0, path.rfind('/') + 1);  // empty when it has none
  return ParseProgramSet(text, path, [&](const std::string& file) { return ReadFile(folder + file); });
}

std::string PrintProgramSet(const ProgramSet& set) {
  std::string out = "interlace-set 1\naxis " + set.axis + "\n";
  for (size_t i = 0; i < set.stages.size(); ++i) {
    out += "stage " + std::to_string(i) + " ";
    AppendQuoted(out, set.stages[i].file);
    out += " digest \"" + Digest(Print(set.stages[i].program)) + "\"\n";
  }
  return out;
}

}  // namespace interlace
