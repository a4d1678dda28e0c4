#include "passes/pass_table.h"

#include <sstream>


namespace interlace {

std::span<const PassInfo> PassTable() {
  static const std::vector<PassInfo> table = {};
  return table;
}

const PassInfo* FindPass(std::string_view name) {
  for (const PassInfo& pass : PassTable()) {
    if (pass.name == name) return &pass;
  }
  return nullptr;
}

std::string PassTableText() {
  std::ostringstream out;
  for (const PassInfo& pass : PassTable()) {
    out << pass.name << "\n    " << pass.help << "\n";
    for (const OptionInfo& option : pass.options) {
      out << "    " << option.name << "=";
      if (option.kind == OptionKind::kChoice) {
        for (size_t i = 0; i < option.choices.size(); ++i) out << (i ? "|" : "") << option.choices[i];
      } else {
        out << (option.kind == OptionKind::kCount ? "N" : option.kind == OptionKind::kName ? "NAME" : "X|none");
      }
      out << "  " << option.help << (option.missing.empty() ? " (required" : " (default ") << option.missing << ")\n";
    }
  }
  return out.str();
}

}  // namespace interlace
