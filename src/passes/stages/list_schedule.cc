#include "passes/stages/list_schedule.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <tuple>

#include "passes/stages/played.h"

namespace interlace::stages {
namespace {

struct Choice {
  Run run;
  int64_t start = kUnknown;
};

// The run that begins first goes first, so that what it may need has ended or is known.
template <typename Next, typename Taken>
Lists TakeInTurns(PipeLine& line, size_t ranks, Next next, Taken taken) {
  Lists lists(ranks);
  while (true) {
    size_t rank = ranks;
    Choice first;
    for (size_t r = 0; r < ranks; ++r) {
      const Choice choice = next(r);
      if (choice.start < first.start) first = choice, rank = r;
    }
    if (rank == ranks) return lists;
    line.Take(rank, first.run, first.start);
    lists[rank].push_back(first.run);
    taken(rank, first.run);
  }
}

class ListScheduler {
 public:
  ListScheduler(const Pipe& pipe, int64_t micro_batches, const ListOptions& options)
      : times_(pipe.times),
        count_(micro_batches),
        options_(options),
        line_(pipe, micro_batches),
        done_(times_.size()),
        last_(times_.size(), Turn::kForward) {
    for (size_t stage = 0; stage < times_.size(); ++stage) holding_.emplace_back(pipe, stage);
  }

  Lists Take() {
    return TakeInTurns(
        line_, times_.size(), [&](size_t stage) { return Next(stage); },
        [&](size_t stage, const Run& run) {
          ++done_[stage][static_cast<size_t>(run.turn)];
          holding_[stage].Take(run);
          if (run.turn != Turn::kWeights) last_[stage] = run.turn;
        });
  }

 private:
  int64_t Done(size_t stage, Turn turn) const { return done_[stage][static_cast<size_t>(turn)]; }

  Choice Next(size_t stage) const {
    const int64_t now = line_.FreeAt(stage), forwards = Done(stage, Turn::kForward),
                  backwards = Done(stage, Turn::kBackward);
    const int64_t weights = Done(stage, Turn::kWeights);
    const auto ready = [&](const Run& run, bool may) {
      return may ? std::max(now, line_.ReadyAt(stage, run)) : kUnknown;
    };
    const Run b{Turn::kBackward, 0, backwards}, f{Turn::kForward, 0, forwards}, w{Turn::kWeights, 0, weights};
    const int64_t held = forwards - (HasWeights(static_cast<int64_t>(stage)) ? weights : backwards);
    const bool few = !options_.as_1f1b || held < static_cast<int64_t>(times_.size() - stage);
    const bool room = held == 0 || (few && holding_[stage].FitsThrough(f));
    const bool waits = stage > 0 && weights < backwards;  // gradients of weights
    if (waits && backwards < forwards && !holding_[stage].Fits(b)) return {w, ready(w, true)};
    const int64_t at_b = ready(b, backwards < forwards), at_f = ready(f, forwards < count_ && room);
    // In turns, so that the pipe stays filled.
    if (at_f <= now && last_[stage] == Turn::kBackward) return {f, now};
    if (at_b <= now) return {b, now};
    if (at_f <= now) return {f, now};
    const int64_t next = std::min(at_b, at_f), at_w = ready(w, waits);
    const bool fills = at_w < kUnknown &&
                       static_cast<double>(next - at_w) >= options_.worth * static_cast<double>(times_[stage].weights);
    if (fills) return {w, at_w};
    return at_b <= at_f ? Choice{b, at_b} : Choice{f, at_f};
  }

  const std::vector<StageTime>& times_;
  const int64_t count_;
  const ListOptions options_;
  PipeLine line_;
  std::vector<std::array<int64_t, 4>> done_;  // by stage and turn
  std::vector<Turn> last_;                    // by stage, but gradients of weights
  std::vector<Holding> holding_;              // by stage
};

// Lists without gradients of weights, which go where there is nothing else to do or no room for what is next. With
// `strict` the lists that it gives lack runs where ranks would wait for one another for room.
class Filler {
 public:
  Filler(const Pipe& pipe, Lists lists, int64_t micro_batches, double worth, bool strict)
      : pipe_(pipe),
        lists_(std::move(lists)),
        worth_(worth),
        strict_(strict),
        line_(pipe, micro_batches),
        place_(lists_.size(), 0) {
    for (size_t rank = 0; rank < lists_.size(); ++rank) holding_.emplace_back(pipe, rank), waiting_.emplace_back();
  }

  Lists Take() {
    return TakeInTurns(
        line_, lists_.size(), [&](size_t rank) { return Next(rank); },
        [&](size_t rank, const Run& run) {
          holding_[rank].Take(run);
          if (run.turn == Turn::kWeights) return waiting_[rank].pop_front();
          ++place_[rank];
          const int64_t stage = pipe_.deal.StageOf(static_cast<int64_t>(rank), run.chunk);
          if (run.turn == Turn::kBackward && HasWeights(stage))
            waiting_[rank].push_back({Turn::kWeights, run.chunk, run.micro_batch});
        });
  }

 private:
  Choice Next(size_t rank) const {
    const int64_t now = line_.FreeAt(rank);
    Choice next, fill;
    bool fits = true;
    if (place_[rank] < lists_[rank].size()) {
      const Run& run = lists_[rank][place_[rank]];
      next = {run, std::max(now, line_.ReadyAt(rank, run))};
      fits = holding_[rank].Fits(run);
    }
    if (!waiting_[rank].empty()) {
      const Run& run = waiting_[rank].front();
      const int64_t stage = pipe_.deal.StageOf(static_cast<int64_t>(rank), run.chunk);
      const int64_t time = pipe_.times[static_cast<size_t>(stage)].weights;
      fill = {run, std::max(now, line_.ReadyAt(rank, run))};
      const bool pays = static_cast<double>(next.start - fill.start) >= worth_ * static_cast<double>(time);
      if (!fits && (strict_ || fill.start < kUnknown)) return fill;
      if (fill.start < kUnknown && pays && fill.start < next.start) return fill;
    }
    return next;
  }

  const Pipe& pipe_;
  const Lists lists_;
  const double worth_;
  const bool strict_;
  PipeLine line_;
  std::vector<size_t> place_;             // by rank
  std::vector<Holding> holding_;          // by rank
  std::vector<std::deque<Run>> waiting_;  // by rank
};

Lists FindFastest(const Pipe& pipe, int64_t micro_batches) {
  Lists best;
  int64_t end = kUnknown;
  bool fits = false;
  const auto consider = [&](Lists found) {
    size_t runs = 0;  // a list that stopped for want of room lacks some
    for (const std::vector<Run>& list : found) runs += list.size();
    if (static_cast<int64_t>(runs) != (3 * pipe.deal.Stages() - 1) * micro_batches) return;
    const int64_t its = Play(found, pipe);
    const bool it_fits = Fits(found, pipe);
    if (its >= 0 && (it_fits == fits ? its < end : it_fits)) end = its, fits = it_fits, best = std::move(found);
  };
  if (pipe.deal.v) {
    const std::vector<int64_t> none(static_cast<size_t>(pipe.deal.ranks), 0);
    for (Less less; less.late < std::min<int64_t>(pipe.deal.ranks, 4) && !fits; ++less.late) {
      for (less.fewer = 0; less.fewer < pipe.deal.ranks; ++less.fewer) {
        consider(Filled({pipe.deal, pipe.times, none}, micro_batches, 0, less));
        for (const double worth : {0.0, 0.25, 0.5, 1.0}) consider(Filled(pipe, micro_batches, worth, less));
      }
    }
    return Annealed(std::move(best), pipe).first;
  }
  Lists first;
  Shape shape{.deal = pipe.deal, .micro_batches = micro_batches, .split = true};
  for (shape.rank = 0; shape.rank < pipe.deal.ranks; ++shape.rank) first.push_back(OneForwardOneBackward(shape));
  consider(std::move(first));
  for (const bool as_1f1b : {false, true}) {
    for (const double worth : {0.0, 0.25, 0.5, 1.0}) consider(ListSchedule(pipe, micro_batches, {as_1f1b, worth}));
  }
  const std::vector<StageTime> equal(pipe.times.size());
  consider(ListSchedule({pipe.deal, equal, {}}, micro_batches, {}));  // zero_bubble
  return Annealed(std::move(best), pipe).first;
}

}  // namespace

Lists ListSchedule(const Pipe& pipe, int64_t micro_batches, const ListOptions& options) {
  return ListScheduler(pipe, micro_batches, options).Take();
}

Lists Filled(const Pipe& pipe, int64_t micro_batches, double worth, const Less& less) {
  Lists lists;
  for (int64_t rank = 0; rank < pipe.deal.ranks; ++rank)
    lists.push_back(ThereAndBack(pipe.deal.ranks, rank, micro_batches, less));
  Lists found = Filler(pipe, lists, micro_batches, worth, /*strict=*/true).Take();
  size_t runs = 0;
  for (const std::vector<Run>& list : found) runs += list.size();
  const bool all = static_cast<int64_t>(runs) == (3 * pipe.deal.Stages() - 1) * micro_batches;
  return all ? found : Filler(pipe, std::move(lists), micro_batches, worth, /*strict=*/false).Take();
}

Lists FastestSchedule(const Pipe& pipe, int64_t micro_batches) {
  constexpr size_t kRemembered = 8;
  static std::mutex mutex;
  static auto* const known = new std::deque<std::tuple<Pipe, int64_t, Lists>>;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [of, count, lists] : *known) {
      if (count == micro_batches && of == pipe) return lists;
    }
  }
  Lists found = FindFastest(pipe, micro_batches);
  const std::lock_guard lock(mutex);
  known->emplace_front(pipe, micro_batches, found);
  if (known->size() > kRemembered) known->pop_back();
  return found;
}

}  // namespace interlace::stages
