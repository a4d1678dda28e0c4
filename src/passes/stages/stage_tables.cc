#include "passes/stages/stage_tables.h"

#include <string>
#include <utility>
#include <vector>

namespace interlace::stages {

Status DropForeign(Program& program, const Flow& flow, const Layout& layout, int32_t rank) {
  std::vector<char> used(static_cast<size_t>(program.num_values()), 0), everywhere(used);
  const auto mark = [&](const std::vector<OpId>& ops, std::vector<char>& marks) {
    for (OpId id : ops) {
      ForEachOperand(std::as_const(program).op(id), [&](ValueId v) { marks[program.RootOf(v)] = 1; });
      for (ValueId v : program.op(id).results) {
        if (v != kNone) marks[program.RootOf(v)] = 1;
      }
    }
  };
  for (const Phase& phase : program.phases) mark(phase.ops, used);
  for (int32_t i = 0; i < flow.size(); ++i) mark({flow.op(i).id}, everywhere);
  // What nobody uses is the first rank's.
  const auto keep = [&](ValueId id) { return used[id] != 0 || (everywhere[id] == 0 && rank == 0); };
  bool trains = false;
  std::erase_if(program.params, [&](const Param& param) {
    const bool kept = layout.trained[param.value] != 0 ? !layout.IsForeign(param.value, rank) : keep(param.value);
    trains = trains || (kept && layout.trained[param.value] != 0 && layout.RankOf(layout.home[param.value]) == rank);
    return !kept;
  });
  for (Param& param : program.params) {
    if (const auto shared = layout.shared.find(param.value); shared != layout.shared.end())
      param.shared = shared->second;
  }
  std::erase_if(program.consts, [&](const Const& constant) { return !keep(constant.value); });
  if (!trains)
    return MakeError("stage ", rank, " would have nothing to train; ask for fewer stages, or choose borders with at=");
  return Ok{};
}

}  // namespace interlace::stages
