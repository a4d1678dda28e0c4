#include <algorithm>
#include <string>

#include "base/scan.h"
#include "plan/plan_text.h"

namespace interlace::plan {
namespace {

constexpr size_t kMostProblems = 8;

class Checker {
 public:
  Checker(const PlanFile& file, const ClusterSpec* cluster, bool over_memory)
      : file_(file), plan_(file.plan), cluster_(cluster), over_memory_(over_memory) {}

  Status Run() {
    if (plan_.stages.empty()) return MakeError("the plan has no stage");
    if (file_.dtype != "bfloat16" && file_.dtype != "float32") {
      Say(-1, "dtype", InQuotes(file_.dtype), " is neither bfloat16 nor float32");
    }
    if (cluster_) Cluster();
    if (file_.per_node < 1 || file_.devices % file_.per_node != 0) {
      Say(-1, "devices", file_.devices, " devices do not fill nodes of ", file_.per_node);
      return Result();  // what follows divides by it
    }
    int64_t blocks = 0, device = 0;
    for (size_t i = 0; i < plan_.stages.size(); ++i) {
      stage_ = static_cast<int>(i);
      Stage(plan_.stages[i], device);
      blocks += plan_.stages[i].strategy.layers;
      device = LastDevice(plan_.stages[i]) + 1;
    }
    if (blocks != file_.blocks) Say(-1, "layers", "the stages hold ", blocks, " blocks, the model has ", file_.blocks);
    if (cluster_ && !over_memory_) Hosts();
    if (device != file_.devices) {
      Say(-1, "devices", "the stages end at device ", device - 1, ", the cluster at ", file_.devices - 1);
    }
    return Result();
  }

 private:
  template <typename... Parts>
  void Say(int stage, std::string_view rule, const Parts&... parts) {
    if (++count_ > kMostProblems) return;
    std::string text;
    if (stage >= 0) {
      text = "stage " + std::to_string(stage);
      int32_t line = static_cast<size_t>(stage) < file_.places.size() ? file_.places[stage].line : 0;
      if (line > 0) text += " (line " + std::to_string(line) + ")";
      text += ", ";
    }
    problems_ +=
        (problems_.empty() ? "" : "\n") + text + "rule " + std::string(rule) + ": " + MakeError(parts...).message;
  }

  Status Result() {
    if (count_ == 0) return Ok{};
    if (count_ > kMostProblems) problems_ += "\nand " + std::to_string(count_ - kMostProblems) + " more";
    return Error{"the plan breaks its rules\n" + problems_, {}};
  }

  void Cluster() {
    if (file_.devices != cluster_->devices || file_.per_node != cluster_->per_node) {
      Say(-1, "cluster", "the plan is for ", file_.devices, " devices, ", file_.per_node, " a node; ", cluster_->name,
          " has ", cluster_->devices, ", ", cluster_->per_node, " a node");
    }
    if (!over_memory_ && cluster_->memory_gib > 0 && file_.memory_limit > cluster_->MemoryLimitBytes()) {
      Say(-1, "memory", "memory_limit ", file_.memory_limit, " is above the ", cluster_->MemoryLimitBytes(),
          " bytes that a device of ", cluster_->name, " has for a program");
    }
  }

  // What the stages of a node hold on its host together.
  void Hosts() {
    if (!(cluster_->host_memory_gib > 0)) return;
    int64_t node = -1, held = 0;
    for (const PlanStage& stage : plan_.stages) {
      const int64_t count = LastDevice(stage) - stage.first_device + 1;
      if (count < 1 || stage.cost.host_bytes <= 0) continue;
      if (stage.first_device / file_.per_node != node) node = stage.first_device / file_.per_node, held = 0;
      int64_t more = 0;
      const bool over = __builtin_mul_overflow(stage.cost.host_bytes, std::min(count, file_.per_node), &more) ||
                        __builtin_add_overflow(held, more, &held);
      if (!over && static_cast<double>(held) <= cluster_->host_memory_gib * 1073741824.0) continue;
      stage_ = static_cast<int>(&stage - plan_.stages.data());
      Say(stage_, "host", "with it node ", node, " holds ", over ? "more than 64 bits of" : std::to_string(held),
          " bytes on its host; a node of ", cluster_->name, " has ", static_cast<int64_t>(cluster_->host_memory_gib),
          " GiB");
      return;
    }
  }

  int64_t LastDevice(const PlanStage& stage) const {
    size_t i = static_cast<size_t>(&stage - plan_.stages.data());
    if (i < file_.places.size()) return file_.places[i].last_device;
    return stage.first_device + int64_t{stage.strategy.dp} * stage.strategy.tp - 1;
  }

  void Stage(const PlanStage& stage, int64_t next_device) {
    const Strategy& s = stage.strategy;
    bool first = stage_ == 0, last = static_cast<size_t>(stage_) + 1 == plan_.stages.size();
    if (s.layers < 1 && !(s.embedding || s.head)) Say(stage_, "layers", "it holds nothing");
    if (s.embedding != first) {
      Say(stage_, "layers",
          first ? "the first stage has to hold the embedding" : "only the first stage holds the embedding");
    }
    if (s.head != last) {
      Say(stage_, "layers", last ? "the last stage has to hold the head" : "only the last stage holds the head");
    }
    Devices(stage, next_device);
    Batch(s);
    if (s.zero < 0 || s.zero > 3) Say(stage_, "zero", "zero ", s.zero, " is not a level from 0 to 3");
    int64_t recomputed = int64_t{s.full} + s.selective;
    if (s.full < 0 || s.selective < 0 || recomputed > s.layers) {
      Say(stage_, "recompute", s.full, " blocks recomputed in full and ", s.selective,
          " selectively are more than its ", s.layers, " layers");
    }
    Share("weights", s.weights_out);
    Share("gradients", s.gradients_out);
    Share("states", s.states_out);
    Share("activations", s.activations_out);
    Memory(stage.cost);
  }

  void Devices(const PlanStage& stage, int64_t next_device) {
    const Strategy& s = stage.strategy;
    int64_t count = LastDevice(stage) - stage.first_device + 1;
    if (s.dp < 1 || s.tp < 1) return Say(stage_, "devices", "dp ", s.dp, " and tp ", s.tp, " must be at least 1");
    if (int64_t{s.dp} * s.tp != count) {
      return Say(stage_, "devices", "dp ", s.dp, " * tp ", s.tp, " = ", int64_t{s.dp} * s.tp, ", its range ",
                 stage.first_device, "..", LastDevice(stage), " has ", count);
    }
    if (stage.first_device != next_device) {
      return Say(stage_, "devices", "it begins at device ", stage.first_device, ", the stages before it end at ",
                 next_device - 1);
    }
    int64_t node = file_.per_node, begin = stage.first_device % node;
    bool within = begin + count <= node, whole = begin == 0 && count % node == 0;
    if (!within && !whole) {
      return Say(stage_, "mesh", "devices ", stage.first_device, "..", LastDevice(stage),
                 " are neither within a node of ", node, " nor whole nodes");
    }
    if (!within && node % s.tp != 0) {
      Say(stage_, "mesh", "tensor-parallel groups of ", s.tp, " cross nodes of ", node);
    }
  }

  void Batch(const Strategy& s) {
    int64_t samples = 0;
    bool over = __builtin_mul_overflow(int64_t{s.micro_batches} * s.micro_batch, int64_t{s.dp}, &samples);
    if (over || samples != plan_.global_batch) {
      Say(stage_, "batch", "accumulation ", s.micro_batches, " * micro_batch ", s.micro_batch, " * dp ", s.dp, " = ",
          over ? "more than 64 bits hold" : std::to_string(samples), ", global_batch is ", plan_.global_batch);
    }
  }

  void Share(std::string_view name, float value) {
    if (!(value >= 0 && value <= 1)) Say(stage_, "offload", name, " ", value, " is not a share from 0 to 1");
  }

  void Memory(const StageCost& cost) {
    int64_t peak = std::max(cost.peak_forward, cost.peak_backward);
    if (!over_memory_ && peak > file_.memory_limit) {
      Say(stage_, "memory", "its predicted peak of ", peak, " bytes is above memory_limit ", file_.memory_limit,
          "; --over-memory predicts it all the same");
    }
  }

  const PlanFile& file_;
  const Plan& plan_;
  const ClusterSpec* cluster_;
  bool over_memory_;
  int stage_ = 0;
  size_t count_ = 0;
  std::string problems_;
};

}  // namespace

Status VerifyPlan(const PlanFile& file, const ClusterSpec* cluster, bool over_memory) {
  return Checker(file, cluster, over_memory).Run();
}

}  // namespace interlace::plan
