#include "sim/simulate_set.h"

#include <algorithm>
#include <map>

#include "base/suggest.h"
#include "sim/set_use.h"
#include "sim/simulated_timeline.h"
#include "trace/chrome_trace.h"

namespace interlace {

namespace {

// What each op of a set takes, and which ranks are simulated.
class SetModel {
 public:
  explicit SetModel(const ProgramSet& set) : set_(set) {}
  Status Build(const ClusterSpec& cluster, const ProfileTable* profile, const SetOptions& options);
  Result<SetSimulation> Simulate();

 private:
  Status AddStage(size_t stage, const ClusterSpec& cluster, const ProfileTable* profile);
  void FoldRanks();

  const ProgramSet& set_;
  std::vector<CostModel> models_;                  // by stage
  std::vector<std::unique_ptr<Lowered>> lowered_;  // likewise
  std::vector<MemoryCurve> memory_;                // likewise
  std::optional<EngineInput::Stages> folded_;
  std::vector<int32_t> stage_of_, first_rank_;
  std::string fingerprint_;
  bool foreign_ = false;
};

Status SetModel::AddStage(size_t stage, const ClusterSpec& cluster, const ProfileTable* profile) {
  const Program& program = set_.stages[stage].program;
  INTERLACE_ASSIGN(CostModel model, CostModel::Create(program, cluster, profile));
  INTERLACE_ASSIGN(Lowered lowered, Lower(program, model));
  INTERLACE_ASSIGN(MemoryCurve memory, ComputeMemory(lowered));
  memory.taken_bytes = TakenBytes(lowered, memory.peak.bytes);
  memory_.push_back(std::move(memory));
  models_.push_back(std::move(model));
  lowered_.push_back(std::make_unique<Lowered>(std::move(lowered)));
  return Ok{};
}

Status SetModel::Build(const ClusterSpec& cluster, const ProfileTable* profile, const SetOptions& options) {
  if (profile != nullptr) {
    fingerprint_ = profile->fingerprint;
    INTERLACE_ASSIGN(foreign_, IsOfAnotherMachine(*profile, options.machine, options.foreign));
  }
  for (size_t s = 0; s < set_.stages.size(); ++s) {
    if (Status status = AddStage(s, cluster, profile); !status.ok())
      return Error{status.error().message, set_.stages[s].file};
  }
  const Program& program = set_.stages[0].program;
  const bool unlike = program.stage && program.stage->unlike();
  if (!options.every_rank && !unlike) FoldRanks();
  const AxisGroup axis = program.GroupAlong(set_.axis);
  std::vector<int64_t> by_rank;  // of stages of unlike ranks
  for (size_t s = 0; unlike && s < set_.stages.size(); ++s)
    by_rank.insert(by_rank.end(), static_cast<size_t>(program.stage->ranks[s]), static_cast<int64_t>(s));
  const int64_t ranks = folded_ ? axis.size : models_[0].ranks();
  int64_t instances = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t stage = unlike ? by_rank[static_cast<size_t>(rank)] : folded_ ? rank : axis.IndexOf(rank);
    instances += lowered_[static_cast<size_t>(stage)]->instances();
    if (instances > kMaxInstances)
      return MakeError("simulating ", ranks, " ranks of the set is too much: more than ", kMaxInstances, " ops");
    stage_of_.push_back(static_cast<int32_t>(stage));
  }
  for (size_t s = 0; s < set_.stages.size(); ++s) {
    const auto first = std::find(stage_of_.begin(), stage_of_.end(), static_cast<int32_t>(s));
    first_rank_.push_back(static_cast<int32_t>(first - stage_of_.begin()));
  }
  return Ok{};
}

// One rank for each stage, when all of a stage are alike.
void SetModel::FoldRanks() {
  EngineInput::Stages out{GroupOf(set_.stages[0].program.mesh, set_.axis), {}, {}};
  for (const auto& lowered : lowered_) {
    for (const std::vector<LoweredOp>& ops : lowered->ops) {
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

Result<SetSimulation> SetModel::Simulate() {
  SetSimulation out;
  out.cluster = models_[0].cluster();
  out.ranks = models_[0].ranks();
  out.fingerprint = fingerprint_;
  out.foreign = foreign_;
  for (size_t s = 0; s < lowered_.size(); ++s) {
    out.files.push_back(set_.stages[s].file);
    out.coverage.ops += models_[s].coverage().ops;
    out.coverage.measured += models_[s].coverage().measured;
  }
  for (int32_t stage : stage_of_) out.input.programs.push_back(lowered_[static_cast<size_t>(stage)].get());
  out.input.compute_slow.assign(stage_of_.size(), kOne);
  out.input.stages = folded_;
  INTERLACE_ASSIGN(out.output, RunEngine(out.input, models_[0]));
  for (int32_t rank : first_rank_) out.use.push_back(UseOfStage(out.input, out.output, stage_of_, rank));
  out.path = CriticalPath(out.input, out.output);
  out.stages = std::move(lowered_);
  out.memory = std::move(memory_);
  out.stage_of = std::move(stage_of_);
  return out;
}

}  // namespace

Result<SetSimulation> SimulateSet(const ProgramSet& set, const ClusterSpec& cluster, const ProfileTable* profile,
                                  const SetOptions& options) {
  SetModel model(set);
  INTERLACE_TRY(model.Build(cluster, profile, options));
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
