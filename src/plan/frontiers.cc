#include "plan/frontiers.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>

#include "base/parallel.h"

namespace interlace::plan {

Result<Frontiers> Frontiers::Create(const LayerSource& layers, const ClusterSpec& cluster, const StageOptions& options,
                                    const TuneOptions& tune) {
  Frontiers out;
  out.average_ = !tune.space.imbalance_aware;
  out.batch_ = options.global_batch;
  out.blocks_ = layers.blocks();
  out.threads_ = std::max(tune.threads, 0);
  std::optional<Error> error;
  for (int32_t tp = 1; tp <= layers.largest_tp(); ++tp) {
    if (layers.largest_tp() % tp != 0 || tp > cluster.per_node || cluster.per_node % tp != 0) continue;
    const std::vector<int32_t>& wanted = options.tensor_parallel;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), tp) == wanted.end()) continue;
    StageOptions mine = options;
    mine.tensor_parallel = {tp};
    Result<StageModel> model = StageModel::Create(layers, cluster, mine);
    if (model.ok()) {
      out.models_.push_back({tp, std::move(*model)});
    } else if (!error) {
      error = model.error();
    }
  }
  if (!out.models_.empty()) return out;
  return error ? *error
               : MakeError("no tensor-parallel degree of the space divides both the model and a node of ",
                           cluster.per_node, " devices; allow tp 1");
}

const Frontier& Frontiers::Of(const StageKey& key) {
  if (auto at = computed_.find(key); at != computed_.end()) return at->second;
  StageKey alike = key;
  alike.in_flight = 1, alike.layers = 1;  // memory is left aside
  if (last_ == nullptr || !(alike == last_key_)) {
    auto [at, added] = bounds_.try_emplace(alike);
    if (added) at->second = Bounds(alike);
    last_ = &at->second, last_key_ = alike;
  }
  return (*last_)[static_cast<size_t>(key.layers) - 1];
}

std::vector<Frontier> Frontiers::Bounds(const StageKey& key) const {
  std::vector<Frontier> out(static_cast<size_t>(blocks_));
  std::vector<StageModel::Bound> bounds(out.size());
  for (const auto& [tp, model] : models_) {
    int32_t dp = key.devices / tp;
    if (dp * tp != key.devices || batch_ % (int64_t{key.micro_batches} * dp) != 0) continue;
    model.BoundsOf(key, bounds);
    for (size_t i = 0; i < out.size() && std::isfinite(bounds[i].total_us); ++i) {
      FrontierPoint& point = out[i].emplace_back();
      point.strategy.layers = static_cast<int32_t>(i) + 1;
      point.strategy.dp = dp, point.strategy.tp = tp, point.strategy.micro_batches = key.micro_batches;
      point.strategy.micro_batch = static_cast<int32_t>(batch_ / (int64_t{key.micro_batches} * dp));
      point.cost.stable_us = bounds[i].stable_us;
      point.cost.extra_us = bounds[i].total_us - bounds[i].stable_us;
      Average(point);
    }
  }
  return out;
}

void Frontiers::Compute(std::vector<StageKey> keys, double longest_us, const std::function<bool()>& late) {
  std::erase_if(keys, [&](const StageKey& key) { return Known(key); });
  std::vector<Frontier> parts(keys.size() * models_.size());
  std::atomic<bool> stopped = false;
  const auto compute = [&](size_t i) {
    if (stopped || late()) {
      stopped = true;
      return;
    }
    const StageKey& key = keys[i / models_.size()];
    const auto& [tp, model] = models_[i % models_.size()];
    if (key.devices % tp == 0) parts[i] = model.FrontierOf(key, longest_us);
  };
  InParallel(parts.size(), compute, static_cast<size_t>(threads_));
  if (stopped) return;  // half a frontier is none
  for (size_t i = 0; i < parts.size(); ++i) {
    Frontier& all = computed_[keys[i / models_.size()]];
    for (FrontierPoint& point : parts[i]) Average(point);
    all.insert(all.end(), parts[i].begin(), parts[i].end());
    points_ += static_cast<int64_t>(parts[i].size());
  }
}

}  // namespace interlace::plan
