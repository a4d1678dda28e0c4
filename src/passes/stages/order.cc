// order.cc — pass `order`: writes the run lines of a schedule (schedules.h) for a stage of a pipeline.
//   before: run forward 0   run backward.first 0   run forward 1   run backward.middle 1 ...   run update
//   after:  run forward 0 x2   run backward.first 0   run forward 2   run backward.middle 1 ...   run update
// Each micro-batch goes by the phases that it went by before; only when they run changes. Messages between two ranks
// keep their order in every schedule that is offered; whether a set of programs fits is checked as a whole
// (program_set.h). Option: schedule. Error: the program is no stage, a schedule that does not go with its phases.
#include <algorithm>
#include <map>

#include "passes/passes.h"
#include "passes/stages/stage_times.h"

namespace interlace {
namespace {

// Of a phase: forward when nothing of a backward part runs in it.
bool IsForward(const Program& program, const Phase& phase) {
  return std::none_of(phase.ops.begin(), phase.ops.end(),
                      [&](OpId id) { return program.op(id).part == Part::kBackward; });
}

// It waits for what another phase has sent, and does nothing else.
bool OnlyWaits(const Program& program, const Phase& phase) {
  return !phase.ops.empty() && std::all_of(phase.ops.begin(), phase.ops.end(),
                                           [&](OpId id) { return program.op(id).kind == OpKind::kSendWait; });
}
// By place of a backward part on a micro-batch's path: the phase that waits for what was sent there. A storage that two
// of a rank's stages send or read is waited for behind the last of them.
std::map<int64_t, const Phase*> ByPlace(const std::vector<const Phase*>& waits, const std::vector<const Phase*>& path,
                                        int64_t chunks) {
  std::map<int64_t, const Phase*> out;
  for (const Phase* wait : waits) {
    int64_t place = -1;
    for (size_t at = 0; at < path.size(); ++at) {
      for (const Carried& save : path[at]->saves) {
        const bool waited = std::any_of(wait->loads.begin(), wait->loads.end(),
                                        [&](const Carried& load) { return load.name == save.name; });
        const auto index = static_cast<int64_t>(at);  // gradients of weights stand behind all backward parts
        if (waited) place = std::max(place, index < 2 * chunks ? index : index - chunks);
      }
    }
    if (place >= 0) out[place] = wait;
  }
  return out;
}

}  // namespace

Result<bool> Order(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::string schedule,
                   options.Choice("schedule", {"1f1b", "gpipe", "interleaved", "zero_bubble", "v", "auto"}));
  if (!program.stage) return MakeError("order arranges the phases of a pipeline's stage; run pipeline before");
  if (program.width > 1)
    return MakeError("micro-batches of a pipeline run one by one, not ", program.width,
                     " side by side; leave breadth_first out");
  // The phases that each micro-batch goes by, and what runs once before and behind them.
  std::vector<std::vector<const Phase*>> path(static_cast<size_t>(program.accumulation)), waits = path;
  std::vector<OrderEntry> head, tail;
  for (const Program::StepRun& run : program.RunsOfStep()) {
    if (run.phase->kind == PhaseKind::kStep) {
      (path[0].empty() ? head : tail).push_back({run.phase->name});
      continue;
    }
    for (int64_t i = 0; i < run.count; ++i)
      (OnlyWaits(program, *run.phase) ? waits : path)[static_cast<size_t>(run.first + i)].push_back(run.phase);
  }
  stages::Shape shape;
  shape.rank = program.stage->index;
  shape.micro_batches = program.accumulation;
  const auto forward = static_cast<int64_t>(
      std::count_if(path[0].begin(), path[0].end(), [&](const Phase* phase) { return IsForward(program, *phase); }));
  const auto phases = static_cast<int64_t>(path[0].size());
  const int64_t chunks = std::max<int64_t>(forward, 1);
  INTERLACE_ASSIGN(const stages::Pipe pipe, stages::ReadPipe(program, program.Stages(), chunks));
  shape.deal = pipe.deal;
  const int64_t with_weights = chunks * 3 - (shape.rank == 0 ? 1 : 0);
  // All ranks must take a schedule for the same; the first stage, and one where no gradient can wait, lack W.
  shape.split = phases == with_weights || ((schedule == "zero_bubble" || schedule == "auto") && chunks == 1);
  if (phases != with_weights && phases != chunks * 2) {
    return MakeError("stage ", shape.rank, " has ", forward, " forward and ", phases - forward,
                     " backward phases; a schedule needs as many of both");
  }
  INTERLACE_ASSIGN(const std::vector<stages::Run> runs, stages::RunsOf(schedule, shape, pipe));
  std::vector<std::map<int64_t, const Phase*>> sent;  // by micro-batch
  for (size_t m = 0; m < path.size(); ++m) sent.push_back(ByPlace(waits[m], path[m], chunks));
  std::vector<OrderEntry> order = std::move(head);
  for (const stages::Run& run : runs) {
    int64_t at = run.chunk;
    if (run.turn != stages::Turn::kForward) at = 2 * chunks - 1 - run.chunk;
    if (run.turn == stages::Turn::kWeights) at += chunks;
    const auto m = static_cast<size_t>(run.micro_batch);
    const bool waits_only = run.turn == stages::Turn::kSent;
    if (waits_only ? !sent[m].contains(at) : at >= static_cast<int64_t>(path[m].size())) continue;
    const std::string& name = (waits_only ? sent[m].at(at) : path[m][static_cast<size_t>(at)])->name;
    if (!order.empty() && order.back().phase == name && order.back().first != kNone &&
        order.back().first + order.back().count == run.micro_batch) {
      ++order.back().count;
    } else {
      order.push_back({name, run.micro_batch, 1});
    }
  }
  order.insert(order.end(), tail.begin(), tail.end());
  const bool changed = order != program.order;
  program.order = std::move(order);
  return changed;
}

}  // namespace interlace
