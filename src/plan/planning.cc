#include "plan/planning.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "plan/alternatives.h"
#include "plan/captured_layers.h"
#include "plan/comparisons.h"
#include "plan/least_memory.h"
#include "plan/plan_json.h"
#include "plan/recurrence.h"
#include "trace/chrome_trace.h"
#include "trace/json.h"

namespace interlace::plan {
namespace {

constexpr int64_t kMostDevices = 4096;  // looked at for what would fit
constexpr double kSearchShare = 0.7;    // of a time limit; the rest is for comparisons
constexpr double kTolerance = 0.01;     // of what plans are compared with: the best within so much
constexpr double kCompareS = 20;        // for all comparisons where no limit is given, or as long as the search took

// What a plan's stages may be, for the stage model: their bytes, limits, micro-batches and tensor parallelism.
Result<StageOptions> StageOptionsOf(const PlanFile& file) {
  StageOptions stage;
  INTERLACE_TRY(SetBytes(stage, file.dtype, file.as_run));
  stage.global_batch = file.plan.global_batch;
  stage.device_bytes = std::max<int64_t>(1, file.memory_limit);
  for (const PlanStage& each : file.plan.stages) {
    stage.micro_batches.push_back(each.strategy.micro_batch);
    stage.tensor_parallel.push_back(each.strategy.tp);
  }
  return stage;
}

void WriteExplanation(JsonWriter& out, const Explanation& e) {
  out.BeginObject().Field("peak_in_forward", e.peak_in_forward).Key("bytes").BeginArray();
  for (const Explanation::Bytes& bytes : e.bytes) {
    out.BeginObject().Field("name", bytes.name).Field("device", bytes.device).Field("host", bytes.host).EndObject();
  }
  out.EndArray().Key("phases").BeginArray();
  for (const Explanation::Phase& phase : e.phases) {
    out.BeginObject().Fields("name", phase.name, "compute_us", phase.alone_us[0], "device_us", phase.alone_us[1]);
    out.Field("to_device_us", phase.alone_us[2]).Field("to_host_us", phase.alone_us[3]);
    out.Field("tensor_parallel_us", phase.tensor_parallel_us).Field("exposed_us", phase.exposed_us);
    out.Field("total_us", phase.total_us).EndObject();
  }
  out.EndArray().EndObject();
}

// An explanation of each stage, as a list.
Status WriteExplanations(JsonWriter& out, const PlanFile& file, const LayerSource& layers, const ClusterSpec& cluster) {
  INTERLACE_ASSIGN(StageOptions stage, StageOptionsOf(file));
  INTERLACE_ASSIGN(StageModel model, StageModel::Create(layers, cluster, stage));
  out.BeginArray();
  for (const PlanStage& each : file.plan.stages) WriteExplanation(out.NewLine(), model.Explain(each.strategy));
  out.EndArray();
  return Ok{};
}

// Standard deviation of ln(measured / predicted): that of whole steps, and of the links as far as compute does not hide
// them.
double SpreadOf(const Plan& plan, const StageModel& model, const ClusterSpec& cluster) {
  if (cluster.cpu || !(cluster.step.error > 0)) return 0;  // of a CPU only what a profile has is known
  double compute = 0, total = 0;
  const double steady = plan.micro_batches() - 1;
  for (const PlanStage& each : plan.stages) {
    const Explanation e = model.Explain(each.strategy);
    for (int phase = 0; phase < 4; ++phase) {  // the first forward, others, backwards, the last one
      const double times = phase == 0 || phase == 3 ? 1 : steady;
      compute += times * std::min(e.phases[phase].alone_us[0], e.phases[phase].total_us);
      total += times * e.phases[phase].total_us;
    }
  }
  const double exposed = total > 0 ? 1 - compute / total : 0;
  const double link = cluster.devices > cluster.per_node ? cluster.inter.error : cluster.intra.error;
  return std::hypot(cluster.step.error, exposed * link);
}

Result<double> SpreadOf(const PlanFile& file, const LayerSource& layers, const ClusterSpec& cluster) {
  INTERLACE_ASSIGN(StageOptions stage, StageOptionsOf(file));
  INTERLACE_ASSIGN(StageModel model, StageModel::Create(layers, cluster, stage));
  return SpreadOf(file.plan, model, cluster);
}

Result<PlanFile> PredictOn(const PlanFile& file, const LayerSource& layers, const ClusterSpec& cluster,
                           bool over_memory) {
  PlanFile out = file;
  INTERLACE_TRY(VerifyPlan(out, &cluster, over_memory));
  if (layers.blocks() != file.blocks) {
    return MakeError("rule layers: the plan is for ", file.blocks, " blocks, the model has ", layers.blocks());
  }
  INTERLACE_ASSIGN(StageOptions stage, StageOptionsOf(file));
  INTERLACE_ASSIGN(LayerCost block, layers.Cost(Role::kBlock, 1, 1));
  for (size_t i = 0; i < out.plan.stages.size(); ++i) {
    PlanStage& each = out.plan.stages[i];
    each.send_us = 0;
    if (i + 1 == out.plan.stages.size()) break;
    const PlanStage& next = out.plan.stages[i + 1];
    int64_t last = int64_t{next.first_device} + int64_t{next.strategy.dp} * next.strategy.tp - 1;
    bool inside = each.first_device / cluster.per_node == last / cluster.per_node;
    double bytes = static_cast<double>(block.boundary) * each.strategy.micro_batch * each.strategy.dp;
    each.send_us = BoundaryUs(cluster, bytes, LayoutOf(each.strategy), LayoutOf(next.strategy), inside);
  }
  INTERLACE_ASSIGN(out.plan, Reprice(out.plan, layers, cluster, stage));
  INTERLACE_TRY(VerifyPlan(out, &cluster, over_memory));  // memory, now that it is known
  return out;
}

class Planning {
 public:
  Planning(const PlanRequest& request, const PlanProgress& progress) : r_(request), progress_(progress) {}

  Result<std::string> Run() {
    begin_ = std::chrono::steady_clock::now();
    Say("reading the model", 0, 0, 0);
    INTERLACE_ASSIGN(layers_, ReadLayers(r_.model_text, "model", r_.cluster, r_.sequence));
    INTERLACE_ASSIGN(const LayerCost head, layers_->Cost(Role::kHead, 1, 1));
    tied_ = head.tied > 0;
    INTERLACE_ASSIGN(searched_, SpacesOf(r_.space, Trained()));
    INTERLACE_ASSIGN(TuneOptions options, Options());
    options.top = r_.top;
    if (r_.why_not) options.time_limit_s *= kSearchShare;
    options.warm = r_.before ? &*r_.before : nullptr;
    options.progress = [&](const TuneProgress& p) { Say("searching", p.done, p.total, p.best_us); };
    INTERLACE_ASSIGN(TuneResult found, TuneBaseline(searched_, *layers_, r_.cluster, options));
    options.progress = {};
    options.warm = nullptr;
    std::optional<LeastMemory> least;
    if (found.plans.empty()) {
      INTERLACE_ASSIGN(least, LeastMemoryOf(searched_, *layers_, r_.cluster, options));
      // There was no time for a better one; or the limit is just this, where the search's rounded ratios all fail.
      if (least && least->device_bytes <= options.device_bytes) {
        least->plan.bound_us = std::min(found.bound_us, least->plan.step_us);
        found.plans.push_back(least->plan);
      }
    }
    JsonWriter out;
    out.BeginObject().Key("plans").BeginArray();
    for (const Plan& plan : found.plans) INTERLACE_TRY(WriteFound(out.NewLine(), plan));
    out.EndArray().NewLine().Field("complete", found.complete).Field("bound_us", found.bound_us);
    out.Fields("memory_limit", options.device_bytes, "pairs", found.pairs, "pairs_solved", found.pairs_solved);
    out.Field("frontiers", found.frontiers).Field("points", found.points);
    if (r_.before) out.Field("from_us", found.warm_us);
    out.Field("seconds", Seconds());
    if (found.plans.empty()) {
      INTERLACE_TRY(NothingFits(out.Key("nothing_fits"), options, least));
    } else if (r_.why_not) {
      INTERLACE_TRY(WhyNot(out.Key("why_not"), options, found.plans.front()));
    }
    out.EndObject();
    return out.Take() + "\n";
  }

 private:
  double Seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  void Say(std::string_view what, int64_t done, int64_t total, double best_us) const {
    if (progress_) progress_(what, done, total, best_us);
  }

  Training Trained() const { return {r_.dtype, r_.runnable, r_.cluster.cpu, tied_}; }

  Result<TuneOptions> Options() const {
    TuneOptions options;
    options.model = r_.model;
    options.global_batch = r_.global_batch, options.sequence = r_.sequence;
    options.flash_attention = r_.flash_attention;
    options.device_bytes = DeviceBytesFor(r_.cluster, r_.memory_limit);
    options.host_bytes = r_.host_limit;
    options.time_limit_s = r_.time_limit_s;
    options.threads = r_.threads;
    if (options.device_bytes < 1) {
      return MakeError("a device of ", r_.cluster.name, " has ", r_.cluster.memory_gib,
                       " GiB, all of it reserved; give a memory limit");
    }
    return options;
  }

  PlanFile FileOf(const Plan& plan) const {
    PlanFile file;
    file.plan = plan;
    file.dtype = r_.dtype;
    file.as_run = r_.runnable;
    file.blocks = layers_->blocks();
    file.devices = r_.cluster.devices, file.per_node = r_.cluster.per_node;
    file.memory_limit = DeviceBytesFor(r_.cluster, r_.memory_limit);
    return file;
  }

  Status WriteFound(JsonWriter& out, const Plan& plan) const {
    PlanFile file = FileOf(plan);
    INTERLACE_TRY(VerifyPlan(file, r_.memory_limit > 0 ? nullptr : &r_.cluster));
    out.BeginObject().Key("plan");
    WritePlan(out, file);
    out.NewLine().Field("text", PrintPlan(file)).Key("explained");
    INTERLACE_TRY(WriteExplanations(out, file, *layers_, r_.cluster));
    INTERLACE_ASSIGN(const double error, SpreadOf(file, *layers_, r_.cluster));
    out.Field("error", error).EndObject();
    return Ok{};
  }

  Status WhyNot(JsonWriter& out, TuneOptions options, const Plan& best) const {
    options.top = 1;
    options.tolerance = kTolerance;
    options.warm = &best;  // its shapes are a plan to beat in many a space
    std::vector<Baseline> others = AlternativesOf(searched_, best);
    for (std::string_view name : {"megatron", "deepspeed", "aceso"}) {
      if (r_.runnable || name == r_.space) continue;
      INTERLACE_ASSIGN(Baseline one, SpacesOf(name, Trained()));
      one.name = "like " + one.name;
      others.push_back(std::move(one));
    }
    const double limit = r_.time_limit_s > 0 ? r_.time_limit_s - Seconds() : std::max(kCompareS, Seconds());
    auto say = [&](size_t i) {
      Say("comparing with: " + others[i].name, static_cast<int64_t>(i), static_cast<int64_t>(others.size()),
          best.step_us);
    };
    out.BeginArray();
    for (const Comparison& c : CompareAll(others, *layers_, r_.cluster, options, limit, say)) {
      out.NewLine().BeginObject().Field("name", c.name).Field("what", c.what);
      if (c.skipped) out.Field("skipped", true);
      if (!c.impossible.empty()) out.Field("impossible", c.impossible);
      if (c.bound_us > best.step_us) out.Field("at_least", c.bound_us / best.step_us - 1);
      if (c.step_us > 0)
        out.Field("step_us", c.step_us).Field("slower", c.step_us / best.step_us - 1).Field("complete", c.complete);
      if (c.least_bytes > 0)
        out.Field("least_bytes", c.least_bytes).Field("over_bytes", c.least_bytes - options.device_bytes);
      out.EndObject();
    }
    out.EndArray();
    return Ok{};
  }

  // The same machines, more of them: a preset fills its nodes first, other clusters get more nodes.
  ClusterSpec Larger(int64_t devices) const {
    const std::string& name = r_.cluster.name;
    const size_t colon = std::min(name.find(':'), name.size());  // and its software stack
    std::string count = "-" + std::to_string(r_.cluster.devices);
    if (name.substr(0, colon).ends_with(count)) {
      Result<std::string> preset =
          PresetCluster(name.substr(0, colon - count.size() + 1) + std::to_string(devices) + name.substr(colon));
      Result<ClusterSpec> larger = preset.ok() ? LoadCluster(*preset, "preset") : Result<ClusterSpec>(preset.error());
      if (larger.ok()) return *larger;
    }
    ClusterSpec larger = r_.cluster;
    larger.devices = devices;
    return larger;
  }

  // Why there is no plan at all, whatever memory a device has.
  std::string Impossible(TuneOptions options) const {
    const int64_t batch = DivisibleBatch(searched_, *layers_, r_.cluster, r_.global_batch);
    if (batch != r_.global_batch) {
      return MakeError("no accumulation, micro-batch and data parallelism ",
                       r_.runnable ? "that the runtime trains" : "of the space '" + r_.space + "'",
                       " divide a batch of ", r_.global_batch, " on ", r_.cluster.devices, " devices; take ",
                       batch > 0 ? MakeError("a batch of ", batch).message : std::string("a batch with more divisors"))
          .message;
    }
    options.host_bytes = std::numeric_limits<int64_t>::max();
    Result<std::optional<LeastMemory>> found = LeastMemoryOf(searched_, *layers_, r_.cluster, options);
    const std::string needed =
        found.ok() && *found ? MakeError("; ", (*found)->host_bytes >> 20, " MiB would do (--host-memory)").message
                             : "";
    return "a node's host memory is too small for every layout" + needed;
  }

  // By how much, and what would do: more devices of the same kind, a shorter sequence.
  Status NothingFits(JsonWriter& out, const TuneOptions& options, const std::optional<LeastMemory>& least) const {
    out.BeginObject();
    if (!least) {
      out.Field("impossible", Impossible(options)).EndObject();
      return Ok{};
    }
    out.Field("least_bytes", least->device_bytes).Field("over_bytes", least->device_bytes - options.device_bytes);
    out.Field("host_bytes", least->host_bytes).Field("stages", static_cast<int64_t>(least->plan.stages.size()));
    if (HostBytesFor(r_.cluster, options.host_bytes) < std::numeric_limits<int64_t>::max()) {
      TuneOptions free = options;
      free.host_bytes = std::numeric_limits<int64_t>::max();
      Result<std::optional<LeastMemory>> found = LeastMemoryOf(searched_, *layers_, r_.cluster, free);
      if (found.ok() && *found && (*found)->device_bytes <= options.device_bytes)
        out.Field("host_memory", (*found)->host_bytes);
    }
    for (int64_t devices = r_.cluster.devices * 2; devices <= kMostDevices; devices *= 2) {
      Say("looking for what would fit: " + std::to_string(devices) + " devices", 0, 0, 0);
      Result<std::optional<LeastMemory>> found = LeastMemoryOf(searched_, *layers_, Larger(devices), options);
      if (!found.ok() || !*found || (*found)->device_bytes > options.device_bytes) continue;
      out.Field("devices", devices);
      break;
    }
    for (int64_t sequence = r_.sequence / 2; sequence >= 128; sequence /= 2) {
      Say("looking for what would fit: sequences of " + std::to_string(sequence), 0, 0, 0);
      auto shorter = ReadLayers(r_.model_text, "model", r_.cluster, sequence);
      if (!shorter.ok()) break;
      Result<std::optional<LeastMemory>> found = LeastMemoryOf(searched_, **shorter, r_.cluster, options);
      if (!found.ok() || !*found) break;
      if ((*found)->device_bytes <= options.device_bytes) {
        out.Field("sequence", sequence);
        break;
      }
    }
    out.EndObject();
    return Ok{};
  }

  const PlanRequest& r_;
  const PlanProgress& progress_;
  std::chrono::steady_clock::time_point begin_;
  std::unique_ptr<LayerSource> layers_;
  bool tied_ = false;  // embedding and head
  Baseline searched_;
};

}  // namespace

Result<std::string> MakePlans(const PlanRequest& request, const PlanProgress& progress) {
  return Planning(request, progress).Run();
}

Result<PlanPredictor> PlanPredictor::Create(std::string_view model_text, int64_t sequence) {
  PlanPredictor out;
  INTERLACE_ASSIGN(std::unique_ptr<LayerSource> layers, ReadLayers(model_text, "model", ClusterSpec{}, sequence));
  out.layers_ = std::move(layers);
  return out;
}

Result<PlanFile> PlanPredictor::Predict(const PlanFile& file, const ClusterSpec& cluster, bool over_memory) {
  layers_->MoveTo(cluster);
  return PredictOn(file, *layers_, cluster, over_memory);
}

Result<double> PlanPredictor::ErrorOf(const PlanFile& predicted, const ClusterSpec& cluster) {
  layers_->MoveTo(cluster);
  return SpreadOf(predicted, *layers_, cluster);
}

Result<PlanFile> PredictPlan(const PlanFile& file, std::string_view model_text, const ClusterSpec& cluster,
                             bool over_memory) {
  INTERLACE_TRY(VerifyPlan(file, &cluster, over_memory));
  INTERLACE_ASSIGN(std::unique_ptr<LayerSource> layers, ReadLayers(model_text, "model", cluster, file.plan.sequence));
  return PredictOn(file, *layers, cluster, over_memory);
}

Result<std::string> ExplainPlan(const PlanFile& file, std::string_view model_text, const ClusterSpec& cluster) {
  INTERLACE_ASSIGN(std::unique_ptr<LayerSource> layers, ReadLayers(model_text, "model", cluster, file.plan.sequence));
  JsonWriter out;
  INTERLACE_TRY(WriteExplanations(out, file, *layers, cluster));
  return out.Take() + "\n";
}

Result<std::string> PlanTrace(const PlanFile& file) {
  double longest_ps = 0;  // one thing after another
  for (const PipelineStage& s : PipelineStages(file.plan)) {
    longest_ps +=
        file.plan.micro_batches() * static_cast<double>(s.forward_ps + s.backward_ps + s.send_ps + s.send_back_ps);
    longest_ps += static_cast<double>(s.first_ps + s.last_ps);
  }
  if (longest_ps >= 0x1p62) return MakeError("the step takes longer than fits in 64 bits of picoseconds");
  return WriteChromeTrace(PipelineTimeline(file.plan));
}

}  // namespace interlace::plan
