#include "passes/tensor/estimate.h"

#include <algorithm>
#include <map>
#include <string>

#include "cost/kernel_model.h"
#include "ir/op_table.h"

namespace interlace::tensor {
namespace {

constexpr double kUpdateBytes =
    7;  // AdamW reads the weight, its gradient and two moments, and writes all but the gradient

double TimeOf(const OpCost& cost) {
  return static_cast<double>(cost.latency_ps + cost.work_ps + cost.issue_ps + cost.finish_ps);
}

}  // namespace

Estimate::Estimate(const Folded& folded, const std::vector<Role>& roles, const CutterOptions& options,
                   const PassCosts& costs)
    : folded_(folded),
      roles_(roles),
      options_(options),
      costs_(costs),
      facts_(FactsOf(folded.program, *folded.program.MicroBatchPhase(), Constant)),
      variant_(folded.program.Clone()) {
  std::map<std::string, std::pair<int32_t, int32_t>> owner;
  for (size_t r = 0; r < roles.size(); ++r) {
    for (const std::string& name : roles[r].names) owner[name] = {static_cast<int32_t>(r), -1};
    for (size_t b = 0; b < roles[r].biases.size(); ++b) {
      for (const std::string& name : roles[r].biases[b].names)
        owner[name] = {static_cast<int32_t>(r), static_cast<int32_t>(b)};
    }
  }
  for (const Param& param : variant_.params) {
    const auto it = owner.find(param.name);
    owner_.push_back(it == owner.end() ? std::pair<int32_t, int32_t>{-1, -1} : it->second);
  }
  for (const Axis& axis : variant_.mesh) {
    if (axis.name != options.axis && axis.size > 1) data_axes_.push_back(axis.name);
  }
  variant_.Track();
}

Result<std::unique_ptr<Estimate>> Estimate::Create(const Folded& folded, const std::vector<Role>& roles,
                                                   const CutterOptions& options, const PassCosts& costs) {
  std::unique_ptr<Estimate> out(new Estimate(folded, roles, options, costs));
  INTERLACE_ASSIGN(CostModel model, costs.Model(out->variant_));
  out->model_ = std::make_unique<CostModel>(std::move(model));
  return out;
}

Status Estimate::Propagate(const Choices& choices) {
  variant_.TakeBack(folded_.program);
  for (Param& param : variant_.params) param.cuts.clear();
  Cutter cutter(variant_, *variant_.MicroBatchPhase(), options_, &facts_);
  for (size_t i = 0; i < variant_.params.size(); ++i) {
    const auto [role, bias] = owner_[i];
    if (role < 0) continue;
    const Held& held = roles_[role].choices[static_cast<size_t>(choices[role])];
    if (held.dim < 0 || (bias >= 0 && roles_[role].biases[bias].dim != held.dim)) continue;
    INTERLACE_TRY(cutter.CutParam(variant_.params[i], bias >= 0 ? 0 : held.dim, held.blocks));
  }
  return cutter.Run();
}

double Estimate::Times(const Op& op) const {
  if (op.module != kNone) return folded_.times[op.module];
  if (!IsStart(op)) return 1;
  // Of a gradient, which counts as often as the block that made it.
  const OpId def = variant_.value(variant_.RootOf(op.args[0].value)).def;
  return def == kNone || variant_.op(def).module == kNone ? 1 : folded_.times[variant_.op(def).module];
}

// One transfer for the gradients of all blocks: each operand counts as often as its block.
double Estimate::SharedSums(const Op& op) {
  double bytes = 0;
  ForEachOperand(op, [&](ValueId operand) {
    const Value& root = std::as_const(variant_).value(variant_.RootOf(operand));
    const int32_t module = root.def == kNone ? kNone : std::as_const(variant_).op(root.def).module;
    const Result<int64_t> size = variant_.StorageBytes(root.type);
    bytes += (size.ok() ? static_cast<double>(*size) : 0) * (module == kNone ? 1 : folded_.times[module]);
  });
  const Result<OpCost> cost = model_->CollectiveCost(Exchange::kAllReduce, options_.axis, bytes, 1);
  return cost.ok() ? TimeOf(*cost) : kNever;
}

Estimate::Time Estimate::Of(const Choices& choices) {
  if (!Propagate(choices).ok()) return {kNever, false};
  double compute = 0, transfers = 0, data = 0;
  bool gathers = false;
  for (OpId id : variant_.MicroBatchPhase()->ops) {
    const Op& op = std::as_const(variant_).op(id);
    if (IsWait(op)) continue;
    if (op.kind == OpKind::kAllReduceStart && op.module == kNone && op.args.size() > 1) {
      transfers += SharedSums(op);
      continue;
    }
    const Result<OpCost> cost = model_->Cost(op);
    if (!cost.ok()) return {kNever, false};
    const double time = TimeOf(*cost) * Times(op);
    (IsStart(op) ? transfers : compute) += time;
    if (op.kind != OpKind::kAllGatherStart) continue;
    const ValueId root = variant_.RootOf(op.args[0].value);
    gathers = gathers || std::as_const(variant_).value(root).kind == ValueKind::kParam;
  }
  double held = 0;
  for (size_t r = 0; r < roles_.size(); ++r) {
    const bool cut = roles_[r].choices[static_cast<size_t>(choices[r])].dim >= 0;
    held += static_cast<double>(roles_[r].bytes) / static_cast<double>(cut ? variant_.AxisSize(options_.axis) : 1);
  }
  double sharded = held;
  for (const std::string& axis : data_axes_) {
    for (Exchange kind : {Exchange::kGather, Exchange::kGather, Exchange::kReduce}) {
      const Result<OpCost> cost = model_->CollectiveCost(kind, axis, held, 1);
      if (cost.ok()) data += TimeOf(*cost);
    }
    sharded /= static_cast<double>(variant_.AxisSize(axis));
  }
  const double update =
      1e6 * KernelUs(costs_.cluster, {.kind = KernelWork::Kind::kMemory, .bytes = kUpdateBytes * sharded});
  return {transfers + std::max(compute, data) + update, gathers};
}

}  // namespace interlace::tensor
