#include "passes/stages/list_schedule.h"

#include <algorithm>
#include <limits>

namespace interlace::stages {
namespace {

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max() / 4;

int64_t TimeOf(const StageTime& time, Turn turn) {
  return turn == Turn::kForward ? time.forward : turn == Turn::kBackward ? time.backward : time.weights;
}

// What has run, and when it ended.
class Timeline {
 public:
  Timeline(const std::vector<StageTime>& times, int64_t micro_batches)
      : times_(times),
        forward_(times.size(), std::vector<int64_t>(static_cast<size_t>(micro_batches), kUnknown)),
        backward_(forward_),
        free_(times.size(), 0) {}

  int64_t FreeAt(size_t stage) const { return free_[stage]; }
  // When what a run needs is there; kUnknown: it is not known yet.
  int64_t ReadyAt(size_t stage, const Run& run) const {
    const auto m = static_cast<size_t>(run.micro_batch);
    if (run.turn == Turn::kWeights) return backward_[stage][m];
    if (run.turn == Turn::kForward)
      return stage == 0 ? 0 : std::min(kUnknown, forward_[stage - 1][m] + times_[stage - 1].message);
    const int64_t own = forward_[stage][m];
    if (stage + 1 == times_.size()) return own;
    return std::min(kUnknown, std::max(own, backward_[stage + 1][m] + times_[stage].message));
  }
  int64_t Take(size_t stage, const Run& run, int64_t start) {
    const int64_t end = start + TimeOf(times_[stage], run.turn);
    const auto m = static_cast<size_t>(run.micro_batch);
    if (run.turn == Turn::kForward) forward_[stage][m] = end;
    if (run.turn == Turn::kBackward) backward_[stage][m] = end;
    return free_[stage] = end;
  }

 private:
  const std::vector<StageTime>& times_;
  std::vector<std::vector<int64_t>> forward_, backward_;  // by stage and micro-batch
  std::vector<int64_t> free_;
};

class ListScheduler {
 public:
  ListScheduler(const std::vector<StageTime>& times, int64_t micro_batches, const ListOptions& options)
      : times_(times),
        count_(micro_batches),
        options_(options),
        line_(times, micro_batches),
        done_(times.size()),
        last_(times.size(), Turn::kForward),
        runs_(times.size()) {}

  // The run that begins first goes first, so that what it may need has ended or is known.
  std::vector<std::vector<Run>> Take() {
    while (true) {
      size_t stage = times_.size();
      Choice first{{}, kUnknown};
      for (size_t s = 0; s < times_.size(); ++s) {
        const Choice choice = Next(s);
        if (choice.start < first.start) first = choice, stage = s;
      }
      if (stage == times_.size()) return std::move(runs_);
      line_.Take(stage, first.run, first.start);
      ++done_[stage][static_cast<size_t>(first.run.turn)];
      if (first.run.turn != Turn::kWeights) last_[stage] = first.run.turn;
      runs_[stage].push_back(first.run);
    }
  }

 private:
  struct Choice {
    Run run;
    int64_t start = kUnknown;
  };

  int64_t Done(size_t stage, Turn turn) const { return done_[stage][static_cast<size_t>(turn)]; }

  Choice Next(size_t stage) const {
    const int64_t now = line_.FreeAt(stage), forwards = Done(stage, Turn::kForward),
                  backwards = Done(stage, Turn::kBackward);
    const int64_t weights = Done(stage, Turn::kWeights);
    const auto ready = [&](const Run& run, bool may) {
      return may ? std::max(now, line_.ReadyAt(stage, run)) : kUnknown;
    };
    const Run b{Turn::kBackward, 0, backwards}, f{Turn::kForward, 0, forwards}, w{Turn::kWeights, 0, weights};
    const auto ranks = static_cast<int64_t>(times_.size());
    const int64_t held = forwards - (stage == 0 ? backwards : weights);
    const int64_t most = options_.as_1f1b ? ranks - static_cast<int64_t>(stage) : ranks;
    const int64_t at_b = ready(b, backwards < forwards), at_f = ready(f, forwards < count_ && held < most);
    // In turns, so that the pipe stays filled.
    if (at_f <= now && last_[stage] == Turn::kBackward) return {f, now};
    if (at_b <= now) return {b, now};
    if (at_f <= now) return {f, now};
    const int64_t next = std::min(at_b, at_f);
    const bool fills = stage > 0 && weights < backwards &&
                       static_cast<double>(next - now) >= options_.worth * static_cast<double>(times_[stage].weights);
    if (fills) return {w, now};
    return at_b <= at_f ? Choice{b, at_b} : Choice{f, at_f};
  }

  const std::vector<StageTime>& times_;
  const int64_t count_;
  const ListOptions options_;
  Timeline line_;
  std::vector<std::array<int64_t, 4>> done_;  // by stage and turn
  std::vector<Turn> last_;                    // by stage, but gradients of weights
  std::vector<std::vector<Run>> runs_;
};

}  // namespace

std::vector<std::vector<Run>> ListSchedule(const std::vector<StageTime>& times, int64_t micro_batches,
                                           const ListOptions& options) {
  return ListScheduler(times, micro_batches, options).Take();
}

int64_t EndOf(const std::vector<std::vector<Run>>& runs, const std::vector<StageTime>& times) {
  int64_t micro_batches = 0, end = 0;
  for (const std::vector<Run>& list : runs) {
    for (const Run& run : list) micro_batches = std::max(micro_batches, run.micro_batch + 1);
  }
  Timeline line(times, micro_batches);
  std::vector<size_t> place(runs.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < runs.size(); ++s) {
      for (; place[s] < runs[s].size(); ++place[s], moved = true) {
        const Run& run = runs[s][place[s]];
        const int64_t ready = line.ReadyAt(s, run);
        if (ready >= kUnknown) break;
        end = std::max(end, line.Take(s, run, std::max(ready, line.FreeAt(s))));
      }
    }
  }
  for (size_t s = 0; s < runs.size(); ++s) {
    if (place[s] < runs[s].size()) return -1;
  }
  return end;
}

std::vector<std::vector<Run>> FastestSchedule(const std::vector<StageTime>& times, int64_t micro_batches) {
  std::vector<std::vector<Run>> best;
  Shape shape{.ranks = static_cast<int64_t>(times.size()), .micro_batches = micro_batches, .split = true};
  for (shape.rank = 0; shape.rank < shape.ranks; ++shape.rank) best.push_back(OneForwardOneBackward(shape));
  int64_t end = EndOf(best, times);
  const auto consider = [&](std::vector<std::vector<Run>> found) {
    const int64_t its = EndOf(found, times);
    if (its >= 0 && its < end) end = its, best = std::move(found);
  };
  for (const bool as_1f1b : {false, true}) {
    for (const double worth : {0.0, 0.25, 0.5, 1.0}) consider(ListSchedule(times, micro_batches, {as_1f1b, worth}));
  }
  consider(ListSchedule(std::vector<StageTime>(times.size()), micro_batches, {}));  // zero_bubble
  return best;
}

}  // namespace interlace::stages
