#include "plan/testing/stage_program.h"

#include <cstdlib>
#include <string>

namespace interlace::plan::testing {
namespace {

// Builds one stage's program and its lowered form side by side.
class Maker {
 public:
  Maker(int32_t stage, int32_t stages, int32_t micro_batches)
      : stage_(stage), stages_(stages), batches_(micro_batches) {
    program_ = std::make_unique<Program>();
    program_->level = Level::kScheduled;
    program_->mesh.push_back({"stage", stages});
    program_->SetMeta("synthetic", "stage " + std::to_string(stage) + " of " + std::to_string(stages) + " of a plan");
    program_->accumulation = 1;
    program_->phases.push_back({"micro_batch", {}, {}, {}});
    lowered_ = std::make_unique<Lowered>();
    lowered_->program = program_.get();
    lowered_->ops.emplace_back();
  }

  void Make(const std::vector<PipelineStage>& stages, StagePrograms& out) {
    const PipelineStage& mine = stages[stage_];
    bool before = stage_ > 0, behind = stage_ + 1 < stages_;
    // One cost a boundary and direction.
    int32_t from_before = before ? Cost(stages[stage_ - 1].send_ps) : -1,
            to_before = before ? Cost(stages[stage_ - 1].send_back_ps) : -1;
    int32_t from_behind = behind ? Cost(mine.send_back_ps) : -1, to_behind = behind ? Cost(mine.send_ps) : -1;
    std::vector<ValueId> forward, backward;
    for (int32_t m = 0; m < batches_ && before; ++m)
      forward.push_back(Receive(Part::kForward, stage_ - 1, from_before));
    for (int32_t m = 0; m < batches_ && behind; ++m)
      backward.push_back(Receive(Part::kBackward, stage_ + 1, from_behind));
    Compute("stage.first", Part::kUpdate, mine.first_ps, kNone);
    for (int32_t what : StageOrder(stage_, stages_, batches_)) {
      size_t m = static_cast<size_t>(std::abs(what)) - 1;
      bool is_forward = what > 0;
      Part part = is_forward ? Part::kForward : Part::kBackward;
      ValueId needs = is_forward ? (before ? forward[m] : kNone) : (behind ? backward[m] : kNone);
      if (needs != kNone) Add("recv.wait", part, LoweredOp::Kind::kWait, needs);
      Compute(is_forward ? "stage.forward" : "stage.backward", part, is_forward ? mine.forward_ps : mine.backward_ps,
              needs);
      if (is_forward && behind) Message("send.start", part, stage_ + 1, to_behind, false);
      if (!is_forward && before) Message("send.start", part, stage_ - 1, to_before, false);
    }
    Compute("stage.last", Part::kBackward, mine.last_ps, kNone);
    lowered_->phases.push_back(&program_->phases[0]);
    lowered_->run = {0};
    lowered_->first = {0, static_cast<int64_t>(lowered_->ops[0].size())};
    out.programs.push_back(std::move(program_));
    out.lowered.push_back(std::move(lowered_));
  }

 private:
  // A message uses no link that another has: boundaries are apart, and what it slows is part of the stages' times.
  int32_t Cost(int64_t ps) {
    OpCost& cost = lowered_->costs.emplace_back();
    cost.source = OpCost::Source::kEstimated;
    cost.work_ps = ps;
    return static_cast<int32_t>(lowered_->costs.size()) - 1;
  }
  LoweredOp& Add(const char* name, Part part, LoweredOp::Kind kind, ValueId operand) {
    Op& op = program_->AddOp(name);
    op.part = part;
    if (kind != LoweredOp::Kind::kCompute) op.lane = Lane::kP2P;
    if (operand != kNone) op.args.push_back(Arg::Of(operand));
    program_->phases[0].ops.push_back(op.id);
    LoweredOp& lowered = lowered_->ops[0].emplace_back();
    lowered.kind = kind;
    lowered.op = op.id;
    lowered.lane = op.lane.value_or(Lane::kCompute);
    return lowered;
  }
  void Compute(const char* name, Part part, int64_t ps, ValueId operand) {
    Add(name, part, LoweredOp::Kind::kCompute, operand).work_ps = ps;
  }
  OpId Message(const char* name, Part part, int32_t peer, int32_t cost, bool receives) {
    LoweredOp& op = Add(name, part, LoweredOp::Kind::kStart, kNone);
    op.peer = peer;
    op.cost = cost;
    op.receives = receives;
    return op.op;
  }
  ValueId Receive(Part part, int32_t peer, int32_t cost) {
    OpId op = Message("recv.start", part, peer, cost, true);
    return program_->AddResult(program_->op(op), Type{DType::kF32, {Dim(1)}, {Dim(1)}});
  }

  int32_t stage_, stages_, batches_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<Lowered> lowered_;
};

}  // namespace

StagePrograms MakeStagePrograms(const std::vector<PipelineStage>& stages, int32_t micro_batches) {
  StagePrograms out;
  for (size_t i = 0; i < stages.size(); ++i) {
    Maker(static_cast<int32_t>(i), static_cast<int32_t>(stages.size()), micro_batches).Make(stages, out);
  }
  return out;
}

Result<EngineOutput> SimulateStages(const StagePrograms& programs) {
  // Times are the plan's: this machine slows nothing.
  ClusterSpec cluster;
  cluster.name = "synthetic stages";
  cluster.devices = cluster.per_node = static_cast<int64_t>(programs.programs.size());
  cluster.h2d_gb_per_s = cluster.d2h_gb_per_s = cluster.host_gb_per_s = cluster.cores = 1;
  cluster.interference = "none";
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(*programs.programs[0], cluster, nullptr));
  EngineInput input;
  for (const auto& lowered : programs.lowered) input.programs.push_back(lowered.get());
  input.compute_slow.assign(input.programs.size(), kOne);
  return RunEngine(input, model);
}

}  // namespace interlace::plan::testing
