// frontiers.h — the frontiers of all stages that a search may ask for: computed, or bounded as long as nobody needs
// more. Inside the room only.
#pragma once

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <vector>

#include "plan/stage_model.h"
#include "plan/tune.h"

namespace interlace::plan {

struct KeyHash {
  size_t operator()(const StageKey& k) const {
    uint64_t h =
        static_cast<uint64_t>(k.layers) << 2 | static_cast<uint64_t>(k.embedding) << 1 | static_cast<uint64_t>(k.head);
    for (int32_t v : {k.devices, k.micro_batches, k.in_flight})
      h = (h ^ static_cast<uint64_t>(v)) * 0x9E3779B97F4A7C15u, h ^= h >> 29;
    return h;
  }
};

// The frontiers of all keys, computed or bounded. One stage model a tensor-parallel degree: a frontier then keeps the
// best of every layout, which matters where stages must be alike or boundaries cost time.
class Frontiers {
 public:
  static Result<Frontiers> Create(const LayerSource& layers, const ClusterSpec& cluster, const StageOptions& options,
                                  const TuneOptions& tune);

  // Computed, else a bound for each layout; stays where it is.
  const Frontier& Of(const StageKey& key);
  bool Known(const StageKey& key) const { return computed_.contains(key); }

  // Computes those not yet known, on all threads, until `late`; `longest_us` is not below any t that can still be of
  // use.
  void Compute(std::vector<StageKey> keys, double longest_us, const std::function<bool()>& late);

  const StageModel& ModelOf(int32_t tp) const {
    return std::find_if(models_.begin(), models_.end(), [&](const auto& m) { return m.tp == tp; })->model;
  }
  int64_t computed() const { return static_cast<int64_t>(computed_.size()); }
  int64_t points() const { return points_; }

 private:
  struct Model {
    int32_t tp;
    StageModel model;
  };
  std::vector<Frontier> Bounds(const StageKey& key) const;  // of 1, 2, ... layers
  // Imbalance left aside: every micro-batch takes its share of what the first and the last take beyond it.
  void Average(FrontierPoint& point) const {
    if (!average_) return;
    point.cost.stable_us += point.cost.extra_us / point.strategy.micro_batches;
    point.cost.extra_us = 0;
  }

  std::vector<Model> models_;
  std::unordered_map<StageKey, Frontier, KeyHash> computed_;
  std::unordered_map<StageKey, std::vector<Frontier>, KeyHash> bounds_;  // of 1, 2, ... layers, by the rest of the key
  const std::vector<Frontier>* last_ =
      nullptr;  // of bounds_: whoever asks, asks for one number of layers after the other
  StageKey last_key_;
  int32_t blocks_ = 1;
  int64_t batch_ = 1, points_ = 0;
  int32_t threads_ = 0;  // 0: as many as there are cores
  bool average_ = false;
};

}  // namespace interlace::plan
