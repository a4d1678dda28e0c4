#include "passes/stages/schedules.h"

#include <algorithm>
#include <deque>
#include <utility>

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
std::vector<Run> OneForwardOneBackward(const Shape& shape, int64_t warm) {
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

// All ranks side by side, every run as long as another: whoever is free takes what is there, B before F before W, and
// no more micro-batches in flight than 1f1b has.
class ZeroBubble {
 public:
  explicit ZeroBubble(const Shape& shape)
      : shape_(shape), ranks_(static_cast<size_t>(shape.ranks)), done_(ranks_ * 2, 0), runs_(ranks_), gradients_(ranks_, 0) {}

  std::vector<Run> Take() {
    const auto wanted = static_cast<size_t>(shape_.micro_batches);
    while (!Finished(wanted)) {
      const std::vector<int64_t> before = done_;
      const std::vector<int64_t> weights = gradients_;
      for (size_t r = 0; r < ranks_; ++r) Step(r, before, weights);
    }
    return runs_[static_cast<size_t>(shape_.rank)];
  }

 private:
  int64_t& Forwards(size_t r) { return done_[r]; }
  int64_t& Backwards(size_t r) { return done_[ranks_ + r]; }

  bool Finished(size_t wanted) const {
    for (size_t r = 0; r < ranks_; ++r) {
      if (runs_[r].size() < wanted * (r == 0 ? 2 : 3)) return false;
    }
    return true;
  }

  // In one unit of time, given what all had done before it.
  void Step(size_t r, const std::vector<int64_t>& before, const std::vector<int64_t>& weights) {
    const int64_t b = Backwards(r), f = Forwards(r);
    const bool last = r + 1 == ranks_;
    const int64_t below = last ? before[r] : before[ranks_ + r + 1];  // gradients that came from the next rank
    if (b < shape_.micro_batches && b < below && b < before[r]) {
      runs_[r].push_back({Turn::kBackward, 0, b});
      ++Backwards(r);
      return;
    }
    // The first stage frees a micro-batch with its B, the others with W.
    const int64_t freed = r == 0 ? b : weights[r];
    const bool there = r == 0 || f < before[r - 1];
    if (f < shape_.micro_batches && there && f - freed < static_cast<int64_t>(ranks_ - r) + (r == 0 ? 0 : static_cast<int64_t>(r))) {
      runs_[r].push_back({Turn::kForward, 0, f});
      ++Forwards(r);
      return;
    }
    if (r > 0 && gradients_[r] < b) {
      runs_[r].push_back({Turn::kWeights, 0, gradients_[r]});
      ++gradients_[r];
    }
  }

  const Shape shape_;
  const size_t ranks_;
  std::vector<int64_t> done_;  // forwards by rank, then backwards by rank
  std::vector<std::vector<Run>> runs_;
  std::vector<int64_t> gradients_;  // W done, by rank
};

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

Result<std::vector<Run>> WithoutWaits(std::string_view schedule, const Shape& shape) {
  if (schedule == "gpipe") return WithWeights(GPipe(shape), shape);
  if (schedule == "1f1b") {
    if (shape.chunks > 1)
      return MakeError("1f1b runs one stage a rank, and each has ", shape.chunks, "; use schedule=interleaved");
    return WithWeights(OneForwardOneBackward(shape, shape.ranks - shape.rank), shape);
  }
  if (schedule == "interleaved") {
    if (shape.micro_batches % shape.ranks != 0) {
      return MakeError("interleaved runs micro-batches in groups of ", shape.ranks, ", and ", shape.micro_batches,
                       " are none; use a multiple, or schedule=gpipe");
    }
    const int64_t warm = (shape.ranks - shape.rank - 1) * 2 + (shape.chunks - 1) * shape.ranks + 1;
    return WithWeights(OneForwardOneBackward(shape, warm), shape);
  }
  if (schedule == "zero_bubble") {
    if (shape.chunks > 1) return MakeError("zero_bubble runs one stage a rank, and each has ", shape.chunks);
    return ZeroBubble(shape).Take();
  }
  return MakeError("unknown schedule '", schedule, "'");
}

}  // namespace

Result<std::vector<Run>> RunsOf(std::string_view schedule, const Shape& shape) {
  INTERLACE_ASSIGN(const std::vector<Run> runs, WithoutWaits(schedule, shape));
  const size_t late = shape.chunks == 1 ? 1 : schedule == "gpipe" ? runs.size() : static_cast<size_t>(2 * shape.ranks);
  return WithWaits(runs, shape, late);
}

}  // namespace interlace::stages
