#include "sim/simulate_set.h"

namespace interlace {
namespace {

// The cost model and what it makes of a stage's program.
Result<CostModel> AddStage(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile,
                           SetSimulation& out) {
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(program, cluster, profile));
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  INTERLACE_ASSIGN(MemoryCurve memory, ComputeMemory(lowered));
  out.stages.push_back(std::make_unique<Lowered>(std::move(lowered)));
  out.memory.push_back(std::move(memory));
  return model;
}

}  // namespace

Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile) {
  SetSimulation out;
  std::vector<CostModel> models;
  for (const Stage& stage : set.stages) {
    Result<CostModel> model = AddStage(stage.program, cluster, profile, out);
    if (!model.ok()) return Error{model.error().message, stage.file};
    models.push_back(std::move(*model));
  }
  const AxisGroup stages = GroupOf(set.stages[0].program.mesh, set.axis);
  int64_t instances = 0;
  for (int64_t rank = 0; rank < models[0].ranks(); ++rank) {
    const Lowered& lowered = *out.stages[static_cast<size_t>(stages.IndexOf(rank))];
    instances += lowered.instances();
    if (instances > kMaxInstances)
      return MakeError("simulating every rank of the set is too much: more than ", kMaxInstances, " ops");
    out.input.programs.push_back(&lowered);
    out.input.compute_slow.push_back(kOne);
  }
  INTERLACE_ASSIGN(out.output, RunEngine(out.input, models[0]));
  return out;
}

}  // namespace interlace
