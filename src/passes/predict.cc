#include "passes/predict.h"

#include <map>
#include <optional>
#include <tuple>

#include "base/sort.h"
#include "passes/passes.h"
#include "sim/bounds.h"
#include "sim/engine.h"
#include "sim/memory_curve.h"

namespace interlace {
namespace {

// One rank stands for all: they are alike while nothing is known of differences.
EngineInput InputOf(const Lowered& lowered, const CostModel& model) {
  EngineInput input;
  input.programs = {&lowered};
  input.compute_slow = {kOne};
  input.fold = model.ranks_per_node();
  return input;
}

std::vector<Stall> StallsOf(const Lowered& lowered, const EngineOutput& output) {
  const Program& program = *lowered.program;
  const RankRecord& rank = output.ranks[0];
  std::map<std::tuple<bool, Part, UnitId>, int64_t> held;
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    const std::vector<LoweredOp>& ops = lowered.ops[lowered.run[run]];
    for (size_t i = 0; i < ops.size(); ++i) {
      const int64_t instance = lowered.first[run] + static_cast<int64_t>(i);
      const int64_t time = rank.end_ps[instance] - rank.start_ps[instance];
      if (ops[i].kind != LoweredOp::Kind::kWait || time <= 0 || rank.waited_for[instance] < 0) continue;
      const Op& start = program.op(output.transfers[rank.waited_for[instance]].op->op);
      if (start.units.empty()) continue;
      held[{start.kind == OpKind::kReduceStart, start.part, start.units[0]}] += time;
    }
  }
  std::vector<Stall> stalls;
  for (const auto& [key, time] : held) stalls.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), time});
  StableSort(stalls, [](const Stall& a, const Stall& b) { return a.time_ps > b.time_ps; });
  return stalls;
}

// The program that runs of this one: itself, or `made` of it.
Result<const Program*> AsRun(const Program& program, const PassCosts& costs, std::optional<Program>& made) {
  if (!costs.transient) return &program;
  made = program.Clone();
  INTERLACE_TRY(TransientGradients(*made));
  return &*made;
}

}  // namespace

Result<KnownOps> KnownOpsOf(const Program& program, const PassCosts& costs) {
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(const Lowered lowered, Lower(program, model));
  return KnownOf(lowered);
}

Result<Prediction> Predict(const Program& given, const PassCosts& costs, bool with_stalls, const KnownOps& known) {
  std::optional<Program> made;
  INTERLACE_ASSIGN(const Program* const as_run, AsRun(given, costs, made));
  const Program& program = *as_run;
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model, known));
  INTERLACE_ASSIGN(EngineOutput output, RunEngine(InputOf(lowered, model), model));
  Prediction prediction;
  prediction.time_ps = output.makespan_ps;
  INTERLACE_ASSIGN(prediction.bytes, PeakBytes(lowered));
  if (with_stalls) prediction.stalls = StallsOf(lowered, output);
  return prediction;
}

Result<int64_t> PlacedBytesOf(const Program& given, const PassCosts& costs, int64_t live_bytes) {
  if (!costs.cluster.cpu) return live_bytes;
  std::optional<Program> made;
  INTERLACE_ASSIGN(const Program* const as_run, AsRun(given, costs, made));
  const Program& program = *as_run;
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(const Lowered lowered, Lower(program, model));
  return TakenBytes(lowered, live_bytes);
}

Result<int64_t> LowerBoundPs(const Program& program, const PassCosts& costs) {
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  return LowerBounds(InputOf(lowered, model), model).front().time_ps;
}

}  // namespace interlace
