#include "plan/testing/write_model.h"

#include <algorithm>

#include "base/scan.h"
#include "ir/text.h"

namespace interlace::plan {

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
    static constexpr std::string_view kKinds[] = {"column", "row", "vocabulary"};
    out += "parallel " + std::string(kKinds[static_cast<int>(cut.kind)]) + ' ' + std::to_string(cut.dim) + ' ';
    if (cut.blocks > 1) out += "blocks " + std::to_string(cut.blocks) + ' ';
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
