#include "passes/stages/list_schedule.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

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
        begun_(forward_),
        free_(times.size(), 0) {}

  int64_t FreeAt(size_t stage) const { return free_[stage]; }
  // When what a run needs is there; kUnknown: it is not known yet.
  int64_t ReadyAt(size_t stage, const Run& run) const {
    const auto m = static_cast<size_t>(run.micro_batch);
    if (run.turn == Turn::kWeights) {  // what its backward part sent has left by then: the stage before has begun it
      if (stage == 0) return backward_[stage][m];
      return std::min(kUnknown, std::max(backward_[stage][m], begun_[stage - 1][m] + times_[stage - 1].message));
    }
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
    if (run.turn == Turn::kBackward) begun_[stage][m] = start, backward_[stage][m] = end;
    return free_[stage] = end;
  }

 private:
  const std::vector<StageTime>& times_;
  std::vector<std::vector<int64_t>> forward_, backward_, begun_;  // ends, and when backward parts began
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
    const int64_t next = std::min(at_b, at_f), at_w = ready(w, stage > 0 && weights < backwards);
    const bool fills = at_w < kUnknown && static_cast<double>(next - at_w) >=
                                              options_.worth * static_cast<double>(times_[stage].weights);
    if (fills) return {w, at_w};
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

using Lists = std::vector<std::vector<Run>>;

struct Played {
  std::vector<std::vector<char>> own;  // by stage and place: it waited for the run before it, not for another stage
  size_t last = 0;                     // the stage that ends last
};

// Runs the lists, each run as soon as its rank is free and what it needs is there. When the last one ends; -1: never.
int64_t Play(const Lists& runs, const std::vector<StageTime>& times, Played* how) {
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
        const int64_t ready = line.ReadyAt(s, run), free = line.FreeAt(s);
        if (ready >= kUnknown) break;
        const int64_t its = line.Take(s, run, std::max(ready, free));
        if (how != nullptr) {
          how->own[s][place[s]] = free >= ready ? 1 : 0;
          if (its > end) how->last = s;
        }
        end = std::max(end, its);
      }
    }
  }
  for (size_t s = 0; s < runs.size(); ++s) {
    if (place[s] < runs[s].size()) return -1;
  }
  return end;
}

// Anneals lists: a run that others wait for goes a few places up, or what stands before it down, as long as the step
// ends earlier, or at first not much later.
class Annealing {
 public:
  Annealing(Lists lists, const std::vector<StageTime>& times) : lists_(std::move(lists)), times_(times) {
    for (const std::vector<Run>& list : lists_) how_.own.emplace_back(list.size(), 0), runs_ += list.size();
  }

  // Deterministic. With the end of what is given.
  std::pair<Lists, int64_t> Best() {
    constexpr size_t kReplayed = 20'000'000, kRounds = 20000;  // runs in all; moves at most
    Lists best = lists_;
    int64_t end = Play(lists_, times_, &how_), best_end = end, heat = 0;
    for (const StageTime& time : times_) heat += (time.forward + time.backward + time.weights) / 8;
    heat /= static_cast<int64_t>(times_.size());  // an eighth of a micro-batch
    std::vector<std::pair<size_t, size_t>> chain = Chain();
    const size_t rounds = std::min(kRounds, kReplayed / (runs_ + 1));
    for (size_t round = 0; round < rounds && !chain.empty(); ++round) {
      const auto [stage, at] = chain[random_() % chain.size()];
      std::vector<Run>&list = lists_[stage], before = list;
      const size_t by = 1 + random_() % 4;
      if (random_() % 2 == 0) {
        const auto from = list.begin() + static_cast<ptrdiff_t>(at) - 1;
        std::rotate(from, from + 1, from + 1 + static_cast<ptrdiff_t>(std::min(by, list.size() - at)));
      } else {
        const auto from = list.begin() + static_cast<ptrdiff_t>(at);
        std::rotate(from - static_cast<ptrdiff_t>(std::min(by, at)), from, from + 1);
      }
      const auto worse = heat * static_cast<int64_t>((rounds - round) * (random_() % 1024) / rounds) / 1024;
      const int64_t its = Allowed(stage) ? Play(lists_, times_, &how_) : -1;
      if (its < 0 || its > end + worse) {
        list = before;
        continue;
      }
      end = its;
      chain = Chain();
      if (end < best_end) best_end = end, best = lists_;
    }
    return {std::move(best), best_end};
  }

 private:
  // Each turn in the order of the micro-batches, and no more of them held than there are ranks.
  bool Allowed(size_t stage) const {
    std::array<int64_t, 4> done = {0, 0, 0, 0};
    for (const Run& run : lists_[stage]) {
      if (run.micro_batch != done[static_cast<size_t>(run.turn)]++) return false;
      const auto [forwards, backwards, sent, weights] = done;
      if (backwards > forwards || weights > backwards ||
          forwards - (stage == 0 ? backwards : weights) > static_cast<int64_t>(times_.size()))
        return false;
    }
    return true;
  }

  // Of the runs that the end waits for, each for the next, those that waited for the one before them in their list.
  std::vector<std::pair<size_t, size_t>> Chain() const {
    std::vector<std::pair<size_t, size_t>> out;
    size_t stage = how_.last, at = lists_[stage].size() - 1;
    while (true) {
      if (how_.own[stage][at] != 0) {
        if (at == 0) return out;
        out.emplace_back(stage, at--);
        continue;
      }
      const Run& run = lists_[stage][at];
      const Run other{run.turn == Turn::kForward ? Turn::kForward : Turn::kBackward, 0, run.micro_batch};
      run.turn == Turn::kBackward ? ++stage : --stage;
      at = static_cast<size_t>(std::find(lists_[stage].begin(), lists_[stage].end(), other) - lists_[stage].begin());
    }
  }

  Lists lists_;
  const std::vector<StageTime>& times_;
  Played how_;
  size_t runs_ = 0;
  std::mt19937_64 random_{1};
};

}  // namespace

std::vector<std::vector<Run>> ListSchedule(const std::vector<StageTime>& times, int64_t micro_batches,
                                           const ListOptions& options) {
  return ListScheduler(times, micro_batches, options).Take();
}

int64_t EndOf(const std::vector<std::vector<Run>>& runs, const std::vector<StageTime>& times) {
  return Play(runs, times, nullptr);
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
  return Annealing(std::move(best), times).Best().first;
}

}  // namespace interlace::stages
