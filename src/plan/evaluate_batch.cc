// Many strategies at once: sorted by what they share, then lane by lane (evaluate_lanes.cc), on all cores.
#include <algorithm>
#include <atomic>

#include "base/parallel.h"
#include "plan/stage_sums.h"

namespace interlace::plan {
namespace {

constexpr size_t kChunk = 1 << 14;  // strategies that a thread takes at a time

struct Batch {
  const StageModel::State& state;
  std::span<const Strategy> strategies;
  std::span<StageCost> costs;
  std::atomic<size_t> next{0};
  std::atomic<size_t> wrong{SIZE_MAX};  // the first strategy that does not pass Check
};

// What a strategy shares with others: its place among the parts, embedding, head. Negative: not prepared.
struct Places {
  explicit Places(const StageModel::State& state) : state_(state) {}
  int32_t Of(const Strategy& s) {
    if (s.micro_batch != b_ || s.dp != dp_ || s.tp != tp_) {
      b_ = s.micro_batch, dp_ = s.dp, tp_ = s.tp;
      auto found = state_.index.find({b_, dp_, tp_});
      place_ = found == state_.index.end() ? -1 : found->second;
    }
    if (place_ < 0 || s.zero < 0 || s.zero > 3) return -1;
    return (place_ + StageModel::State::Offset(s.zero, s.embedding, s.head)) * 4 + (s.embedding ? 2 : 0) +
           (s.head ? 1 : 0);
  }

 private:
  const StageModel::State& state_;
  int32_t b_ = -1, dp_ = -1, tp_ = -1, place_ = -1;
};

bool Sound(const Strategy& s) {
  auto ratio = [](float r) { return r >= 0 && r <= 1; };
  return s.layers >= 1 && s.layers <= 1 << 20 && s.full >= 0 && s.selective >= 0 && s.full <= s.layers - s.selective &&
         s.in_flight >= 1 && s.in_flight <= 1 << 20 && ratio(s.weights_out) && ratio(s.gradients_out) &&
         ratio(s.states_out) && ratio(s.activations_out);
}

void Run(Batch& batch) {
  Places places(batch.state);
  std::vector<int32_t> place(kChunk), order(kChunk), starts;
  std::vector<int32_t> seen;  // places of this chunk, and how many strategies each has
  std::vector<int32_t> count(batch.state.parts.size() * 4, 0);
  Lanes lanes;
  for (size_t begin = batch.next.fetch_add(kChunk); begin < batch.strategies.size();
       begin = batch.next.fetch_add(kChunk)) {
    const size_t size = std::min(kChunk, batch.strategies.size() - begin);
    seen.clear();
    for (size_t i = 0; i < size; ++i) {
      const Strategy& s = batch.strategies[begin + i];
      place[i] = Sound(s) ? places.Of(s) : -1;
      if (place[i] < 0) {
        for (int32_t p : seen) count[p] = 0;
        size_t known = batch.wrong.load();
        while (begin + i < known && !batch.wrong.compare_exchange_weak(known, begin + i)) {
        }
        return;
      }
      if (count[place[i]]++ == 0) seen.push_back(place[i]);
    }
    // Counting sort by place; then `count` holds where each place ends.
    int32_t at = 0;
    for (int32_t p : seen) {
      const int32_t have = count[p];
      count[p] = at;
      at += have;
    }
    for (size_t i = 0; i < size; ++i) order[count[place[i]]++] = static_cast<int32_t>(i);
    int32_t from = 0;
    for (int32_t p : seen) {
      const int32_t to = count[p];
      count[p] = 0;
      const StageSums sums = SumsOf(batch.state.parts[p / 4], (p & 2) != 0, (p & 1) != 0);
      for (; from < to; from += lanes.count) {
        lanes.count = std::min<int32_t>(Lanes::kWidth, to - from);
        for (int i = 0; i < lanes.count; ++i) {
          const Strategy& s = batch.strategies[begin + order[from + i]];
          lanes.layers[i] = s.layers, lanes.full[i] = s.full, lanes.selective[i] = s.selective,
          lanes.in_flight[i] = s.in_flight;
          lanes.wo[i] = s.weights_out, lanes.go[i] = s.gradients_out, lanes.oo[i] = s.states_out,
          lanes.ao[i] = s.activations_out;
        }
        EvaluateLanes(sums, lanes);
        for (int i = 0; i < lanes.count; ++i) {
          batch.costs[begin + order[from + i]] = {
              lanes.stable_us[i], lanes.total_us[i] - lanes.stable_us[i], static_cast<int64_t>(lanes.peak_forward[i]),
              static_cast<int64_t>(lanes.peak_backward[i]), static_cast<int64_t>(lanes.host[i])};
        }
      }
    }
  }
}

}  // namespace

Status StageModel::Evaluate(std::span<const Strategy> strategies, std::span<StageCost> costs) const {
  if (strategies.size() != costs.size()) {
    return MakeError(strategies.size(), " strategies but room for ", costs.size(), " costs; the two must be equal");
  }
  Batch batch{*state_, strategies, costs, 0, SIZE_MAX};
  const size_t chunks = (strategies.size() + kChunk - 1) / kChunk;
  InParallel(ThreadsFor(chunks), [&batch](size_t) { Run(batch); });  // each takes chunks while there are any
  const size_t wrong = batch.wrong.load();
  if (wrong == SIZE_MAX) return Ok{};
  Status why = Check(strategies[wrong]);
  return MakeError("strategy ", wrong, ": ", ErrorOf(why));
}

}  // namespace interlace::plan
