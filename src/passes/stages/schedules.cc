#include "passes/stages/schedules.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "passes/stages/list_schedule.h"

namespace interlace::stages {
namespace {

std::vector<Run> GPipe(const Shape& shape) {
  std::vector<Run> out;
  for (int32_t c = 0; c < shape.chunks; ++c) {
    for (int64_t m = 0; m < shape.micro_batches; ++m) out.push_back({Turn::kForward, c, m});
  }
  for (auto c = static_cast<int32_t>(shape.chunks); c-- > 0;) {
    for (int64_t m = 0; m < shape.micro_batches; ++m) out.push_back({Turn::kBackward, c, m});
  }
  return out;
}

// The k-th forward run of a rank: `ranks` micro-batches through one chunk, then through the next.
Run Forward(const Shape& shape, int64_t k) {
  const int64_t round = shape.ranks * shape.chunks, group = k / round, within = k % round;
  return {Turn::kForward, static_cast<int32_t>(within / shape.ranks), group * shape.ranks + within % shape.ranks};
}
Run Backward(const Shape& shape, int64_t k) {
  Run run = Forward(shape, k);
  run.turn = Turn::kBackward;
  run.chunk = static_cast<int32_t>(shape.chunks) - 1 - run.chunk;
  return run;
}

// `warm` forward runs, then one backward and one forward run in turns.
std::vector<Run> InTurns(const Shape& shape, int64_t warm) {
  const int64_t total = shape.micro_batches * shape.chunks;
  warm = std::min(warm, total);
  std::vector<Run> out;
  for (int64_t k = 0; k < warm; ++k) out.push_back(Forward(shape, k));
  for (int64_t k = 0; k < total; ++k) {
    out.push_back(Backward(shape, k));
    if (warm + k < total) out.push_back(Forward(shape, warm + k));
  }
  return out;
}

// S behind the `late` runs that follow its B, or at the end.
std::vector<Run> WithWaits(const std::vector<Run>& runs, const Shape& shape, size_t late) {
  std::vector<Run> out;
  std::deque<std::pair<size_t, Run>> waits;  // and the run that each stands behind
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    if (run.turn == Turn::kWeights) {  // S comes before W of the same micro-batch
      const auto own = [&](const auto& wait) {
        return wait.second.chunk == run.chunk && wait.second.micro_batch == run.micro_batch;
      };
      for (; std::any_of(waits.begin(), waits.end(), own); waits.pop_front()) out.push_back(waits.front().second);
    }
    out.push_back(run);
    for (; !waits.empty() && waits.front().first <= i; waits.pop_front()) out.push_back(waits.front().second);
    if (run.turn == Turn::kBackward && run.chunk * shape.ranks + shape.rank > 0)
      waits.emplace_back(i + late, Run{Turn::kSent, run.chunk, run.micro_batch});
  }
  for (const auto& [behind, wait] : waits) out.push_back(wait);
  return out;
}

// Each W right behind its B.
std::vector<Run> WithWeights(std::vector<Run> runs, const Shape& shape) {
  if (!shape.split) return runs;
  std::vector<Run> out;
  for (const Run& run : runs) {
    out.push_back(run);
    if (run.turn == Turn::kBackward && run.chunk * shape.ranks + shape.rank > 0)
      out.push_back({Turn::kWeights, run.chunk, run.micro_batch});
  }
  return out;
}

Result<std::vector<Run>> WithoutWaits(std::string_view schedule, const Shape& shape,
                                      const std::vector<StageTime>& times) {
  const bool of_one = schedule == "1f1b" || schedule == "zero_bubble" || schedule == "auto";
  if (of_one && shape.chunks > 1) {
    return MakeError(schedule, " runs one stage a rank, and each has ", shape.chunks, "; use schedule=interleaved");
  }
  const auto rank = static_cast<size_t>(shape.rank);
  if (schedule == "gpipe") return WithWeights(GPipe(shape), shape);
  if (schedule == "1f1b") return OneForwardOneBackward(shape);
  if (schedule == "interleaved") {
    if (shape.micro_batches % shape.ranks != 0) {
      return MakeError("interleaved runs micro-batches in groups of ", shape.ranks, ", and ", shape.micro_batches,
                       " are none; use a multiple, or schedule=gpipe");
    }
    const int64_t warm = (shape.ranks - shape.rank - 1) * 2 + (shape.chunks - 1) * shape.ranks + 1;
    return WithWeights(InTurns(shape, warm), shape);
  }
  if (schedule == "zero_bubble") {
    const std::vector<StageTime> equal(static_cast<size_t>(shape.ranks));
    return ListSchedule(equal, shape.micro_batches, {})[rank];
  }
  if (schedule == "auto") {
    if (static_cast<int64_t>(times.size()) != shape.ranks)
      return MakeError(
          "schedule=auto needs the times of all stages, the meta line \"stages.times\"; use schedule=1f1b");
    return FastestSchedule(times, shape.micro_batches)[rank];
  }
  return MakeError("unknown schedule '", schedule, "'");
}

}  // namespace

std::vector<Run> OneForwardOneBackward(const Shape& shape) {
  return WithWeights(InTurns(shape, shape.ranks - shape.rank), shape);
}

Result<std::vector<Run>> RunsOf(std::string_view schedule, const Shape& shape, const std::vector<StageTime>& times) {
  INTERLACE_ASSIGN(const std::vector<Run> runs, WithoutWaits(schedule, shape, times));
  const bool last = schedule == "gpipe" && shape.chunks > 1;
  const size_t late = last || schedule == "auto" ? runs.size()
                      : shape.chunks == 1        ? 1
                                                 : static_cast<size_t>(2 * shape.ranks);
  return WithWaits(runs, shape, late);
}

}  // namespace interlace::stages
