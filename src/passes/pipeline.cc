#include "passes/pipeline.h"

#include <cctype>

#include "base/check.h"
#include "base/suggest.h"
#include "passes/pass_table.h"

namespace interlace {
namespace {

class PipelineReader {
 public:
  explicit PipelineReader(std::string_view text) : text_(text) {}

  void SkipBlanks() {
    while (pos_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[pos_]))) ++pos_;
  }
  bool AtEnd() {
    SkipBlanks();
    return pos_ == text_.size();
  }
  bool Eat(char c) {
    SkipBlanks();
    if (pos_ == text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }
  // Everything up to one of `stops` or a blank.
  std::string_view Until(std::string_view stops) {
    SkipBlanks();
    size_t start = pos_;
    while (pos_ < text_.size() && stops.find(text_[pos_]) == std::string_view::npos &&
           !std::isspace(static_cast<unsigned char>(text_[pos_]))) {
      ++pos_;
    }
    return text_.substr(start, pos_ - start);
  }
  Error Fail(std::string_view expected) {
    SkipBlanks();
    std::string found = pos_ == text_.size() ? "the end" : std::string("'").append(1, text_[pos_]).append("'");
    return MakeError("pipeline '", text_, "', column ", pos_ + 1, ": expected ", expected, ", found ", found);
  }

 private:
  std::string_view text_;
  size_t pos_ = 0;
};

Status CheckValue(const OptionInfo& option, const PassOptions& options) {
  switch (option.kind) {
    case OptionKind::kCount:
      INTERLACE_TRY(options.Int(option.name, std::nullopt, option.min));
      break;
    case OptionKind::kPositiveOrNone:
      INTERLACE_TRY(options.PositiveOrNone(option.name));
      break;
    case OptionKind::kName:
      INTERLACE_TRY(options.Name(option.name, option.missing));
      break;
    case OptionKind::kAxes:
      INTERLACE_TRY(options.Axes(option.name, option.missing));
      break;
    case OptionKind::kText:
      break;
    case OptionKind::kBytes:
      INTERLACE_TRY(options.Bytes(option.name));
      break;
    case OptionKind::kNumber:
      INTERLACE_TRY(options.Number(option.name, 0));
      break;
    case OptionKind::kChoice: {
      const std::string& text = *options.Find(option.name);
      std::string list;
      for (std::string_view choice : option.choices) {
        if (choice == text) return Ok{};
        list.append(list.empty() ? "" : " or ").append(choice);
      }
      return MakeError("option ", option.name, "=", text, ": expected ", list, DidYouMean(text, option.choices));
    }
  }
  return Ok{};
}

Result<PassOptions> ReadOptions(PipelineReader& reader, const PassInfo& pass) {
  PassOptions options;
  if (!reader.Eat('(') || reader.Eat(')')) return options;
  do {
    std::string_view name = reader.Until("=,()");
    if (name.empty()) return reader.Fail("an option name");
    const OptionInfo* known = nullptr;
    std::vector<std::string_view> names;
    for (const OptionInfo& option : pass.options) {
      names.push_back(option.name);
      if (option.name == name) known = &option;
    }
    if (known == nullptr) {
      std::string list;
      for (std::string_view n : names) list.append(list.empty() ? "" : ", ").append(n);
      return MakeError("unknown option '", name, "'", DidYouMean(name, names),
                       " (options: ", list.empty() ? "none" : list, ")");
    }
    if (options.Find(name) != nullptr) return MakeError("option '", name, "' is given twice");
    if (!reader.Eat('=')) return reader.Fail("'=' after option '" + std::string(name) + "'");
    std::string_view value = reader.Until(",()");
    if (value.empty()) return reader.Fail("a value for option '" + std::string(name) + "'");
    options.Set(std::string(name), std::string(value));
    INTERLACE_TRY(CheckValue(*known, options));
  } while (reader.Eat(','));
  if (!reader.Eat(')')) return reader.Fail("',' or ')'");
  return options;
}

}  // namespace

PassCall MakeCall(std::string_view name, PassOptions options) {
  const PassInfo* pass = FindPass(name);
  CHECK(pass != nullptr) << name;
  return {pass, std::move(options)};
}

Result<std::vector<PassCall>> ParsePipeline(std::string_view text) {
  std::vector<PassCall> calls;
  PipelineReader reader(text);
  if (reader.AtEnd()) return calls;
  do {
    std::string_view name = reader.Until(",()=");
    if (name.empty()) return reader.Fail("the name of a pass");
    const PassInfo* pass = FindPass(name);
    if (pass == nullptr) {
      std::vector<std::string_view> names;
      for (const PassInfo& p : PassTable()) names.push_back(p.name);
      std::string hint = DidYouMean(name, names);
      return MakeError("unknown pass '", name, "'", hint.empty() ? "; interlace-opt --list-passes shows all" : hint);
    }
    Result<PassOptions> options = ReadOptions(reader, *pass);
    if (!options.ok()) return MakeError("pass '", name, "': ", options.error().message);
    for (const OptionInfo& option : pass->options) {
      if (option.missing.empty() && options->Find(option.name) == nullptr) {
        return MakeError("pass '", name, "': option '", option.name, "' is required (", option.help, "), for example ",
                         name, "(", option.name, "=2)");
      }
    }
    calls.push_back({pass, std::move(*options)});
  } while (reader.Eat(','));
  if (!reader.AtEnd()) return reader.Fail("',' between passes");
  return calls;
}

std::string PrintPass(const PassCall& call) {
  std::string text(call.pass->name);
  for (size_t i = 0; i < call.options.items().size(); ++i) {
    const auto& [name, value] = call.options.items()[i];
    text += (i ? "," : "(") + name + "=" + value;
  }
  return call.options.items().empty() ? text : text + ")";
}

std::string PrintPipeline(const std::vector<PassCall>& calls, size_t from) {
  std::string text;
  for (size_t i = from; i < calls.size(); ++i) {
    if (i > from) text += ",";
    text += PrintPass(calls[i]);
  }
  return text;
}

}  // namespace interlace
