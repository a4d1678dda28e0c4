#include "passes/tensor/apply.h"

#include <algorithm>
#include <utility>

namespace interlace::tensor {

Result<Applied> ApplyPlan(Program& program, const std::vector<PlanEntry>& plan, const CutterOptions& options,
                          bool strict) {
  for (const PlanEntry& entry : plan) {
    bool names = false;
    for (const Param& param : program.params) {
      names = names || Matches(entry.pattern, param.name);
      for (const std::string& alias : param.aliases) names = names || Matches(entry.pattern, alias);
    }
    if (!names) return MakeError("the plan names '", entry.pattern, "', and the model has no such parameter");
  }
  Applied applied;
  Cutter cutter(program, *program.MicroBatchPhase(), options);
  for (Param& param : program.params) {
    INTERLACE_ASSIGN(const PlanEntry* entry, EntryOf(plan, param));
    if (entry == nullptr) continue;
    if (StaysWhole(program, param)) {
      applied.kept_whole.push_back("'" + param.name +
                                   "' is on several stages, which cut products over other numbers of ranks");
      continue;
    }
    const Status cut = cutter.CutParam(param, entry->dim, entry->blocks);
    if (cut.ok()) continue;
    if (strict || entry->dim >= static_cast<int64_t>(program.value(param.value).type.sizes.size())) {
      return cut.error();
    }
    applied.kept_whole.push_back(cut.error().message);
  }
  INTERLACE_TRY(cutter.Run());
  applied.made_whole = cutter.made_whole();
  for (OpId id : program.MicroBatchPhase()->ops) {
    const Op& op = std::as_const(program).op(id);
    const Arg* module = op.kind == OpKind::kCallPython ? op.Attr("module") : nullptr;
    if (module == nullptr) continue;
    if (std::find(applied.opaque.begin(), applied.opaque.end(), module->text) == applied.opaque.end())
      applied.opaque.push_back(module->text);
  }
  return applied;
}

std::vector<std::string> NotesOf(const Applied& applied) {
  std::vector<std::string> notes;
  for (const std::string& why : applied.kept_whole) notes.push_back(why + ": it stays whole");
  for (const auto& [name, bytes] : applied.made_whole)
    notes.push_back(name + " has no rule: every rank computes all of it, on " + std::to_string(bytes) +
                    " bytes made whole before");
  for (const std::string& path : applied.opaque)
    notes.push_back("module '" + path + "' is opaque: every rank runs all of it");
  return notes;
}

}  // namespace interlace::tensor
