#include "plan/tune_state.h"

#include <algorithm>

namespace interlace::plan {

std::vector<Pair> PairsOf(const Space& space, int32_t blocks, const ClusterSpec& cluster, int64_t global_batch) {
  std::vector<Pair> pairs;
  int32_t devices = static_cast<int32_t>(cluster.devices), node = static_cast<int32_t>(cluster.per_node);
  // On large clusters uneven stages differ by a 64th of the devices at least; equal stages may be smaller.
  std::vector<int32_t> free = FreeDeviceCounts(devices, node);
  std::erase_if(free, [&](int32_t count) {
    int32_t nodes = count / node;
    return count < devices / 64 || (nodes > 8 && count != devices && (nodes & (nodes - 1)) != 0);
  });
  for (int64_t g = 1; g <= global_batch; ++g) {
    if (global_batch % g != 0 || (space.powers_of_two && (g & (g - 1)) != 0)) continue;
    for (int32_t s = 1; s <= std::min(blocks, devices); ++s) {
      if (!space.stages.empty() && std::find(space.stages.begin(), space.stages.end(), s) == space.stages.end())
        continue;
      if (space.equal_layers && blocks % s != 0) continue;
      Pair pair;
      pair.micro_batches = static_cast<int32_t>(g), pair.stages = s;
      bool divides = devices % s == 0 && (devices / s < node ? node % (devices / s) : devices / s % node) == 0;
      if (space.free_devices) {
        pair.counts = free;
        std::erase_if(pair.counts, [&](int32_t count) { return count > devices - (s - 1) * free.front(); });
        bool known = divides && std::find(free.begin(), free.end(), devices / s) != free.end();
        if (!pair.counts.empty()) pairs.push_back(pair);
        if (known || !divides) continue;
      }
      pair.counts.clear();
      if (divides) pair.counts = {devices / s};
      if (!pair.counts.empty()) pairs.push_back(std::move(pair));
    }
  }
  return pairs;
}

void BestPlans::Keep(const InterStagePlan& plan, int32_t micro_batches) {
  auto same = [&](const FoundPlan& found) {
    if (found.micro_batches != micro_batches || found.plan.stages.size() != plan.stages.size()) return false;
    for (size_t i = 0; i < plan.stages.size(); ++i) {
      if (!(found.plan.stages[i].shape() == plan.stages[i].shape())) return false;
    }
    return true;
  };
  auto known = std::find_if(found_.begin(), found_.end(), same);
  if (known != found_.end()) {
    if (known->plan.cost_us <= plan.cost_us) return;
    found_.erase(known);
  }
  auto at = std::upper_bound(found_.begin(), found_.end(), plan.cost_us,
                             [](double c, const FoundPlan& f) { return c < f.plan.cost_us; });
  found_.insert(at, {plan, micro_batches});
  if (static_cast<int32_t>(found_.size()) > top_) found_.pop_back();
}

}  // namespace interlace::plan
