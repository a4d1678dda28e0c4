#include "plan/recurrence.h"

#include <algorithm>
#include <cmath>

namespace interlace::plan {
namespace {

int64_t FromMicroseconds(double us) {
  double ps = std::nearbyint(us * 1e6);
  return ps > 0 ? static_cast<int64_t>(std::min(ps, static_cast<double>(kLongest))) : 0;
}

}  // namespace

std::vector<int32_t> StageOrder(int32_t stage, int32_t stages, int32_t micro_batches) {
  std::vector<int32_t> order;
  order.reserve(static_cast<size_t>(micro_batches) * 2);
  int32_t ahead = std::min(stages - 1 - stage, micro_batches);
  for (int32_t m = 1; m <= micro_batches + ahead; ++m) {
    if (m <= micro_batches) order.push_back(m);
    if (m > ahead) order.push_back(ahead - m);
  }
  return order;
}

PipelineTimes RunPipeline(const std::vector<PipelineStage>& stages, int32_t micro_batches) {
  size_t count = stages.size(), batches = static_cast<size_t>(micro_batches);
  PipelineTimes out;
  out.forward_end_ps.resize(count);
  out.backward_end_ps.resize(count);
  std::vector<int64_t> free(count), sent(count, 0),
      sent_back(count, 0);  // when a stage, a direction of its boundary is free
  std::vector<size_t> next(count, 0);
  std::vector<std::vector<int64_t>> arrived(count),
      arrived_back(count);  // of the forward from before, the backward from behind
  std::vector<std::vector<int32_t>> order;
  for (size_t i = 0; i < count; ++i) {
    free[i] = stages[i].first_ps;
    order.push_back(StageOrder(static_cast<int32_t>(i), static_cast<int32_t>(count), micro_batches));
    for (auto* list : {&out.forward_end_ps[i], &out.backward_end_ps[i], &arrived[i], &arrived_back[i]})
      list->reserve(batches);
  }
  // A wave down and up the stages; each goes on until what it needs has not yet been computed.
  auto advance = [&](size_t i) {
    const PipelineStage& s = stages[i];
    for (; next[i] < order[i].size(); ++next[i]) {
      int32_t what = order[i][next[i]];
      size_t m = static_cast<size_t>(std::abs(what)) - 1;
      if (what > 0) {
        if (i > 0 && arrived[i].size() <= m) return;
        free[i] = std::max(free[i], i > 0 ? arrived[i][m] : 0) + s.forward_ps;
        out.forward_end_ps[i].push_back(free[i]);
        if (i + 1 == count) continue;
        sent[i] = std::max(sent[i], free[i]) + s.send_ps;
        arrived[i + 1].push_back(sent[i]);
      } else {
        if (i + 1 < count && arrived_back[i].size() <= m) return;
        free[i] = std::max(free[i], i + 1 < count ? arrived_back[i][m] : 0) + s.backward_ps;
        out.backward_end_ps[i].push_back(free[i]);
        if (i == 0) continue;
        sent_back[i] = std::max(sent_back[i], free[i]) + stages[i - 1].send_back_ps;
        arrived_back[i - 1].push_back(sent_back[i]);
      }
    }
  };
  auto finished = [&] { return next[0] == order[0].size(); };
  while (count > 0 && !finished()) {
    for (size_t i = 0; i < count; ++i) advance(i);
    for (size_t i = count; i-- > 0;) advance(i);
  }
  for (size_t i = 0; i < count; ++i) {
    out.stage_end_ps.push_back(free[i] + stages[i].last_ps);
    out.makespan_ps = std::max(out.makespan_ps, out.stage_end_ps.back());
  }
  return out;
}

std::vector<PipelineStage> PipelineStages(const Plan& plan) {
  std::vector<PipelineStage> out;
  for (const PlanStage& s : plan.stages) {
    int64_t send = FromMicroseconds(s.send_us / 2);
    out.push_back({FromMicroseconds(s.passes.forward_us), FromMicroseconds(s.passes.backward_us),
                   FromMicroseconds(s.passes.first_us), FromMicroseconds(s.passes.last_us), send, send});
  }
  return out;
}

}  // namespace interlace::plan
