// order.cc — pass `order`: writes the run lines of a schedule (schedules.h) for a stage of a pipeline.
//   before: run forward 0   run backward.first 0   run forward 1   run backward.middle 1 ...   run update
//   after:  run forward 0 x2   run backward.first 0   run forward 2   run backward.middle 1 ...   run update
// Each micro-batch goes by the phases that it went by before; only when they run changes. Messages between two ranks
// keep their order in every schedule that is offered; whether a set of programs fits is checked as a whole
// (program_set.h). Option: schedule. Error: the program is no stage, a schedule that does not go with its phases.
#include <algorithm>
#include <charconv>
#include <map>

#include "base/scan.h"
#include "passes/passes.h"
#include "passes/stages/list_schedule.h"
#include "passes/stages/schedules.h"

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

// The meta line that `pipeline` writes.
Result<std::vector<stages::StageTime>> ReadTimes(const std::string& text) {
  std::vector<stages::StageTime> out;
  for (std::string_view stage : Split(text, ';')) {
    std::vector<int64_t> numbers;
    for (std::string_view word : Split(stage, ',')) {
      int64_t number = -1;
      const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), number);
      if (problem != std::errc() || end != word.data() + word.size() || number < 0 || number > (int64_t{1} << 50))
        return MakeError("meta \"stages.times\" has '", word, "' where picoseconds are expected");
      numbers.push_back(number);
    }
    if (numbers.size() != 4)
      return MakeError("meta \"stages.times\" has ", numbers.size(), " numbers for a stage, not 4");
    out.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return out;
}

}  // namespace

Result<bool> Order(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::string schedule,
                   options.Choice("schedule", {"1f1b", "gpipe", "interleaved", "zero_bubble", "auto"}));
  if (!program.stage) return MakeError("order arranges the phases of a pipeline's stage; run pipeline before");
  if (program.width > 1)
    return MakeError("micro-batches of a pipeline run one by one, not ", program.width, " side by side");
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
  shape.ranks = program.Stages();
  shape.micro_batches = program.accumulation;
  const auto forward = static_cast<int64_t>(
      std::count_if(path[0].begin(), path[0].end(), [&](const Phase* phase) { return IsForward(program, *phase); }));
  const auto phases = static_cast<int64_t>(path[0].size());
  shape.chunks = std::max<int64_t>(forward, 1);
  const int64_t with_weights = shape.chunks * 3 - (shape.rank == 0 ? 1 : 0);
  // All ranks must take a schedule for the same; the first stage, and one where no gradient can wait, lack W.
  shape.split = phases == with_weights || ((schedule == "zero_bubble" || schedule == "auto") && shape.chunks == 1);
  if (phases != with_weights && phases != shape.chunks * 2) {
    return MakeError("stage ", shape.rank, " has ", forward, " forward and ", phases - forward,
                     " backward phases; a schedule needs as many of both");
  }
  std::vector<stages::StageTime> times;
  if (const std::string* text = program.Meta("stages.times"); text != nullptr) {
    INTERLACE_ASSIGN(times, ReadTimes(*text));
  }
  INTERLACE_ASSIGN(const std::vector<stages::Run> runs, stages::RunsOf(schedule, shape, times));
  std::vector<OrderEntry> order = std::move(head);
  for (const stages::Run& run : runs) {
    int64_t at = run.chunk;
    if (run.turn != stages::Turn::kForward) at = 2 * shape.chunks - 1 - run.chunk;
    if (run.turn == stages::Turn::kWeights) at += shape.chunks;
    if (run.turn == stages::Turn::kSent) at = shape.chunks - 1 - run.chunk;
    const auto& of = (run.turn == stages::Turn::kSent ? waits : path)[static_cast<size_t>(run.micro_batch)];
    if (at >= static_cast<int64_t>(of.size())) continue;
    const std::string& name = of[static_cast<size_t>(at)]->name;
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
