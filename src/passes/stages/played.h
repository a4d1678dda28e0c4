// played.h — lists of runs as the ranks of a pipeline would go through them: when each begins and ends, what the end
// waits for, and what a rank holds meanwhile.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "passes/stages/list_schedule.h"

namespace interlace::stages {

inline constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max() / 4;

// Whether a stage has gradients of weights apart.
inline bool HasWeights(int64_t stage) {
  return stage > 0;
}

// What has run, and when it ended.
class PipeLine {
 public:
  PipeLine(const Pipe& pipe, int64_t micro_batches);

  int64_t FreeAt(size_t rank) const { return free_[rank]; }
  // When what a run needs is there; kUnknown: it is not known yet.
  int64_t ReadyAt(size_t rank, const Run& run) const;
  // When it ends.
  int64_t Take(size_t rank, const Run& run, int64_t start);

 private:
  size_t StageOf(size_t rank, const Run& run) const {
    return static_cast<size_t>(pipe_.deal.StageOf(static_cast<int64_t>(rank), run.chunk));
  }
  bool NextIsHere(size_t stage) const {
    const auto s = static_cast<int64_t>(stage);
    return pipe_.deal.RankOf(s) == pipe_.deal.RankOf(s + 1);
  }
  int64_t Message(size_t stage) const { return NextIsHere(stage) ? 0 : pipe_.times[stage].message; }

  const Pipe& pipe_;
  std::vector<std::vector<int64_t>> forward_, backward_;  // by stage: ends
  std::vector<int64_t> free_;
};

// What a rank holds as it goes through its runs. Of a run that leaves more than fits, Fits is false.
class Holding {
 public:
  Holding(const Pipe& pipe, size_t rank) : pipe_(pipe), rank_(rank), room_(pipe.RoomOf(rank)) {}
  bool Fits(const Run& run) const { return Peak(run) <= room_; }
  // Whether a micro-batch whose forward part is next fits to its end: a backward part may leave more than a forward
  // part.
  bool FitsThrough(const Run& forward) const;
  int64_t Peak(const Run& run) const;
  void Take(const Run& run);

 private:
  StageTime BytesOf(const Run& run) const {
    return pipe_.BytesOf(pipe_.deal.StageOf(static_cast<int64_t>(rank_), run.chunk));
  }
  const Pipe& pipe_;
  const size_t rank_;
  const int64_t room_;
  int64_t held_ = 0;
};

// The most that a rank holds.
int64_t MostBytes(const std::vector<Run>& list, const Pipe& pipe, size_t rank);
bool Fits(const Lists& lists, const Pipe& pipe);

struct Played {
  std::vector<std::vector<char>> own;  // by rank and place: it waited for the run before it, not for another rank
  std::vector<std::vector<int64_t>> start = {};  // the same, where it is as long: when
  size_t last = 0;                               // the rank that ends last
};

// Runs the lists, each run as soon as its rank is free and what it needs is there. When the last one ends; -1: never.
int64_t Play(const Lists& runs, const Pipe& pipe, Played* how = nullptr);

// A rank's list with a wait for what each B sent: behind its W, and where the last stage that takes it has begun to.
std::vector<Run> WithWaits(const Lists& lists, const Pipe& pipe, size_t rank);

// Runs that others wait for change places, many times. With the end of the best. Deterministic. No rank holds more than
// there is room for or, where that was more, than at first.
std::pair<Lists, int64_t> Annealed(Lists lists, const Pipe& pipe);

}  // namespace interlace::stages
