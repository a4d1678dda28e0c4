// recurrence.h — the step time of a pipeline as an exact recurrence of its schedule, forward and backward apart.
//
// 1F1B: stage i of S runs w = min(S - 1 - i, G) forwards, then forward and backward in turn, then the backwards left.
// What a stage does first (states in, update, gather) needs nobody and fills the time before its first micro-batch;
// what it does last (reduce, copies out) follows its last backward. Boundaries carry one micro-batch at a time in each
// direction.
//
//   S = 3, G = 4      stage 0   p F1 F2 F3 ...... B1 F4 B2 .. B3 .. B4 q
//   p first, q last   stage 1   p .. F1 F2 .. B1 F3 B2 F4 B3 .. B4 q
//                     stage 2   p ..... F1 B1 F2 B2 F3 B3 F4 B4 q
//
//   F(i, m) starts when stage i is free and F(i-1, m) has arrived;
//           it arrives at max(its end, the arrival of the one before it) + send.
//   B(i, m) the same from stage i + 1.
//   The step ends when the last stage has finished its q.
//
// The closed form of inter_stage.h has the same terms without the order of forward and backward.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "trace/timeline.h"

namespace interlace::plan {

// In picoseconds, as the simulator counts, so that both give the same bits.
struct PipelineStage {
  int64_t forward_ps = 0, backward_ps = 0, first_ps = 0, last_ps = 0;
  int64_t send_ps = 0, send_back_ps = 0;  // to the next stage, and from it; of the last stage not used
};

// When each thing ends; by stage, then micro-batch.
struct PipelineTimes {
  std::vector<std::vector<int64_t>> forward_end_ps, backward_end_ps;
  std::vector<int64_t> stage_end_ps;
  int64_t makespan_ps = 0;
};

// What a stage of a 1F1B pipeline does, in order: +m is the forward of micro-batch m, -m its backward (from 1).
std::vector<int32_t> StageOrder(int32_t stage, int32_t stages, int32_t micro_batches);

PipelineTimes RunPipeline(const std::vector<PipelineStage>& stages, int32_t micro_batches);

// The stages of a plan; a boundary takes half of its send_us each way. Times beyond 64 bits are cut off at kLongest.
inline constexpr int64_t kLongest = int64_t{1} << 52;
std::vector<PipelineStage> PipelineStages(const Plan& plan);

// A plan's pipeline over time, for the report page and the trace formats: a rank is a stage.
Timeline PipelineTimeline(const Plan& plan);

}  // namespace interlace::plan
