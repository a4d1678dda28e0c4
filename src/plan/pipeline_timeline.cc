// A plan's pipeline over time: what each stage does when, waits and messages, from the recurrence.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "plan/recurrence.h"

namespace interlace::plan {
namespace {

// One stage: a rank of the timeline.
class Row {
 public:
  Row(Timeline& out, size_t stage) : out_(out), stage_(stage) {}

  void Send(int64_t start_ps, int64_t end_ps) {
    TraceEvent& e = Add("send.start", start_ps, end_ps);
    e.lane = TraceLane::kP2P, e.group_size = 2;
  }
  // What is shorter than a nanosecond is left out.
  void Compute(const char* op, const char* part, int64_t start_ps, int64_t end_ps, int64_t micro_batch = 0,
               bool wait = false) {
    if (start_ps / 1000 == end_ps / 1000) return;
    TraceEvent& e = Add(op, start_ps, end_ps);
    e.part = part, e.module = "stage " + std::to_string(stage_), e.wait = wait;
    if (micro_batch > 0) e.detail = "micro-batch " + std::to_string(micro_batch);
  }

 private:
  TraceEvent& Add(const char* op, int64_t start_ps, int64_t end_ps) {
    TraceEvent& e = out_.events.emplace_back();
    e.rank = static_cast<int32_t>(stage_), e.op = op;
    e.start_ns = start_ps / 1000, e.duration_ns = end_ps / 1000 - e.start_ns;
    return e;
  }

  Timeline& out_;
  size_t stage_;
};

// When the messages of a boundary move, one after another: each from when it is made and the one before has come.
std::vector<std::pair<int64_t, int64_t>> Messages(const std::vector<int64_t>& made_ps, int64_t send_ps) {
  std::vector<std::pair<int64_t, int64_t>> out;
  int64_t free = 0;
  for (int64_t made : made_ps) {
    const int64_t start = std::max(free, made);
    out.emplace_back(start, free = start + send_ps);
  }
  return out;
}

}  // namespace

Timeline PipelineTimeline(const Plan& plan) {
  const std::vector<PipelineStage> stages = PipelineStages(plan);
  const PipelineTimes times = RunPipeline(stages, plan.micro_batches());
  Timeline out;
  out.producer = "synthetic stages of a plan for " + plan.model + " on " + plan.cluster;
  out.backend = "nccl";
  out.world_size = static_cast<int64_t>(stages.size());
  std::vector<std::vector<std::pair<int64_t, int64_t>>> down, up;  // from each stage to the next, and to the one before
  for (size_t i = 0; i < stages.size(); ++i) {
    down.push_back(Messages(times.forward_end_ps[i], stages[i].send_ps));
    up.push_back(Messages(times.backward_end_ps[i], i > 0 ? stages[i - 1].send_back_ps : 0));
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    const bool before = i > 0, behind = i + 1 < stages.size();
    const std::vector<int32_t> order =
        StageOrder(static_cast<int32_t>(i), static_cast<int32_t>(stages.size()), plan.micro_batches());
    Row row(out, i);
    for (int32_t what : order) {
      const size_t m = static_cast<size_t>(std::abs(what)) - 1;
      if (what > 0 && behind) row.Send(down[i][m].first, down[i][m].second);
      if (what < 0 && before) row.Send(up[i][m].first, up[i][m].second);
    }
    int64_t now = stages[i].first_ps;
    row.Compute("stage.first", "upd", 0, now);
    for (int32_t what : order) {
      const bool forward = what > 0, waits = forward ? before : behind;
      const size_t m = static_cast<size_t>(std::abs(what)) - 1;
      const char* part = forward ? "fwd" : "bwd";
      const int64_t come = !waits ? now : forward ? down[i - 1][m].second : up[i + 1][m].second;
      const int64_t end = (forward ? times.forward_end_ps : times.backward_end_ps)[i][m];
      const int64_t start = std::max(now, come);
      row.Compute("recv.wait", part, now, start, 0, true);
      row.Compute(forward ? "stage.forward" : "stage.backward", part, start, end, static_cast<int64_t>(m) + 1);
      now = end;
    }
    row.Compute("stage.last", "bwd", now, times.stage_end_ps[i]);
  }
  return out;
}

}  // namespace interlace::plan
