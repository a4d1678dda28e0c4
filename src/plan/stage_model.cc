#include "plan/stage_model.h"

#include <algorithm>
#include <cmath>

#include "cost/collective_model.h"
#include "plan/stage_parts.h"

namespace interlace::plan {
namespace {

bool Allowed(const std::vector<int32_t>& list, int32_t value) {
  return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
}

LinkTime TimeOf(const ClusterSpec& cluster, const GroupShape& group, Exchange kind, int64_t bytes, int64_t messages) {
  CollectiveTime time = CollectiveTimeOf(cluster, group, kind, static_cast<double>(bytes), messages);
  LinkTime out{time.latency_us + time.transfer_us, 0};
  // On a cpu the thread that computes also moves the data.
  if (cluster.cpu) out.core_us = std::min(out.us, cluster.comm_core_us_per_mb * time.moved_bytes / 1e6);
  return out;
}

// One layer under a sharding level; `group`: the data-parallel ranks.
LayerPart PartOf(const LayerCost& cost, const StageParts& stage, const ClusterSpec& cluster,
                 const StageOptions& options, const GroupShape& group, const RunCost* run) {
  LayerPart part;
  part.cost = cost;
  const int64_t messages = run != nullptr ? run->units : 1;
  const int64_t shard = (cost.parameters + stage.dp - 1) / stage.dp;
  part.weights = options.weight_bytes * (stage.zero >= 3 ? shard : cost.parameters);
  part.gradients = options.gradient_bytes * (stage.zero >= 2 ? shard : cost.parameters);
  part.states = options.state_bytes * (stage.zero >= 1 ? shard : cost.parameters);
  part.gathered_weights = stage.zero >= 3 ? options.weight_bytes * cost.largest_unit : 0;
  part.gathered_gradients = stage.zero >= 2 ? options.gradient_bytes * cost.largest_unit : 0;
  if (run != nullptr) {
    part.weights = options.weight_bytes * run->weights;
    part.gradients = options.gradient_bytes * run->gradients;
    part.states = options.state_bytes * run->states;
    part.gathered_weights = part.gathered_gradients = 0;  // within the work
    part.cost.work_forward = run->work_forward, part.cost.work_backward = run->work_backward;
    part.cost.work_backward_selective = run->work_backward_selective,
    part.cost.work_backward_full = run->work_backward_full;
  }
  part.gather = TimeOf(cluster, group, Exchange::kGather, options.weight_bytes * cost.parameters, messages);
  part.scatter = TimeOf(cluster, group, Exchange::kReduce, options.gradient_bytes * cost.parameters, messages);
  part.all_reduce = TimeOf(cluster, group, Exchange::kAllReduce, options.gradient_bytes * cost.parameters, messages);
  // The update reads states and gradients and writes states and weights: bound by memory.
  const double updated = static_cast<double>(stage.zero >= 1 ? shard : cost.parameters);
  const double bytes_per_us =
      cluster.memory_gb_per_s * 1e3 * (cluster.memory_efficiency > 0 ? cluster.memory_efficiency : 1);
  part.update_us = updated * (2 * options.state_bytes + options.gradient_bytes + options.weight_bytes) / bytes_per_us;
  part.weights_in_us = static_cast<double>(part.weights) * stage.in_us_per_byte;
  part.weights_out_us = static_cast<double>(part.weights) * stage.out_us_per_byte;
  part.gradients_in_us = static_cast<double>(part.gradients) * stage.in_us_per_byte;
  part.gradients_out_us = static_cast<double>(part.gradients) * stage.out_us_per_byte;
  part.states_in_us = static_cast<double>(part.states) * stage.in_us_per_byte;
  part.states_out_us = static_cast<double>(part.states) * stage.out_us_per_byte;
  return part;
}

// Factors that never fall when a class joins a set. Then no amount of work added makes anything end earlier (at any
// moment each class has at least as much left, and none goes faster), which the search rests on. Fitted factors are so
// already; given ones are moved to the middle, by ratio, of the least factors above them and the greatest below that
// are.
Interference Ordered(const Interference& given) {
  Interference out;
  for (int set = 1; set < 16; ++set) {
    for (int member = 0; member < Interference::kClasses; ++member) {
      if ((set >> member & 1) == 0 || set == 1 << member) continue;
      double above = 1, below = given.factor[set][member];
      for (int other = 1; other < 16; ++other) {
        if ((other >> member & 1) == 0 || other == 1 << member) continue;
        if ((other & set) == other) above = std::max(above, given.factor[other][member]);
        if ((other & set) == set) below = std::min(below, given.factor[other][member]);
      }
      out.factor[set][member] = std::sqrt(above * std::max(below, 1.0));
    }
  }
  return out;
}

// The costs of layers whose embedding and head are in one stage: parameters that both use are there once, and the
// gradient that the head made of them waits through the backward part, where the embedding's is made beside it and
// added.
void OnceWhatIsTied(std::array<LayerCost, kRoles>& cost, const StageOptions& options) {
  LayerCost &embedding = cost[0], &block = cost[1], &head = cost[2];
  const int64_t waits = head.tied * options.gradient_bytes;
  head.parameters -= head.tied;
  embedding.work_backward += 2 * waits;
  for (int64_t* work : {&block.work_backward, &block.work_backward_selective, &block.work_backward_full})
    *work += waits;
}

Status CheckCost(const LayerCost& c, Role role, int32_t b, int32_t tp) {
  const double us[] = {c.forward_us,           c.backward_us,
                       c.tp_forward_us,        c.tp_backward_us,
                       c.recompute_full_us,    c.recompute_selective_us,
                       c.tp_recompute_full_us, c.tp_recompute_selective_us};
  const int64_t counts[] = {c.parameters,
                            c.tied,
                            c.largest_unit,
                            c.saved_kept,
                            c.saved_selective,
                            c.saved_full,
                            c.work_forward,
                            c.work_backward,
                            c.work_backward_selective,
                            c.work_backward_full,
                            c.boundary};
  static constexpr const char* kNames[] = {"embedding", "block", "head"};
  bool good =
      c.tied <= c.parameters &&
      std::all_of(std::begin(us), std::end(us), [](double v) { return std::isfinite(v) && v >= 0; }) &&
      std::all_of(std::begin(counts), std::end(counts), [](int64_t v) { return v >= 0 && v < int64_t{1} << 46; });
  if (good) return Ok{};
  return MakeError("the cost of the ", kNames[static_cast<int>(role)], " at micro-batch ", b, " and tensor parallel ",
                   tp, " has a time or size that is negative, not finite or beyond 64 TB");
}

// Of a device's bytes to or from the tier. The devices of a node share its memory's bandwidth, or its file store's,
// whichever stages they belong to. 0: no such tier.
double UsPerByte(const ClusterSpec& cluster, double link_gb_per_s, double file_gb_per_s) {
  const auto devices = static_cast<double>(cluster.per_node);
  double rate = cluster.file_tier ? file_gb_per_s / devices : link_gb_per_s;
  const double most = cluster.file_tier ? cluster.tier_gb_per_s : cluster.host_gb_per_s / devices;
  if (most > 0) rate = std::min(rate, most);
  return rate > 0 ? 1e-3 / rate : 0;
}

}  // namespace

StageOptions StageOptions::Paper() {
  StageOptions options;
  options.selective = false;
  return options;
}

StageOptions StageOptions::Artifact() {
  StageOptions options = Paper();
  options.micro_batches = {1, 2, 4};
  options.zero = {false, true, true, true};
  options.ratios = {0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1};
  options.weights = 30;
  return options;
}

StageModel::StageModel(std::unique_ptr<const State> state) : state_(std::move(state)) {}
StageModel::StageModel(StageModel&&) noexcept = default;
StageModel& StageModel::operator=(StageModel&&) noexcept = default;
StageModel::~StageModel() = default;
const StageOptions& StageModel::options() const {
  return state_->options;
}

namespace {

Status CheckOptions(const StageOptions& options) {
  if (options.global_batch < 1)
    return MakeError("the global batch is ", options.global_batch, "; it must be at least 1");
  if (options.device_bytes < 1)
    return MakeError("a device has ", options.device_bytes, " bytes left; set a larger memory limit");
  for (float ratio : options.ratios) {
    if (!(ratio >= 0 && ratio <= 1)) return MakeError("an offload ratio is ", ratio, "; ratios lie between 0 and 1");
  }
  return Ok{};
}

std::vector<int32_t> DivisorsOf(int64_t number) {
  std::vector<int32_t> divisors;
  for (int64_t d = 1; d <= std::min<int64_t>(number, 1 << 20); ++d) {
    if (number % d == 0) divisors.push_back(static_cast<int32_t>(d));
  }
  return divisors;
}

// How so many devices may share a micro-batch; every layout that the options and the cluster allow.
struct DeviceLayout {
  int64_t devices;
  int32_t micro_batch, dp, tp;
};
std::vector<DeviceLayout> LayoutsOf(const ClusterSpec& cluster, const StageOptions& options, int32_t largest_tp) {
  const std::vector<int32_t> divisors = DivisorsOf(options.global_batch);
  std::vector<DeviceLayout> out;
  for (int64_t devices = 1; devices <= cluster.devices; ++devices) {
    // node_stage: a stage lies inside a node, or is whole nodes.
    if (devices > cluster.per_node && devices % cluster.per_node != 0) continue;
    for (int64_t tp = 1; tp <= std::min(devices, cluster.per_node); ++tp) {
      const int64_t dp = devices / tp;
      // mesh: dp * tp = devices
      if (devices % tp != 0) continue;
      // model_tp: tp divides the model's sizes, and is allowed
      if (largest_tp % tp != 0 || !Allowed(options.tensor_parallel, static_cast<int32_t>(tp))) continue;
      // node_tp: a tensor-parallel group lies inside a node
      if (devices > cluster.per_node && cluster.per_node % tp != 0) continue;
      // batch: G * b * dp = global batch
      if (options.global_batch % dp != 0) continue;
      for (int32_t b : divisors) {
        if ((options.global_batch / dp) % b != 0 || !Allowed(options.micro_batches, b)) continue;
        out.push_back({devices, b, static_cast<int32_t>(dp), static_cast<int32_t>(tp)});
      }
    }
  }
  return out;
}

// Layers' costs, each asked for once.
class CostTable {
 public:
  explicit CostTable(const LayerSource& layers) : layers_(layers) {}
  Result<std::array<LayerCost, kRoles>> Of(int32_t b, int32_t tp) {
    if (auto found = known_.find({b, tp}); found != known_.end()) return found->second;
    std::array<LayerCost, kRoles> cost;
    for (int role = 0; role < kRoles; ++role) {
      INTERLACE_ASSIGN(cost[role], layers_.Cost(static_cast<Role>(role), b, tp));
      INTERLACE_TRY(CheckCost(cost[role], static_cast<Role>(role), b, tp));
    }
    return known_.emplace(std::pair(b, tp), cost).first->second;
  }

 private:
  const LayerSource& layers_;
  std::map<std::pair<int32_t, int32_t>, std::array<LayerCost, kRoles>> known_;
};

// A layout under every ZeRO level, then the same of a stage with embedding and head (StageModel::State::parts).
Status AddParts(const DeviceLayout& layout, const Interference* interference, std::array<LayerCost, kRoles> cost,
                const LayerSource& layers, StageModel::State& state) {
  const StageOptions& options = state.options;
  const ClusterSpec& cluster = state.cluster;
  const GroupShape group = GroupShapeOf({{"dp", layout.dp}, {"tp", layout.tp}}, "dp", cluster.per_node);
  const int64_t samples = options.global_batch / layout.dp;
  StageParts stage;
  stage.micro_batch = layout.micro_batch, stage.dp = layout.dp, stage.tp = layout.tp;
  stage.interference = options.overlap ? interference : nullptr;
  stage.in_us_per_byte = UsPerByte(cluster, cluster.h2d_gb_per_s, cluster.file_read_gb_per_s);
  stage.out_us_per_byte = UsPerByte(cluster, cluster.d2h_gb_per_s, cluster.file_write_gb_per_s);
  const auto first = static_cast<int32_t>(state.parts.size());
  state.index[{stage.micro_batch, stage.dp, stage.tp}] = first;
  state.of_key[{static_cast<int32_t>(layout.devices), samples / stage.micro_batch}].push_back(first);
  for (bool whole : {false, true}) {
    if (whole) OnceWhatIsTied(cost, options);
    for (stage.zero = 0; stage.zero <= 3; ++stage.zero) {
      const bool runs = options.as_run && stage.tp == 1 && (stage.dp > 1 || stage.zero == 0);
      const RunSetting setting{stage.dp, stage.zero, samples > stage.micro_batch, cluster.cpu, whole};
      for (int role = 0; role < kRoles; ++role) {
        RunCost run;
        if (runs) {
          INTERLACE_ASSIGN(run, layers.AsRun(static_cast<Role>(role), stage.micro_batch, setting));
        }
        stage.layer[role] = PartOf(cost[role], stage, cluster, options, group, runs ? &run : nullptr);
      }
      state.parts.push_back(stage);
    }
  }
  return Ok{};
}

}  // namespace

Result<StageModel> StageModel::Create(const LayerSource& layers, const ClusterSpec& cluster,
                                      const StageOptions& options) {
  INTERLACE_TRY(CheckOptions(options));
  auto state = std::make_unique<State>();
  state->options = options;
  state->cluster = cluster;
  state->blocks = layers.blocks();
  state->host_share = options.host_bytes / std::max<int64_t>(cluster.per_node, 1);
  StageOptions& o = state->options;
  std::sort(o.ratios.begin(), o.ratios.end());
  if (!(UsPerByte(cluster, cluster.h2d_gb_per_s, cluster.file_read_gb_per_s) > 0 &&
        UsPerByte(cluster, cluster.d2h_gb_per_s, cluster.file_write_gb_per_s) > 0)) {  // no link, no offload
    o.weights_out = o.gradients_out = o.states_out = o.activations_out = false;
  }
  Interference given;
  if (cluster.interference_factors.size() == 28) {
    std::array<double, 28> factors;
    std::copy(cluster.interference_factors.begin(), cluster.interference_factors.end(), factors.begin());
    given = Interference::FromFactors(factors);
  }
  CostTable costs(layers);
  std::map<int64_t, const Interference*> interference;  // by devices
  for (const DeviceLayout& layout : LayoutsOf(cluster, options, layers.largest_tp())) {
    auto [at, added] = interference.try_emplace(layout.devices);
    if (added) {
      const Interference* fitted = InterferenceOn(cluster, std::min(layout.devices, cluster.per_node),
                                                  std::max<int64_t>(layout.devices / cluster.per_node, 1));
      const bool own = !cluster.interference_factors.empty() || fitted == nullptr;
      at->second = &state->interference.emplace_back(Ordered(own ? given : *fitted));
    }
    INTERLACE_ASSIGN(auto cost, costs.Of(layout.micro_batch, layout.tp));
    INTERLACE_TRY(AddParts(layout, at->second, cost, layers, *state));
  }
  if (state->parts.empty()) {
    return MakeError("no micro-batch and data-parallel degree divide the global batch of ", options.global_batch,
                     " on this cluster's meshes; take a batch with more divisors");
  }
  return StageModel(std::move(state));
}

Status StageModel::Check(const Strategy& s) const {
  if (s.zero < 0 || s.zero > 3) return MakeError("ZeRO level ", s.zero, " is not one of 0, 1, 2, 3");
  if (state_->Find(s) == nullptr) {
    return MakeError("micro-batch ", s.micro_batch, " with data parallel ", s.dp, " and tensor parallel ", s.tp,
                     " is not in the space: the three must divide the batch of ", state_->options.global_batch,
                     ", the model and a node or whole nodes of the cluster");
  }
  if (s.layers < 1 || s.layers > 1 << 20) return MakeError("a stage of ", s.layers, " blocks; it needs at least 1");
  if (s.full < 0 || s.selective < 0 || s.full > s.layers - s.selective) {
    return MakeError("a stage of ", s.layers, " blocks cannot recompute ", s.full, " wholly and ", s.selective,
                     " selectively");
  }
  if (s.in_flight < 1 || s.in_flight > 1 << 20)
    return MakeError(s.in_flight, " micro-batches in flight; it must be at least 1");
  for (float ratio : {s.weights_out, s.gradients_out, s.states_out, s.activations_out}) {
    if (!(ratio >= 0 && ratio <= 1)) return MakeError("an offload ratio is ", ratio, "; ratios lie between 0 and 1");
  }
  return Ok{};
}

}  // namespace interlace::plan
