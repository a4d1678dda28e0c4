#include "passes/stages/schedules.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "passes/stages/played.h"

namespace interlace::stages {
namespace {

std::vector<Run> GPipe(const Shape& shape) {
  std::vector<Run> out;
  for (int32_t c = 0; c < shape.deal.chunks; ++c) {
    for (int64_t m = 0; m < shape.micro_batches; ++m) out.push_back({Turn::kForward, c, m});
  }
  for (auto c = static_cast<int32_t>(shape.deal.chunks); c-- > 0;) {
    for (int64_t m = 0; m < shape.micro_batches; ++m) out.push_back({Turn::kBackward, c, m});
  }
  return out;
}

// The k-th forward run of a rank: `ranks` micro-batches through one chunk, then through the next.
Run Forward(const Shape& shape, int64_t k) {
  const int64_t round = shape.deal.ranks * shape.deal.chunks, group = k / round, within = k % round;
  return {Turn::kForward, static_cast<int32_t>(within / shape.deal.ranks),
          group * shape.deal.ranks + within % shape.deal.ranks};
}
Run Backward(const Shape& shape, int64_t k) {
  Run run = Forward(shape, k);
  run.turn = Turn::kBackward;
  run.chunk = static_cast<int32_t>(shape.deal.chunks) - 1 - run.chunk;
  return run;
}

// `warm` forward runs, then one backward and one forward run in turns.
std::vector<Run> InTurns(const Shape& shape, int64_t warm) {
  const int64_t total = shape.micro_batches * shape.deal.chunks;
  warm = std::min(warm, total);
  std::vector<Run> out;
  for (int64_t k = 0; k < warm; ++k) out.push_back(Forward(shape, k));
  for (int64_t k = 0; k < total; ++k) {
    out.push_back(Backward(shape, k));
    if (warm + k < total) out.push_back(Forward(shape, warm + k));
  }
  return out;
}

// S behind the `late` runs that follow its B or, where that is apart, its W; or at the end.
std::vector<Run> WithWaits(const std::vector<Run>& runs, const Shape& shape, size_t late) {
  std::vector<Run> out;
  std::deque<std::pair<size_t, Run>> waits;  // and the run that each stands behind
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    out.push_back(run);
    for (; !waits.empty() && waits.front().first <= i; waits.pop_front()) out.push_back(waits.front().second);
    const bool weights = shape.split && HasWeights(shape.deal.StageOf(shape.rank, run.chunk));
    if (run.turn == (weights ? Turn::kWeights : Turn::kBackward))
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
    if (run.turn == Turn::kBackward && shape.deal.StageOf(shape.rank, run.chunk) > 0)
      out.push_back({Turn::kWeights, run.chunk, run.micro_batch});
  }
  return out;
}

// Of those that are made by running all ranks, with waits.
Result<std::vector<Run>> ListOf(std::string_view schedule, const Shape& shape, const Pipe& pipe) {
  const bool of_one = schedule == "1f1b" || schedule == "zero_bubble" || (schedule == "auto" && !shape.deal.v);
  const bool of_v = schedule == "v" || schedule == "auto";
  if (shape.deal.v ? !of_v : schedule == "v")
    return MakeError(
        "schedule=v and stages that are dealt as a V go together: write pipeline(chunks=2,deal=v), or neither");
  if (of_one && shape.deal.chunks > 1) {
    return MakeError(schedule, " runs one stage a rank, and each has ", shape.deal.chunks,
                     "; use schedule=interleaved");
  }
  const auto rank = static_cast<size_t>(shape.rank);
  if (schedule == "gpipe") return WithWeights(GPipe(shape), shape);
  if (schedule == "1f1b") return OneForwardOneBackward(shape);
  if (schedule == "interleaved") {
    if (shape.micro_batches % shape.deal.ranks != 0) {
      return MakeError("interleaved runs micro-batches in groups of ", shape.deal.ranks, ", and ", shape.micro_batches,
                       " are none; use a multiple, or schedule=gpipe");
    }
    const int64_t warm = (shape.deal.ranks - shape.rank - 1) * 2 + (shape.deal.chunks - 1) * shape.deal.ranks + 1;
    return WithWeights(InTurns(shape, warm), shape);
  }
  if (schedule == "zero_bubble" || schedule == "v") {
    const Pipe equal{shape.deal, std::vector<StageTime>(static_cast<size_t>(shape.deal.Stages())), {}, pipe.takers};
    const Lists lists =
        shape.deal.v ? Filled(equal, shape.micro_batches, 0) : ListSchedule(equal, shape.micro_batches, {});
    return WithWaits(lists, equal, rank);
  }
  if (schedule == "auto") {
    if (static_cast<int64_t>(pipe.times.size()) != shape.deal.Stages())
      return MakeError(
          "schedule=auto needs the times of all stages, the meta line \"stages.times\"; use schedule=1f1b");
    return WithWaits(FastestSchedule(pipe, shape.micro_batches), pipe, rank);
  }
  return MakeError("unknown schedule '", schedule, "'");
}

}  // namespace

std::vector<Run> OneForwardOneBackward(const Shape& shape) {
  return WithWeights(InTurns(shape, shape.deal.ranks - shape.rank), shape);
}

// PyTorch's torch.distributed.pipelining has the same pattern.
std::vector<Run> ThereAndBack(int64_t ranks, int64_t rank, int64_t micro_batches, const Less& less) {
  std::array<int64_t, 2> forward = {0, 0}, backward = {0, 0};
  std::vector<Run> out;
  const auto add = [&](Turn turn, int32_t chunk) {
    int64_t& next = (turn == Turn::kForward ? forward : backward)[static_cast<size_t>(chunk)];
    if (next < micro_batches) out.push_back({turn, chunk, next++});
  };
  const int64_t least = ranks - rank, late = std::min(less.late, rank);  // what the second chunk needs before B begins
  for (int64_t i = 0; i < std::max(2 * least - 1 - less.fewer, least); ++i) add(Turn::kForward, 0);
  for (int64_t i = 0; i < rank - late; ++i) add(Turn::kForward, 1), add(Turn::kForward, 0);
  for (int64_t i = 0; i < least + late; ++i) {
    add(Turn::kForward, 1), add(Turn::kBackward, 1);
    if (i < late) add(Turn::kForward, 0);
  }
  while (backward[0] < micro_batches || backward[1] < micro_batches) {
    add(Turn::kForward, 0), add(Turn::kBackward, 0);
    add(Turn::kForward, 1), add(Turn::kBackward, 1);
  }
  return out;
}

Result<std::vector<Run>> RunsOf(std::string_view schedule, const Shape& shape, const Pipe& pipe) {
  INTERLACE_ASSIGN(const std::vector<Run> runs, ListOf(schedule, shape, pipe));
  if (schedule == "zero_bubble" || schedule == "v" || schedule == "auto") return runs;
  const bool last = schedule == "gpipe" && shape.deal.chunks > 1;
  const size_t late = last ? runs.size() : shape.deal.chunks == 1 ? 1 : static_cast<size_t>(2 * shape.deal.ranks);
  return WithWaits(runs, shape, late);
}

}  // namespace interlace::stages
