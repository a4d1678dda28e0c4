// evaluate_all.h — the costs of many strategies by the planner's vector code, for tests and benchmarks of it.
#pragma once

#include <vector>

#include "plan/stage_sums.h"

namespace interlace::plan::testing {

// In the order of the strategies, which must pass StageModel::Check. Those of one (b, dp, tp, ZeRO) and ends that follow
// each other are evaluated together.
inline std::vector<StageCost> EvaluateAll(const StageModel& model, const std::vector<Strategy>& strategies) {
  std::vector<StageCost> out;
  StrategyVectors v;
  for (size_t from = 0; from < strategies.size(); from += static_cast<size_t>(v.count)) {
    const Strategy& first = strategies[from];
    const StageParts* parts = model.state().Find(first);
    for (v.count = 0; v.count < StrategyVectors::kWidth && from + v.count < strategies.size(); ++v.count) {
      const Strategy& s = strategies[from + v.count];
      if (model.state().Find(s) != parts || s.embedding != first.embedding || s.head != first.head) break;
      const int i = v.count;
      v.layers[i] = s.layers, v.full[i] = s.full, v.selective[i] = s.selective, v.in_flight[i] = s.in_flight;
      v.wo[i] = s.weights_out, v.go[i] = s.gradients_out, v.oo[i] = s.states_out, v.ao[i] = s.activations_out;
    }
    EvaluateVectors(SumsOf(*parts, first.embedding, first.head), v);
    for (int i = 0; i < v.count; ++i) {
      out.push_back({v.stable_us[i], v.total_us[i] - v.stable_us[i], static_cast<int64_t>(v.peak_forward[i]),
                     static_cast<int64_t>(v.peak_backward[i]), static_cast<int64_t>(v.host[i])});
    }
  }
  return out;
}

}  // namespace interlace::plan::testing
