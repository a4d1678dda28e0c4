#include "sim/simulate_set.h"

#include <algorithm>
#include <map>

#include "base/suggest.h"
#include "sim/set_use.h"
#include "sim/simulated_timeline.h"
#include "trace/chrome_trace.h"

namespace interlace {

Status SetModel::AddStage(size_t stage, const ClusterSpec& cluster, const ProfileTable* profile) {
  const Program& program = set_->stages[stage].program;
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(program, cluster, profile));
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  INTERLACE_ASSIGN(const MemoryCurve memory, ComputeMemory(lowered));
  std::vector<PhaseBytes>& bytes = bytes_.emplace_back();
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    PhaseBytes& of = bytes.emplace_back();
    of.peak = memory.persistent_bytes;
    for (int64_t at : memory.at_op[p]) of.peak = std::max(of.peak, at);
    for (const Carried& save : lowered.phases[p]->saves) {
      INTERLACE_ASSIGN(const int64_t one, program.StorageBytes(program.value(save.value).type));
      of.saves += one;
    }
    for (const Carried& load : lowered.phases[p]->loads) {
      INTERLACE_ASSIGN(const int64_t one, program.StorageBytes(program.value(load.value).type));
      of.loads += one;
    }
  }
  models_.push_back(std::move(model));
  lowered_.push_back(std::move(lowered));
  return Ok{};
}

Result<SetModel> SetModel::Create(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                  const SetOptions& options) {
  SetModel out(set);
  if (profile != nullptr) {
    out.fingerprint_ = profile->fingerprint;
    INTERLACE_ASSIGN(out.foreign_, IsOfAnotherMachine(*profile, options.machine, options.foreign));
  }
  for (size_t s = 0; s < set.stages.size(); ++s) {
    if (Status status = out.AddStage(s, cluster, profile); !status.ok())
      return Error{status.error().message, set.stages[s].file};
  }
  const bool unlike = set.stages[0].program.stage && set.stages[0].program.stage->unlike();
  if (!options.every_rank && !unlike) out.FoldRanks();
  const Program& program = set.stages[0].program;
  const AxisGroup axis = program.GroupAlong(set.axis);
  std::vector<int64_t> by_rank;  // of stages of unlike ranks
  for (size_t s = 0; unlike && s < set.stages.size(); ++s)
    by_rank.insert(by_rank.end(), static_cast<size_t>(program.stage->ranks[s]), static_cast<int64_t>(s));
  const int64_t ranks = out.folded_ ? axis.size : out.models_[0].ranks();
  int64_t instances = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t stage = unlike ? by_rank[static_cast<size_t>(rank)] : out.folded_ ? rank : axis.IndexOf(rank);
    instances += out.lowered_[static_cast<size_t>(stage)].instances();
    if (instances > kMaxInstances)
      return MakeError("simulating ", ranks, " ranks of the set is too much: more than ", kMaxInstances, " ops");
    out.stage_of_.push_back(static_cast<int32_t>(stage));
  }
  for (size_t s = 0; s < set.stages.size(); ++s) {
    const auto first = std::find(out.stage_of_.begin(), out.stage_of_.end(), static_cast<int32_t>(s));
    out.first_rank_.push_back(static_cast<int32_t>(first - out.stage_of_.begin()));
  }
  return out;
}

// One rank for each stage, when all of a stage are alike.
void SetModel::FoldRanks() {
  EngineInput::Stages out{GroupOf(set_->stages[0].program.mesh, set_->axis), {}, {}};
  for (const Lowered& lowered : lowered_) {
    for (const std::vector<LoweredOp>& ops : lowered.ops) {
      for (const LoweredOp& op : ops) {
        if (op.IsMessage() && (op.group.size != out.axis.size || op.group.stride != out.axis.stride)) return;
      }
    }
  }
  std::map<int64_t, std::map<int64_t, int64_t>> hosts;  // by host and stage: ranks
  for (int64_t rank = 0; rank < models_[0].ranks(); ++rank)
    ++hosts[rank / models_[0].ranks_per_node()][out.axis.IndexOf(rank)];
  for (int64_t stage = 0; stage < out.axis.size; ++stage) {
    const std::map<int64_t, int64_t>* first = nullptr;
    for (const auto& [host, ranks] : hosts) {
      if (!ranks.contains(stage)) continue;
      if (first == nullptr) {
        first = &ranks;
        out.node.push_back(host);
        out.fold.push_back(ranks.at(stage));
      }
      if (ranks != *first) return;
    }
  }
  folded_ = std::move(out);
}

EngineInput SetModel::InputOf(const std::vector<const Lowered*>& stages) const {
  EngineInput input;
  for (int32_t stage : stage_of_) input.programs.push_back(stages[static_cast<size_t>(stage)]);
  input.compute_slow.assign(stage_of_.size(), kOne);
  input.stages = folded_;
  return input;
}

Result<SetSimulation> SetModel::Simulate() const {
  SetSimulation out;
  out.cluster = models_[0].cluster();
  out.ranks = models_[0].ranks();
  out.stage_of = stage_of_;
  out.first_rank = first_rank_;
  out.fingerprint = fingerprint_;
  out.foreign = foreign_;
  std::vector<const Lowered*> stages;
  for (size_t s = 0; s < lowered_.size(); ++s) {
    out.files.push_back(set_->stages[s].file);
    out.stages.push_back(std::make_unique<Lowered>(lowered_[s]));
    stages.push_back(out.stages.back().get());
    INTERLACE_ASSIGN(MemoryCurve memory, ComputeMemory(*stages.back()));
    memory.taken_bytes = TakenBytes(*stages.back(), memory.peak.bytes);
    out.memory.push_back(std::move(memory));
    out.coverage.ops += models_[s].coverage().ops;
    out.coverage.measured += models_[s].coverage().measured;
  }
  out.input = InputOf(stages);
  INTERLACE_ASSIGN(out.output, RunEngine(out.input, models_[0]));
  for (int32_t rank : first_rank_) out.use.push_back(UseOfStage(out.input, out.output, stage_of_, rank));
  out.path = CriticalPath(out.input, out.output);
  return out;
}

std::vector<StageOrder> SetModel::Orders() const {
  std::vector<StageOrder> out;
  for (const Lowered& lowered : lowered_) {
    StageOrder& order = out.emplace_back();
    const Phase* const first = lowered.program->phases.data();
    for (size_t run = 0; run < lowered.run.size(); ++run)
      order.push_back({static_cast<int32_t>(lowered.phases[lowered.run[run]] - first), lowered.micro_batch[run]});
  }
  return out;
}

int64_t SetModel::PeakOf(size_t stage, const Lowered& lowered) const {
  int64_t peak = 0, saved = 0;
  for (int32_t phase : lowered.run) {
    const PhaseBytes& bytes = bytes_[stage][static_cast<size_t>(phase)];
    peak = std::max(peak, bytes.peak + saved - bytes.loads);
    saved += bytes.saves - bytes.loads;
  }
  return peak;
}

Result<SetPrediction> SetModel::Predict(const std::vector<StageOrder>& orders) const {
  if (orders.size() != lowered_.size())
    return MakeError("the set has ", lowered_.size(), " stages, got orders of ", orders.size());
  std::vector<Lowered> lowered = lowered_;
  std::vector<const Lowered*> stages;
  for (size_t s = 0; s < lowered.size(); ++s) {
    Lowered& of = lowered[s];
    std::vector<int32_t> distinct(of.program->phases.size(), -1);
    for (size_t p = 0; p < of.phases.size(); ++p)
      distinct[static_cast<size_t>(of.phases[p] - of.program->phases.data())] = static_cast<int32_t>(p);
    of.run.clear(), of.micro_batch.clear(), of.first.assign(1, 0);
    for (const StageRun& run : orders[s]) {
      const bool known = run.phase >= 0 && run.phase < static_cast<int32_t>(distinct.size()) &&
                         distinct[static_cast<size_t>(run.phase)] >= 0;
      if (!known) return MakeError(set_->stages[s].file, " has no phase ", run.phase);
      of.run.push_back(distinct[static_cast<size_t>(run.phase)]);
      of.micro_batch.push_back(run.micro_batch);
      of.first.push_back(of.first.back() + static_cast<int64_t>(of.ops[of.run.back()].size()));
      if (of.first.back() > kMaxInstances)
        return MakeError("an order of more than ", kMaxInstances, " ops is too much to simulate");
    }
    if (of.run.empty()) return MakeError("the order of ", set_->stages[s].file, " is empty");
    stages.push_back(&of);
  }
  SetPrediction out;
  const EngineInput input = InputOf(stages);
  INTERLACE_ASSIGN(const EngineOutput output, RunEngine(input, models_[0]));
  out.makespan_ps = output.makespan_ps;
  for (size_t s = 0; s < lowered.size(); ++s) {
    out.use.push_back(UseOfStage(input, output, stage_of_, first_rank_[s]));
    out.peak_bytes.push_back(PeakOf(s, lowered[s]));
  }
  return out;
}

Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                  const SetOptions& options) {
  INTERLACE_ASSIGN(const SetModel model, SetModel::Create(set, cluster, profile, options));
  return model.Simulate();
}

Timeline SetTimeline(const SetSimulation& s) {
  Timeline out = SimulatedTimeline(s.cluster, s.ranks);
  for (size_t rank = 0; rank < s.output.ranks.size(); ++rank) {
    const auto stage = static_cast<size_t>(s.stage_of[rank]);
    AddRank(out, *s.stages[stage], s.memory[stage], s.output, static_cast<int32_t>(rank));
    const bool alone = s.output.ranks.size() == s.stages.size();
    out.rank_names.push_back("stage " + std::to_string(stage) + (alone ? "" : ", rank " + std::to_string(rank)));
  }
  return out;
}

Result<std::string> SimulateSetText(const ProgramSet& set, std::string_view cluster_text, std::string_view profile_text,
                                    std::string_view output, const SetOptions& options) {
  static constexpr std::string_view kOutputs[] = {"json", "summary", "trace"};
  if (std::find(std::begin(kOutputs), std::end(kOutputs), output) == std::end(kOutputs)) {
    return MakeError("unknown output '", output, "'", DidYouMean(output, {std::begin(kOutputs), std::end(kOutputs)}),
                     " (json, summary, trace)");
  }
  INTERLACE_TRY(CheckProgramSet(set));
  INTERLACE_ASSIGN(const ClusterSpec cluster, LoadCluster(cluster_text, "cluster"));
  ProfileTable table;
  if (!profile_text.empty()) {
    INTERLACE_ASSIGN(table, ParseProfile(profile_text, "profile"));
  }
  INTERLACE_ASSIGN(const SetSimulation s, SimulateSet(set, cluster, profile_text.empty() ? nullptr : &table, options));
  if (output == "json") return SetSimulationJson(s);
  return output == "summary" ? SetSimulationSummary(s) : WriteChromeTrace(SetTimeline(s));
}

}  // namespace interlace
