#include "plan/captured_layers.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "cost/kernel_model.h"
#include "passes/canonicalize.h"
#include "passes/recompute.h"
#include "plan/layer_memory.h"
#include "plan/model_text.h"

namespace interlace::plan {
namespace {

// One program of a role and its memory.
struct Variant {
  Program program;
  LayerMemory memory;
};

struct PassTimesUs {
  double forward = 0, backward = 0;
};

// Sum of the kernels of each part, one after another.
Result<PassTimesUs> KernelTimes(const Program& program, const Binding& binding, const ClusterSpec& cluster) {
  INTERLACE_ASSIGN(Program bound, Bind(program, binding));
  PassTimesUs times;
  for (OpId id : bound.FindPhase("micro_batch")->ops) {
    const Op& op = bound.op(id);
    INTERLACE_ASSIGN(KernelWork work, WorkOf(bound, op));
    (op.part == Part::kBackward ? times.backward : times.forward) += KernelUs(cluster, work);
  }
  return times;
}

class Layer {
 public:
  static Result<Layer> Of(const Program& captured, Role role) {
    Layer layer;
    layer.role_ = role;
    INTERLACE_ASSIGN(layer.kept_, Make(captured, ""));
    for (const Param& param : captured.params) {
      int64_t elements = 1;
      for (Dim size : captured.value(param.value).type.sizes) {
        if (!size.is_const() || __builtin_mul_overflow(elements, size.value, &elements)) {
          return MakeError("parameter '", param.name, "' has more than 64 bits of elements, or sizes that are no numbers");
        }
      }
      if (__builtin_add_overflow(layer.parameters_, elements, &layer.parameters_)) {
        return MakeError("the layer has more parameters than 64 bits count");
      }
      layer.largest_ = std::max(layer.largest_, elements);
    }
    if (role != Role::kBlock) return layer;
    INTERLACE_ASSIGN(layer.selective_, Make(captured, "selective"));
    INTERLACE_ASSIGN(layer.full_, Make(captured, "full"));
    return layer;
  }

  Result<LayerCost> Cost(const Binding& binding, const ClusterSpec& cluster) const {
    LayerCost cost;
    INTERLACE_ASSIGN(PassTimesUs times, KernelTimes(kept_.program, binding, cluster));
    cost.forward_us = times.forward;
    cost.backward_us = times.backward;
    cost.parameters = parameters_;
    cost.largest_unit = largest_;
    const DimTable& dims = kept_.program.dims;
    INTERLACE_ASSIGN(cost.boundary, dims.Evaluate(kept_.memory.boundary, binding));
    INTERLACE_ASSIGN(int64_t forward, Largest(dims, kept_.memory.forward, binding));
    INTERLACE_ASSIGN(auto kept, Backward(kept_, binding));
    std::tie(cost.saved_kept, cost.work_backward) = kept;
    cost.work_forward = forward - cost.saved_kept;
    cost.saved_selective = cost.saved_full = cost.saved_kept;
    cost.work_backward_selective = cost.work_backward_full = cost.work_backward;
    if (role_ != Role::kBlock) return cost;
    INTERLACE_ASSIGN(auto selective, Backward(selective_, binding));
    std::tie(cost.saved_selective, cost.work_backward_selective) = selective;
    INTERLACE_ASSIGN(auto full, Backward(full_, binding));
    std::tie(cost.saved_full, cost.work_backward_full) = full;
    INTERLACE_ASSIGN(PassTimesUs selective_times, KernelTimes(selective_.program, binding, cluster));
    INTERLACE_ASSIGN(PassTimesUs full_times, KernelTimes(full_.program, binding, cluster));
    cost.recompute_selective_us = std::max(selective_times.backward - times.backward, 0.0);
    cost.recompute_full_us = std::max(full_times.backward - times.backward, 0.0);
    return cost;
  }

 private:
  // `mode` of the pass recompute, "" for none.
  static Result<Variant> Make(const Program& captured, const std::string& mode) {
    Variant out;
    out.program = captured.Clone();
    if (!mode.empty()) INTERLACE_TRY(Recompute(out.program, {{"mode", mode}}));
    INTERLACE_ASSIGN(out.memory, MemoryOfLayer(out.program));
    return out;
  }

  // Bytes saved between the passes, and the backward part's peak beyond them.
  static Result<std::pair<int64_t, int64_t>> Backward(const Variant& variant, const Binding& binding) {
    INTERLACE_ASSIGN(int64_t saved, variant.program.dims.Evaluate(variant.memory.saved, binding));
    INTERLACE_ASSIGN(int64_t peak, Largest(variant.program.dims, variant.memory.backward, binding));
    return std::pair(saved, std::max<int64_t>(peak - saved, 0));
  }

  Role role_ = Role::kBlock;
  Variant kept_, selective_, full_;
  int64_t parameters_ = 0, largest_ = 0;
};

class CapturedLayers : public LayerSource {
 public:
  CapturedLayers(int32_t blocks, const ClusterSpec& cluster, int64_t sequence)
      : blocks_(blocks), cluster_(cluster), sequence_(sequence) {}

  Status Prepare(ModelText& model) {
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
      INTERLACE_ASSIGN(layers_[role], Layer::Of(program, static_cast<Role>(role)));
    }
    return Ok{};
  }

  int32_t blocks() const override { return blocks_; }
  int32_t largest_tp() const override { return 1; }

  Result<LayerCost> Cost(Role role, int32_t micro_batch, int32_t tp) const override {
    if (micro_batch < 1) return MakeError("a micro-batch of ", micro_batch, " has no samples");
    if (tp != 1) return MakeError("tensor parallel over ", tp, " devices: this model's layers are cut over 1 at most");
    auto key = std::tuple(role, micro_batch, tp);
    {
      std::lock_guard lock(mutex_);
      auto found = known_.find(key);
      if (found != known_.end()) return found->second;
    }
    Binding binding{{"b", micro_batch}, {"s", sequence_}};
    INTERLACE_ASSIGN(LayerCost cost, layers_[static_cast<int>(role)].Cost(binding, cluster_));
    std::lock_guard lock(mutex_);
    known_.emplace(key, cost);
    return cost;
  }

 private:
  int32_t blocks_;
  ClusterSpec cluster_;
  int64_t sequence_;
  std::array<Layer, kRoles> layers_;
  mutable std::mutex mutex_;
  mutable std::map<std::tuple<Role, int32_t, int32_t>, LayerCost> known_;
};

}  // namespace

Result<std::unique_ptr<LayerSource>> ReadLayers(std::string_view model_text, std::string_view file, const ClusterSpec& cluster,
                                                int64_t sequence) {
  INTERLACE_ASSIGN(ModelText model, ReadModelText(model_text, file));
  auto layers = std::make_unique<CapturedLayers>(model.blocks, cluster, sequence);
  INTERLACE_TRY(layers->Prepare(model));
  return std::unique_ptr<LayerSource>(std::move(layers));
}

}  // namespace interlace::plan
