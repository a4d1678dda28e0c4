#include "plan/recurrence.h"

#include <gtest/gtest.h>

#include <random>

#include "ir/text.h"
#include "plan/inter_stage.h"
#include "plan/testing/stage_program.h"

namespace interlace::plan {
namespace {

TEST(Recurrence, EqualsTheSimulatorOnRandomStages) {
  std::mt19937 random(3);
  auto pick = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 1000; ++round) {
    std::vector<PipelineStage> stages(static_cast<size_t>(1 + pick(8)));
    int32_t micro_batches = static_cast<int32_t>(1 + pick(20));
    int64_t scale = pick(4) == 0 ? 10 : 1000000007;  // small numbers make ties
    int64_t send = pick(3) == 0 ? 1 : scale / (1 + pick(10)) + 1;
    for (PipelineStage& s : stages)
      s = {pick(scale), pick(2 * scale), pick(3 * scale), pick(3 * scale), pick(send), pick(send)};
    PipelineTimes times = RunPipeline(stages, micro_batches);
    testing::StagePrograms programs = testing::MakeStagePrograms(stages, micro_batches);
    auto simulated = testing::SimulateStages(programs);
    ASSERT_TRUE(simulated.ok()) << ErrorOf(simulated);
    ASSERT_EQ(times.makespan_ps, simulated->makespan_ps) << "round " << round;
    for (size_t i = 0; i < stages.size(); ++i) {
      ASSERT_EQ(times.stage_end_ps[i], simulated->ranks[i].end_ps.back()) << "round " << round << " stage " << i;
      const std::vector<LoweredOp>& ops = programs.lowered[i]->ops[0];
      std::vector<int64_t> forward, backward;
      for (size_t k = 0; k < ops.size(); ++k) {
        const std::string& name = programs.programs[i]->op(ops[k].op).name;
        if (name == "stage.forward") forward.push_back(simulated->ranks[i].end_ps[k]);
        if (name == "stage.backward") backward.push_back(simulated->ranks[i].end_ps[k]);
      }
      ASSERT_EQ(times.forward_end_ps[i], forward) << "round " << round << " stage " << i;
      ASSERT_EQ(times.backward_end_ps[i], backward) << "round " << round << " stage " << i;
    }
  }
}

TEST(Recurrence, EqualStagesTakeWhatTheClosedFormSays) {
  std::vector<PipelineStage> stages(4, {10, 20, 0, 0, 0, 0});
  EXPECT_EQ(RunPipeline(stages, 8).makespan_ps, (8 + 4 - 1) * 30);
  // What the last stage does first and last hides behind the stages before it, what the first does last does not.
  stages[3].first_ps = stages[3].last_ps = 30;
  EXPECT_EQ(RunPipeline(stages, 8).makespan_ps, (8 + 4 - 1) * 30);
  stages[0].last_ps = 7;
  EXPECT_EQ(RunPipeline(stages, 8).makespan_ps, (8 + 4 - 1) * 30 + 7);
}

// Without extras the closed form, with each boundary added to the stage that sends, is never too low.
TEST(Recurrence, IsNotAboveTheClosedForm) {
  std::mt19937 random(5);
  auto pick = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 1000; ++round) {
    std::vector<PipelineStage> stages(static_cast<size_t>(1 + pick(8)));
    int32_t micro_batches = static_cast<int32_t>(1 + pick(20));
    std::vector<std::pair<double, double>> closed;
    for (PipelineStage& s : stages) {
      s = {pick(1000), pick(2000), 0, 0, pick(300), pick(300)};
      double send = static_cast<double>(&s == &stages.back() ? 0 : s.send_ps + s.send_back_ps);
      closed.emplace_back(static_cast<double>(s.forward_ps + s.backward_ps) + send, 0);
    }
    EXPECT_LE(static_cast<double>(RunPipeline(stages, micro_batches).makespan_ps),
              PipelineObjective(micro_batches, closed))
        << round;
  }
}

TEST(StagePrograms, CanBeReadAndAreMarked) {
  Plan plan;
  plan.model = "m", plan.cluster = "c";
  plan.stages.resize(2);
  for (PlanStage& s : plan.stages) s.passes = {3, 6, 1, 2}, s.send_us = 4;
  testing::StagePrograms programs = testing::MakeStagePrograms(PipelineStages(plan), 2);
  std::string text = Print(*programs.programs[1]);
  EXPECT_NE(text.find("meta synthetic \"stage 1 of 2 of a plan\"\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  recv.wait(%0) {fwd lane=p2p}\n  stage.forward(%0) {fwd}\n"), std::string::npos) << text;
  auto simulated = testing::SimulateStages(programs);
  ASSERT_TRUE(simulated.ok());
  EXPECT_EQ(simulated->makespan_ps, 34000000) << "first 1, F1 3, send 2, F1 3, B1 6, F2 3, B2 6, send 2, B2 6, last 2";
  for (PlanStage& s : plan.stages) s.strategy.micro_batches = 2;
  Timeline timeline = PipelineTimeline(plan);
  int64_t busy = 0, sends = 0;
  for (const TraceEvent& e : timeline.events) {
    if (e.lane == TraceLane::kCompute && !e.wait) busy += e.duration_ns;
    sends += e.lane == TraceLane::kP2P;
  }
  EXPECT_EQ(busy, 2 * (1 + 2 * 9 + 2) * 1000);
  EXPECT_EQ(sends, 4);
}

}  // namespace
}  // namespace interlace::plan
