#include "passes/tensor/apply.h"

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
    const Status cut = cutter.CutParam(param, entry->dim, entry->blocks);
    if (cut.ok()) {
      ++applied.cut;
    } else if (strict || entry->dim >= static_cast<int64_t>(program.value(param.value).type.sizes.size())) {
      return cut.error();
    } else {
      applied.kept_whole.push_back(cut.error().message);
    }
  }
  INTERLACE_TRY(cutter.Run());
  applied.made_whole = cutter.made_whole();
  applied.transferred = cutter.transferred();
  return applied;
}

}  // namespace interlace::tensor
