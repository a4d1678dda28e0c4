#include "plan/captured_layers.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cost/collective_model.h"
#include "cost/kernel_model.h"
#include "cost/signature.h"
#include "ir/op_table.h"
#include "passes/passes.h"
#include "plan/layer_memory.h"
#include "plan/model_text.h"
#include "plan/run_layer.h"
#include "plan/tensor_parallel.h"

namespace interlace::plan {
namespace {

// One program of a role and its memory.
struct Variant {
  Program program;
  LayerMemory memory;
};

// Of one layer, one op after another: kernels, and the collectives of tensor parallelism; how long the host takes to
// launch them.
struct LayerTimes {
  double forward = 0, backward = 0, tp_forward = 0, tp_backward = 0;
  double launch_forward = 0, launch_backward = 0;
  int64_t backward_kernels = 0;
  // A layer takes as long as its kernels or as their launches, whichever is longer: the device works while the host is
  // ahead, and waits for it where it is not.
  double Forward() const { return std::max(forward, launch_forward - tp_forward); }
  double Backward() const { return std::max(backward, launch_backward - tp_backward); }
};

// What a layer's program does, op by op, on sizes that are numbers: the same on every cluster.
struct LayerWork {
  struct Kernel {
    KernelWork work;
    bool backward = false;
    int64_t score_matrices = 0;  // of attention, that it only scales, masks or copies
    std::string key;             // under which a cluster may have its measured time
  };
  struct Collective {
    Exchange kind = Exchange::kNone;
    double bytes = 0;
    bool backward = false;
  };
  std::vector<Kernel> kernels;
  std::vector<Collective> collectives;
  int64_t tp = 1;
};

// The whole of what is gathered, scattered or summed, several at once among it.
Result<double> CollectiveBytes(const Program& program, const Op& op) {
  int64_t bytes = 0;
  for (size_t i = 0; i < op.results.size(); ++i) {
    const ValueId whole = TraitsOf(op).exchange == Exchange::kReduce ? op.args[i].value : op.results[i];
    INTERLACE_ASSIGN(const int64_t each, program.StorageBytes(program.value(whole).type));
    bytes += each;
  }
  return static_cast<double>(bytes);
}

// Of an op that only scales, masks or copies attention scores (samples x heads x sequence x sequence): how many
// matrices of scores. 0: it does something else.
int64_t ScoreMatrices(const Program& program, const Op& op, const KernelWork& work, int64_t sequence) {
  if (work.kind != KernelWork::Kind::kMemory || op.results.empty() || op.results[0] == kNone) return 0;
  if (op.kind == OpKind::kCall) return 0;  // a region has a kernel of its own
  if (op.name.find("softmax") != std::string::npos) return 0;
  const std::vector<Dim>& sizes = program.value(op.results[0]).type.sizes;
  const bool scores =
      sizes.size() == 4 && sizes[1].value > 1 && sizes[2].value == sequence && sizes[3].value == sequence;
  return scores ? sizes[0].value * sizes[1].value : 0;
}

// The softmax's kernel scales and masks scores on its way in every framework that trains large models. Megatron's
// (fused_softmax.py, is_kernel_available) has four warps of a block work on a matrix each, and takes samples x heads of
// a rank only in fours; any others go op by op, as the slow rows of op_times_gpt_a100.csv do (13B, tp 4 and 8).
bool IsPartOfSoftmax(const ClusterSpec& cluster, int64_t matrices) {
  constexpr int64_t kWarps = 4;
  const bool fuses = cluster.stack != "kernels" && !cluster.cpu;
  return fuses && matrices > 0 && (cluster.stack != "megatron" || matrices % kWarps == 0);
}

// `bound`: what Bind makes of a layer's program.
Result<LayerWork> WorkOfLayer(const Program& bound, const Binding& binding) {
  LayerWork out;
  if (auto tp = binding.find("tp"); tp != binding.end()) out.tp = tp->second;
  for (OpId id : bound.MicroBatchPhase()->ops) {
    const Op& op = bound.op(id);
    const bool backward = op.part == Part::kBackward;
    if (TraitsOf(op).family == OpFamily::kCollective) {
      if (IsWait(op)) continue;
      INTERLACE_ASSIGN(double bytes, CollectiveBytes(bound, op));
      out.collectives.push_back({TraitsOf(op).exchange, bytes, backward});
    } else {
      INTERLACE_ASSIGN(KernelWork work, WorkOf(bound, op));
      if (work.kind == KernelWork::Kind::kFree) continue;
      out.kernels.push_back({work, backward, ScoreMatrices(bound, op, work, binding.at("s")), {}});
      INTERLACE_TRY(AppendProfileKey(bound, op, out.kernels.back().key));
    }
  }
  return out;
}

// `kept`: the same layer without recomputation. What the backward part runs beyond it is forward's, and so launched.
LayerTimes TimesOf(const LayerWork& layer, const ClusterSpec& cluster, const LayerTimes* kept = nullptr) {
  LayerTimes times;
  const GroupShape group = GroupShapeOf({{"tp", layer.tp}}, "tp", cluster.per_node);
  for (const LayerWork::Collective& each : layer.collectives) {
    CollectiveTime time = CollectiveTimeOf(cluster, group, each.kind, each.bytes, 1);
    (each.backward ? times.tp_backward : times.tp_forward) += time.latency_us + time.transfer_us;
  }
  for (const LayerWork::Kernel& each : layer.kernels) {
    if (IsPartOfSoftmax(cluster, each.score_matrices)) continue;
    const int count = each.score_matrices > 0 && cluster.stack == "megatron" ? 2 : 1;
    const auto measured = cluster.op_us.find(each.key);
    (each.backward ? times.backward : times.forward) +=
        measured != cluster.op_us.end() ? measured->second : count * KernelUs(cluster, each.work);
    if (each.backward) {
      times.backward_kernels += count;
    } else {
      times.launch_forward += count * cluster.issue_us;
    }
  }
  // Megatron hides behind products all that travels in backward but the gradients that enter row-parallel ones
  // (Korthikanti et al., section 4.2).
  if (cluster.stack == "megatron") times.tp_backward = times.tp_forward / 2;
  const int64_t again = kept == nullptr ? 0 : times.backward_kernels - kept->backward_kernels;
  const double own = static_cast<double>(times.backward_kernels - again) * cluster.step.issue_backward;
  times.launch_backward = cluster.issue_us * (own + static_cast<double>(again));
  return times;
}

// This runtime on an accelerator has regions: their kernels, and what they keep (pass fuse).
bool HasRegions(const ClusterSpec& cluster) {
  return cluster.stack == "ours" && !cluster.cpu;
}

// What selective recomputation keeps (pass recompute): this runtime's, torchtitan's and Megatron's.
constexpr const char* kSelective[] = {"products", "second", "all"};
int MeaningOf(const ClusterSpec& cluster) {
  const bool torch = cluster.stack == "eager" || cluster.stack == "compiled" || cluster.stack == "graph";
  return torch ? 1 : cluster.stack == "megatron" ? 2 : 0;
}

// The programs of a role at tp = 1, or with tp as a symbol.
class Layer {
 public:
  // `cuts`: for tensor parallelism.
  static Result<Layer> Of(const ModelText& model, Role role, bool cuts) {
    const Program& captured = model.programs[static_cast<int>(role)];
    Layer layer;
    layer.role_ = role;
    INTERLACE_ASSIGN(layer.kept_, Make(captured, std::nullopt, model, cuts));
    Program& program = layer.kept_.program;
    for (const Param& param : program.params) {
      INTERLACE_ASSIGN(Dim elements, ElementsOf(program, program.value(param.value).type));
      layer.parameters_ = program.dims.Add(layer.parameters_, elements);
      if (role == Role::kHead && param.name == model.tied) layer.tied_ = elements;
    }
    if (role != Role::kBlock) return layer;
    for (size_t i = 0; i < layer.selective_.size(); ++i) {
      const PassOptions selective{{"mode", "selective"}, {"keep", kSelective[i]}};
      INTERLACE_ASSIGN(layer.selective_[i], Make(captured, selective, model, cuts));
    }
    INTERLACE_ASSIGN(layer.full_, Make(captured, PassOptions{{"mode", "full"}}, model, cuts));
    return layer;
  }

  // What does not depend on the cluster.
  struct Counts {
    LayerCost cost;
    LayerWork kept, selective, full;
  };
  // `meaning`: of selective recomputation, an index of kSelective. `regions`: as HasRegions.
  Result<Counts> CountsOf(const Binding& binding, int meaning, bool regions) const {
    Counts out;
    LayerCost& cost = out.cost;
    const DimTable& dims = kept_.program.dims;
    INTERLACE_ASSIGN(cost.parameters, dims.Evaluate(parameters_, binding));
    INTERLACE_ASSIGN(cost.tied, dims.Evaluate(tied_, binding));
    cost.largest_unit = cost.parameters;
    INTERLACE_ASSIGN(cost.boundary, dims.Evaluate(kept_.memory.boundary, binding));
    INTERLACE_ASSIGN(const Bound kept, Count(kept_, binding, regions, out.kept));
    cost.saved_kept = kept.saved;
    cost.work_backward = kept.backward;
    cost.work_forward = kept.forward;
    cost.saved_selective = cost.saved_full = cost.saved_kept;
    cost.work_backward_selective = cost.work_backward_full = cost.work_backward;
    if (role_ != Role::kBlock) return out;
    INTERLACE_ASSIGN(const Bound selective, Count(selective_[meaning], binding, regions, out.selective));
    cost.saved_selective = selective.saved;
    cost.work_backward_selective = selective.backward;
    INTERLACE_ASSIGN(const Bound full, Count(full_, binding, regions, out.full));
    cost.saved_full = full.saved;
    cost.work_backward_full = full.backward;
    return out;
  }

  LayerCost Cost(const Counts& counts, const ClusterSpec& cluster) const {
    LayerCost cost = counts.cost;
    const LayerTimes times = TimesOf(counts.kept, cluster);
    cost.forward_us = times.Forward();
    cost.backward_us = times.Backward();
    cost.tp_forward_us = times.tp_forward;
    cost.tp_backward_us = times.tp_backward;
    if (role_ != Role::kBlock) return cost;
    const LayerTimes some = TimesOf(counts.selective, cluster, &times), all = TimesOf(counts.full, cluster, &times);
    cost.recompute_selective_us = std::max(some.Backward() - times.Backward(), 0.0);
    cost.recompute_full_us = std::max(all.Backward() - times.Backward(), 0.0);
    cost.tp_recompute_selective_us = std::max(some.tp_backward - times.tp_backward, 0.0);
    cost.tp_recompute_full_us = std::max(all.tp_backward - times.tp_backward, 0.0);
    if (cluster.stack != "megatron") return cost;
    cost.recompute_full_us = cost.forward_us;  // the whole forward part, its last product too
    cost.tp_recompute_full_us = cost.tp_forward_us;
    return cost;
  }

  // As the runtime trains it, by kind of recomputation: nothing, selective, full (only blocks have the last two).
  struct AsRun {
    RunHolds holds;
    std::array<RunLayer, 3> kinds;
    int count = 1;
  };
  Result<AsRun> RunOf(const RunSetting& setting, const std::string& tied) const {
    AsRun out;
    out.count = role_ == Role::kBlock ? 3 : 1;
    INTERLACE_ASSIGN(out.holds, RunHoldsOf(kept_.program, role_, setting, tied));
    const Variant* variants[] = {&kept_, &selective_[0], &full_};
    for (int kind = 0; kind < out.count; ++kind) {
      INTERLACE_ASSIGN(out.kinds[kind], RunLayerOf(variants[kind]->program, role_, setting, tied));
    }
    return out;
  }
  // Of the inputs that all blocks share, by the most that any way of recomputing reads again.
  Result<int64_t> SharedBytes(const Binding& binding) const {
    int64_t most = 0;
    for (const Variant* variant : {&kept_, &selective_[0], &full_}) {
      INTERLACE_ASSIGN(int64_t bytes, variant->program.dims.Evaluate(variant->memory.shared, binding));
      most = std::max(most, bytes);
    }
    return most;
  }

 private:
  // `mode` of the pass recompute, "" for none. It runs first: what is run again is cut, gathered and summed again.
  static Result<Variant> Make(const Program& captured, const std::optional<PassOptions>& recompute,
                              const ModelText& model, bool cuts) {
    Variant out;
    out.program = captured.Clone();
    if (recompute) INTERLACE_TRY(Recompute(out.program, *recompute));
    if (cuts) INTERLACE_TRY(CutForTensorParallel(out.program, model));
    INTERLACE_ASSIGN(out.memory, MemoryOfLayer(out.program));
    return out;
  }

  static Result<Dim> ElementsOf(Program& program, const Type& type) {
    Dim elements = 1;
    for (Dim size : type.sizes) {
      INTERLACE_ASSIGN(elements, program.dims.CheckedMul(elements, size));
    }
    return elements;
  }

  struct Bound {
    int64_t saved = 0, forward = 0, backward = 0;  // bytes between the passes, and the parts' peaks beyond them
  };
  static Result<Bound> Count(const Variant& variant, const Binding& binding, bool regions, LayerWork& work) {
    INTERLACE_ASSIGN(Program bound, Bind(variant.program, binding));
    const DimTable* dims = &variant.program.dims;
    LayerMemory memory = variant.memory;
    if (regions) {  // of sizes that are numbers
      INTERLACE_TRY(Fuse(bound, {}));
      INTERLACE_ASSIGN(memory, MemoryOfLayer(bound));
      dims = &bound.dims;
    }
    INTERLACE_ASSIGN(work, WorkOfLayer(bound, binding));
    Bound out;
    INTERLACE_ASSIGN(out.saved, dims->Evaluate(memory.saved, binding));
    INTERLACE_ASSIGN(const int64_t forward, Largest(*dims, memory.forward, binding));
    INTERLACE_ASSIGN(const int64_t backward, Largest(*dims, memory.backward, binding));
    out.forward = std::max<int64_t>(forward - out.saved, 0);
    out.backward = std::max<int64_t>(backward - out.saved, 0);
    return out;
  }

  Role role_ = Role::kBlock;
  Variant kept_, full_;
  std::array<Variant, std::size(kSelective)> selective_;
  Dim parameters_, tied_;  // elements of a rank
};

class CapturedLayers : public LayerSource {
 public:
  CapturedLayers(const ClusterSpec& cluster, int64_t sequence) : cluster_(cluster), sequence_(sequence) {}

  Status Prepare(ModelText model) {
    blocks_ = model.blocks;
    dtype_ = model.dtype;
    tied_ = model.tied;
    largest_tp_ = static_cast<int32_t>(std::gcd<int64_t>(LargestTensorParallel(model), sequence_));
    cut_binding_ = BindingOf(model, 1, sequence_, 1);
    for (int role = 0; role < kRoles; ++role) {
      Program& program = model.programs[role];
      // The trace calls a size of 1 another case because of broadcasting, which changes no size that is counted here.
      for (Symbol& symbol : program.symbols) {
        if (symbol.name == "b") symbol.min = 1;
        if (symbol.name == "s" && (sequence_ < symbol.min || sequence_ > symbol.max)) {
          return MakeError("the model takes sequences of ", symbol.min, " to ", symbol.max, ", not of ", sequence_);
        }
      }
      INTERLACE_TRY(Canonicalize(program));
      INTERLACE_ASSIGN(layers_[role], Layer::Of(model, static_cast<Role>(role), false));
      if (largest_tp_ == 1) continue;
      INTERLACE_ASSIGN(cut_layers_[role], Layer::Of(model, static_cast<Role>(role), true));
    }
    return Ok{};
  }

  void MoveTo(const ClusterSpec& cluster) override {
    cluster_ = cluster;
    known_.clear();
  }

  int32_t blocks() const override { return blocks_; }
  int32_t largest_tp() const override { return largest_tp_; }

  Result<LayerCost> Cost(Role role, int32_t micro_batch, int32_t tp) const override {
    if (micro_batch < 1) return MakeError("a micro-batch of ", micro_batch, " has no samples");
    if (tp < 1 || largest_tp_ % tp != 0) {
      return MakeError("tensor parallel over ", tp,
                       " devices does not divide the model's heads and widths and the sequence of ", sequence_,
                       "; divisors of ", largest_tp_, " do");
    }
    auto key = std::tuple(role, micro_batch, tp);
    {
      std::lock_guard lock(mutex_);
      auto found = known_.find(key);
      if (found != known_.end()) return found->second;
    }
    const auto& layers = tp == 1 ? layers_ : cut_layers_;
    Binding binding{{"b", micro_batch}, {"s", sequence_}};
    if (tp > 1) binding = cut_binding_, binding["b"] = micro_batch, binding["tp"] = tp;
    const Layer& layer = layers[static_cast<int>(role)];
    const Layer::Counts* counts = nullptr;
    const int meaning = MeaningOf(cluster_);
    const auto place = std::tuple_cat(key, std::tuple(meaning, HasRegions(cluster_)));
    {
      std::lock_guard lock(mutex_);
      auto found = counted_.find(place);
      if (found != counted_.end()) counts = &found->second;
    }
    if (counts == nullptr) {
      INTERLACE_ASSIGN(Layer::Counts made, layer.CountsOf(binding, meaning, HasRegions(cluster_)));
      std::lock_guard lock(mutex_);
      counts = &counted_.emplace(place, std::move(made)).first->second;
    }
    LayerCost cost = layer.Cost(*counts, cluster_);
    if (role == Role::kEmbedding) {  // makes what all blocks share
      INTERLACE_ASSIGN(int64_t shared, layers[static_cast<int>(Role::kBlock)].SharedBytes(binding));
      for (int64_t* saved : {&cost.saved_kept, &cost.saved_selective, &cost.saved_full}) *saved += shared;
    }
    std::lock_guard lock(mutex_);
    known_.emplace(key, cost);
    return cost;
  }

  Result<RunCost> AsRun(Role role, int32_t micro_batch, const RunSetting& setting) const override {
    std::array<LayerCost, kRoles> costs;
    for (int i = 0; i < kRoles; ++i) {
      INTERLACE_ASSIGN(costs[i], Cost(static_cast<Role>(i), micro_batch, 1));
    }
    const Binding binding{{"b", micro_batch}, {"s", sequence_}};
    std::lock_guard lock(mutex_);
    auto [at, added] = runs_.try_emplace(setting);
    for (int i = 0; i < kRoles && added; ++i) {
      Result<Layer::AsRun> run = layers_[i].RunOf(setting, setting.whole ? tied_ : "");
      if (!run.ok()) {
        runs_.erase(at);
        return run.error();
      }
      at->second[i] = std::move(*run);
    }
    const auto& [embedding, block, head] = at->second;
    auto most = [&block = block](int64_t RunLayer::*member) {
      return std::max({block.kinds[0].*member, block.kinds[1].*member, block.kinds[2].*member});
    };
    const Layer::AsRun& mine = at->second[static_cast<int>(role)];
    const LayerCost& cost = costs[static_cast<int>(role)];
    RunCost out{mine.holds.weights, mine.holds.gradients, mine.holds.states, mine.holds.units};
    // Beside a layer: what the next one gathers ahead, and what the one before it in backward still reduces. A tied
    // parameter is gathered from the embedding to the head, and its gradient waits from the head to the embedding.
    const int64_t tied = setting.whole ? costs[static_cast<int>(Role::kHead)].tied * DTypeBytes(dtype_) : 0;
    const int64_t gathered = role == Role::kBlock && setting.zero == 3 && setting.dp > 1 ? tied : 0;
    const int64_t ahead = role == Role::kEmbedding ? most(&RunLayer::first_forward)
                          : role == Role::kBlock   ? std::max(block.kinds[0].first_forward, head.kinds[0].first_forward)
                                                   : 0;
    int64_t shared = 0;  // what the embedding makes for all blocks is saved, and not in its program
    if (role == Role::kEmbedding) {
      INTERLACE_ASSIGN(shared, layers_[static_cast<int>(Role::kBlock)].SharedBytes(binding));
    }
    INTERLACE_ASSIGN(int64_t forward, mine.kinds[0].Forward(binding, ahead));
    out.work_forward = std::max<int64_t>(forward + shared - cost.saved_kept, 0) + gathered;
    const int64_t saved[] = {cost.saved_kept - shared, cost.saved_selective - shared, cost.saved_full - shared};
    int64_t* work[] = {&out.work_backward, &out.work_backward_selective, &out.work_backward_full};
    for (int kind = 0; kind < mine.count; ++kind) {
      const RunLayer& layer = mine.kinds[kind];
      const int64_t gathering = role == Role::kHead    ? most(&RunLayer::first_backward)
                                : role == Role::kBlock ? layer.first_backward
                                                       : 0;
      const int64_t reducing = role == Role::kBlock       ? std::max(head.kinds[0].last_reduced, layer.last_reduced)
                               : role == Role::kEmbedding ? most(&RunLayer::last_reduced)
                                                          : 0;
      INTERLACE_ASSIGN(int64_t peak, layer.Backward(binding, gathering, reducing));
      *work[kind] = std::max<int64_t>(peak - saved[kind], 0) + (role == Role::kBlock ? tied : 0);
    }
    return out;
  }

 private:
  ClusterSpec cluster_;
  int64_t sequence_;
  int32_t blocks_ = 0, largest_tp_ = 1;
  DType dtype_ = DType::kF32;
  std::string tied_;
  std::array<Layer, kRoles> layers_, cut_layers_;
  Binding cut_binding_;  // of the latter, but for micro-batch and degree
  mutable std::mutex mutex_;
  mutable std::map<std::tuple<Role, int32_t, int32_t>, LayerCost> known_;
  mutable std::map<std::tuple<Role, int32_t, int32_t, int, bool>, Layer::Counts> counted_;  // on any cluster
  mutable std::map<RunSetting, std::array<Layer::AsRun, kRoles>> runs_;
};

}  // namespace

Result<RunCost> LayerSource::AsRun(Role, int32_t, const RunSetting&) const {
  return MakeError("these layers have no programs, so what the runtime makes of them cannot be counted");
}

Result<std::unique_ptr<LayerSource>> ReadLayers(std::string_view model_text, std::string_view file,
                                                const ClusterSpec& cluster, int64_t sequence) {
  INTERLACE_ASSIGN(ModelText model, ReadModelText(model_text, file));
  auto layers = std::make_unique<CapturedLayers>(cluster, sequence);
  INTERLACE_TRY(layers->Prepare(std::move(model)));
  return std::unique_ptr<LayerSource>(std::move(layers));
}

}  // namespace interlace::plan
