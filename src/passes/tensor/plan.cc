#include "passes/tensor/plan.h"

#include <algorithm>

#include "base/scan.h"

namespace interlace::tensor {
namespace {

constexpr int64_t kMost = (int64_t{1} << 20) - 1;

// PARAMETER DIMENSION [blocks N]
Result<PlanEntry> ReadEntry(Scanner& in) {
  PlanEntry entry;
  while (!in.AtLineEnd() && in.Peek() != ' ' && in.Peek() != '\t') {
    entry.pattern += in.Peek();
    in.Advance();
  }
  in.SkipBlanks();
  INTERLACE_ASSIGN(entry.dim, in.IntFrom(0, kMost));
  in.SkipBlanks();
  if (in.EatWord("blocks")) {
    in.SkipBlanks();
    INTERLACE_ASSIGN(entry.blocks, in.IntFrom(1, kMost));
  }
  INTERLACE_TRY(in.EndLine());
  return entry;
}

}  // namespace

Result<std::vector<PlanEntry>> ReadPlan(std::string_view text) {
  std::vector<PlanEntry> out;
  int64_t number = 0;
  for (std::string_view line : Split(text, '\n')) {
    for (std::string_view entry : Split(line.substr(0, line.find('#')), ';')) {
      ++number;
      Scanner in(entry, "the plan");
      in.SkipToContent();
      if (in.AtEnd()) continue;
      Result<PlanEntry> read = ReadEntry(in);
      if (!read.ok()) {
        return MakeError("entry ", number, " of the plan, '", entry,
                         "', is not PARAMETER DIMENSION [blocks N], such as model.layers.*.mlp.up_proj.weight 0");
      }
      out.push_back(*std::move(read));
    }
  }
  return out;
}

std::string PrintPlan(const std::vector<PlanEntry>& plan) {
  std::string out;
  for (const PlanEntry& entry : plan) {
    out += (out.empty() ? "" : "; ") + entry.pattern + " " + std::to_string(entry.dim);
    if (entry.blocks != 1) out += " blocks " + std::to_string(entry.blocks);
  }
  return out;
}

std::string DoesNotDivide(std::string_view name, int64_t dim, int64_t size, int64_t blocks, int64_t ranks) {
  const auto words = [](auto... word) {
    std::string out;
    ((out += word), ...);
    return out;
  };
  std::string out = words("dimension ", std::to_string(dim), " of '", std::string(name), "', ", std::to_string(size),
                          " in ", std::to_string(blocks), blocks == 1 ? " block" : " blocks", ", cannot be cut into ",
                          std::to_string(ranks), " equal parts");
  const int64_t unit = blocks * ranks;
  if (size % unit == 0) return out;
  out += words("; ", std::to_string((size / unit + 1) * unit), " could");
  std::string others;
  for (int64_t parts = 2; parts <= 64 && size % blocks == 0; ++parts) {
    if (size / blocks % parts == 0) others += (others.empty() ? "" : ", ") + std::to_string(parts);
  }
  return others.empty() ? out : words(out, ", and ", std::to_string(size), " into ", others);
}

bool Matches(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  pattern.remove_prefix(star + 1);
  name.remove_prefix(star);
  for (size_t i = 0;; ++i) {
    if (i > 0 && Matches(pattern, name.substr(i))) return true;
    if (i >= name.size() || name[i] == '.') return false;
  }
}

bool StaysWhole(const Program& program, const Param& param) {
  const std::string* names = program.Meta(kStagesWhole);
  if (names == nullptr) return false;
  const std::vector<std::string_view> all = Split(*names, '\n');
  return std::find(all.begin(), all.end(), param.name) != all.end();
}

Result<const PlanEntry*> EntryOf(const std::vector<PlanEntry>& plan, const Param& param) {
  const PlanEntry* found = nullptr;
  auto look = [&](const std::string& name) -> Status {
    for (const PlanEntry& entry : plan) {
      if (!Matches(entry.pattern, name)) continue;
      if (found != nullptr && (found->dim != entry.dim || found->blocks != entry.blocks)) {
        return MakeError("the plan cuts '", param.name, "' in two ways: '", found->pattern, "' along dimension ",
                         found->dim, ", '", entry.pattern, "' along dimension ", entry.dim,
                         param.aliases.empty() ? "" : "; it is tied: write one of them");
      }
      found = &entry;
    }
    return Ok{};
  };
  INTERLACE_TRY(look(param.name));
  for (const std::string& alias : param.aliases) INTERLACE_TRY(look(alias));
  return found;
}

}  // namespace interlace::tensor
