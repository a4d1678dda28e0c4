#include "passes/stages/played.h"

#include <algorithm>
#include <random>

namespace interlace::stages {
namespace {

int64_t RunTime(const StageTime& time, Turn turn) {
  return turn == Turn::kForward ? time.forward : turn == Turn::kBackward ? time.backward : time.weights;
}

// Anneals lists: a run that others wait for goes a few places up, or what stands before it down, as long as the step
// ends earlier, or at first not much later.
class Annealing {
 public:
  Annealing(Lists lists, const Pipe& pipe) : lists_(std::move(lists)), pipe_(pipe) {
    for (size_t rank = 0; rank < lists_.size(); ++rank) {
      how_.own.emplace_back(lists_[rank].size(), 0), runs_ += lists_[rank].size();
      room_.push_back(std::max(pipe.RoomOf(rank), MostBytes(lists_[rank], pipe, rank)));
    }
  }

  std::pair<Lists, int64_t> Best() {
    constexpr size_t kReplayed = 20'000'000, kRounds = 20000;  // runs in all; moves at most
    Lists best = lists_;
    int64_t end = Play(lists_, pipe_, &how_), best_end = end, heat = 0;
    for (const StageTime& time : pipe_.times) heat += (time.forward + time.backward + time.weights) / 8;
    heat /= pipe_.deal.ranks;  // an eighth of a micro-batch
    std::vector<std::pair<size_t, size_t>> chain = Chain();
    const size_t rounds = std::min(kRounds, kReplayed / (runs_ + 1));
    for (size_t round = 0; round < rounds && !chain.empty(); ++round) {
      const auto [rank, at] = chain[random_() % chain.size()];
      std::vector<Run>&list = lists_[rank], before = list;
      const size_t by = 1 + random_() % 4;
      if (random_() % 2 == 0) {
        const auto from = list.begin() + static_cast<ptrdiff_t>(at) - 1;
        std::rotate(from, from + 1, from + 1 + static_cast<ptrdiff_t>(std::min(by, list.size() - at)));
      } else {
        const auto from = list.begin() + static_cast<ptrdiff_t>(at);
        std::rotate(from - static_cast<ptrdiff_t>(std::min(by, at)), from, from + 1);
      }
      const auto worse = heat * static_cast<int64_t>((rounds - round) * (random_() % 1024) / rounds) / 1024;
      const int64_t its = Allowed(rank) ? Play(lists_, pipe_, &how_) : -1;
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
  // Each turn of each chunk in the order of the micro-batches, and no more held than there is room for.
  bool Allowed(size_t rank) const {
    std::vector<std::array<int64_t, 4>> done(static_cast<size_t>(pipe_.deal.chunks), {0, 0, 0, 0});
    Holding holding(pipe_, rank);
    for (const Run& run : lists_[rank]) {
      auto& of = done[static_cast<size_t>(run.chunk)];
      if (run.micro_batch != of[static_cast<size_t>(run.turn)]++) return false;
      const auto [forwards, backwards, weights, sent] = of;
      if (backwards > forwards || weights > backwards || holding.Peak(run) > room_[rank]) return false;
      holding.Take(run);
    }
    return true;
  }

  // Of the runs that the end waits for, each for the next, those that waited for the one before them in their list.
  std::vector<std::pair<size_t, size_t>> Chain() const {
    std::vector<std::pair<size_t, size_t>> out;
    size_t rank = how_.last, at = lists_[rank].size() - 1;
    while (true) {
      if (how_.own[rank][at] != 0) {
        if (at == 0) return out;
        out.emplace_back(rank, at--);
        continue;
      }
      const Run& run = lists_[rank][at];
      const int64_t stage = pipe_.deal.StageOf(static_cast<int64_t>(rank), run.chunk);
      const int64_t from = run.turn == Turn::kBackward ? stage + 1 : stage - 1;
      const Run other{run.turn == Turn::kForward ? Turn::kForward : Turn::kBackward, pipe_.deal.ChunkOf(from),
                      run.micro_batch};
      rank = static_cast<size_t>(pipe_.deal.RankOf(from));
      at = static_cast<size_t>(std::find(lists_[rank].begin(), lists_[rank].end(), other) - lists_[rank].begin());
    }
  }

  Lists lists_;
  const Pipe& pipe_;
  std::vector<int64_t> room_;  // by rank
  Played how_;
  size_t runs_ = 0;
  std::mt19937_64 random_{1};
};

}  // namespace

PipeLine::PipeLine(const Pipe& pipe, int64_t micro_batches)
    : pipe_(pipe),
      forward_(pipe.times.size(), std::vector<int64_t>(static_cast<size_t>(micro_batches), kUnknown)),
      backward_(forward_),
      free_(static_cast<size_t>(pipe.deal.ranks), 0) {}

int64_t PipeLine::ReadyAt(size_t rank, const Run& run) const {
  const auto m = static_cast<size_t>(run.micro_batch);
  const size_t stage = StageOf(rank, run);
  if (run.turn == Turn::kWeights) return backward_[stage][m];
  if (run.turn == Turn::kForward)
    return stage == 0 ? 0 : std::min(kUnknown, forward_[stage - 1][m] + Message(stage - 1));
  const int64_t own = forward_[stage][m];
  if (stage + 1 == pipe_.times.size()) return own;
  return std::min(kUnknown, std::max(own, backward_[stage + 1][m] + Message(stage)));
}

int64_t PipeLine::Take(size_t rank, const Run& run, int64_t start) {
  const size_t stage = StageOf(rank, run);
  const int64_t end = start + RunTime(pipe_.times[stage], run.turn);
  const auto m = static_cast<size_t>(run.micro_batch);
  if (run.turn == Turn::kForward) forward_[stage][m] = end;
  if (run.turn == Turn::kBackward) backward_[stage][m] = end;
  return free_[rank] = end;
}

int64_t Holding::Peak(const Run& run) const {
  const StageTime time = BytesOf(run);
  const int64_t own = run.turn == Turn::kForward ? 0 : run.turn == Turn::kBackward ? time.held : time.kept;
  return held_ - own + time.peak[run.turn == Turn::kWeights ? 2 : static_cast<size_t>(run.turn)];
}

bool Holding::FitsThrough(const Run& forward) const {
  const StageTime time = BytesOf(forward);
  return held_ + *std::max_element(std::begin(time.peak), std::end(time.peak)) <= room_;
}

void Holding::Take(const Run& run) {
  const StageTime time = BytesOf(run);
  const int64_t kept = HasWeights(pipe_.deal.StageOf(static_cast<int64_t>(rank_), run.chunk)) ? time.kept : 0;
  if (run.turn == Turn::kForward) held_ += time.held;
  if (run.turn == Turn::kBackward) held_ += kept - time.held;
  if (run.turn == Turn::kWeights) held_ -= kept;
}

int64_t MostBytes(const std::vector<Run>& list, const Pipe& pipe, size_t rank) {
  Holding holding(pipe, rank);
  int64_t most = 0;
  for (const Run& run : list) {
    most = std::max(most, holding.Peak(run));
    holding.Take(run);
  }
  return most;
}

bool Fits(const Lists& lists, const Pipe& pipe) {
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    if (MostBytes(lists[rank], pipe, rank) > pipe.RoomOf(rank)) return false;
  }
  return true;
}

int64_t Play(const Lists& runs, const Pipe& pipe, Played* how) {
  int64_t micro_batches = 0, end = 0;
  for (const std::vector<Run>& list : runs) {
    for (const Run& run : list) micro_batches = std::max(micro_batches, run.micro_batch + 1);
  }
  PipeLine line(pipe, micro_batches);
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
          if (!how->start.empty()) how->start[s][place[s]] = std::max(ready, free);
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

std::vector<Run> WithWaits(const Lists& lists, const Pipe& pipe, size_t rank) {
  Played how;
  for (const std::vector<Run>& list : lists)
    how.own.emplace_back(list.size(), 0), how.start.emplace_back(list.size(), 0);
  Play(lists, pipe, &how);
  std::vector<std::pair<int64_t, Run>> waits;  // and when the stage before has begun to take it
  std::vector<Run> out;
  for (size_t i = 0; i <= lists[rank].size(); ++i) {
    const int64_t now = i < lists[rank].size() ? how.start[rank][i] : kUnknown;
    std::erase_if(waits, [&](const auto& wait) {
      const bool due =
          pipe.deal.v ? wait.first < now : wait.first <= now;  // of two at once each may wait for the other
      if (due) out.push_back(wait.second);
      return due;
    });
    if (i == lists[rank].size()) break;
    const Run& run = lists[rank][i];
    out.push_back(run);
    const int64_t stage = pipe.deal.StageOf(static_cast<int64_t>(rank), run.chunk);
    // The first stage sends nothing, but may have what another of its rank has sent.
    if (stage == 0 && run.turn == Turn::kBackward) out.push_back({Turn::kSent, run.chunk, run.micro_batch});
    if (run.turn != Turn::kWeights) continue;
    const int64_t by = pipe.TakerOf(stage);
    const auto before = static_cast<size_t>(pipe.deal.RankOf(by));
    const Run taker{Turn::kBackward, pipe.deal.ChunkOf(by), run.micro_batch};
    const auto at = std::find(lists[before].begin(), lists[before].end(), taker) - lists[before].begin();
    waits.emplace_back(how.start[before][static_cast<size_t>(at)] + pipe.times[static_cast<size_t>(stage - 1)].message,
                       Run{Turn::kSent, run.chunk, run.micro_batch});
  }
  return out;
}

std::pair<Lists, int64_t> Annealed(Lists lists, const Pipe& pipe) {
  return Annealing(std::move(lists), pipe).Best();
}

}  // namespace interlace::stages
