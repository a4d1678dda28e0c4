#include "passes/tensor/estimate.h"

#include <algorithm>
#include <map>
#include <string>

#include "cost/kernel_model.h"
#include "ir/op_table.h"
#include "passes/tensor/placement.h"

namespace interlace::tensor {
namespace {

constexpr double kUpdateBytes =
    7;  // AdamW reads the weight, its gradient and two moments, and writes all but the gradient

double TimeOf(const OpCost& cost) {
  return static_cast<double>(cost.latency_ps + cost.work_ps + cost.issue_ps + cost.finish_ps);
}

}  // namespace

Estimate::Estimate(const Folded& folded, const std::vector<Role>& roles, Steps& steps, const CutterOptions& options,
                   const PassCosts& costs)
    : folded_(folded),
      roles_(roles),
      steps_(steps),
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

Result<std::unique_ptr<Estimate>> Estimate::Create(const Folded& folded, const std::vector<Role>& roles, Steps& steps,
                                                   const CutterOptions& options, const PassCosts& costs) {
  std::unique_ptr<Estimate> out(new Estimate(folded, roles, steps, options, costs));
  INTERLACE_ASSIGN(CostModel model, costs.Model(out->variant_));
  out->model_ = std::make_unique<CostModel>(std::move(model));
  return out;
}

// The parameters that are cut, by their places in the program.
std::vector<std::pair<size_t, Held>> Estimate::CutBy(const Choices& choices) const {
  std::vector<std::pair<size_t, Held>> all;
  for (size_t i = 0; i < owner_.size(); ++i) {
    const auto [role, bias] = owner_[i];
    if (role < 0) continue;
    const Held& held = roles_[role].choices[static_cast<size_t>(choices[role])];
    if (held.dim < 0 || (bias >= 0 && roles_[role].biases[bias].dim != held.dim)) continue;
    all.emplace_back(i, Held{bias >= 0 ? 0 : held.dim, held.blocks});
  }
  return all;
}

Steps::Sum Estimate::Propagate(const std::vector<std::pair<size_t, Held>>& cuts) {
  variant_.TakeBack(folded_.program);
  for (Param& param : variant_.params) param.cuts.clear();
  const std::vector<OpId>& made = variant_.MicroBatchPhase()->ops;
  Cutter cutter(variant_, *variant_.MicroBatchPhase(), options_, &facts_);
  Steps::Sum sum;
  for (const auto& [i, held] : cuts) {
    Param& param = variant_.params[i];
    sum.impossible = !cutter.CutParam(param, held.dim, held.blocks).ok();
    if (sum.impossible) return sum;
    steps_.Begin(cutter, {param.value, held});
  }
  for (OpId id : cutter.Begin()) {
    const size_t first = made.size(), summed = cutter.sums_behind().size();
    const bool views = std::as_const(variant_).op(id).kind == OpKind::kView;
    if (!views) steps_.Meet(cutter, id, walker_);
    Steps::Left left;
    left.impossible = !cutter.Step(id).ok();
    for (size_t i = first; i < made.size() && !left.impossible; ++i) Cost(std::as_const(variant_).op(made[i]), left);
    if (cutter.sums_behind().size() > summed) left.summed_last = variant_.RootOf(cutter.sums_behind().back().second);
    if (!views) steps_.See(cutter, id, left, walker_);
    sum.Add(left);
    if (sum.impossible) break;
  }
  return sum;
}

void Estimate::Cost(const Op& op, Steps::Left& left) {
  if (IsWait(op)) return;
  const Result<OpCost> cost = model_->Cost(op);
  left.impossible = !cost.ok();
  if (left.impossible) return;
  (IsStart(op) ? left.transfers : left.compute) += TimeOf(*cost) * Times(op);
  if (op.kind != OpKind::kAllGatherStart) return;
  const ValueId root = variant_.RootOf(op.args[0].value);
  left.gathers_weight = left.gathers_weight || std::as_const(variant_).value(root).kind == ValueKind::kParam;
}

double Estimate::Times(const Op& op) const {
  if (op.module != kNone) return folded_.times[op.module];
  if (!IsStart(op)) return 1;
  // Of a gradient, which counts as often as the block that made it.
  const OpId def = std::as_const(variant_).value(variant_.RootOf(op.args[0].value)).def;
  const int32_t module = def == kNone ? kNone : std::as_const(variant_).op(def).module;
  return module == kNone ? 1 : folded_.times[module];
}

// One transfer for those gradients of all blocks that have a type.
double Estimate::SharedSums(const std::vector<ValueId>& gradients) {
  std::map<DType, double> bytes;
  for (ValueId root : gradients) {
    const Value& value = folded_.program.value(root);
    const Result<int64_t> size = folded_.program.StorageBytes(value.type);
    if (!size.ok() || !IsDense(facts_.layout.geometry[root])) return kNever;
    const int32_t module = value.def == kNone ? kNone : folded_.program.op(value.def).module;
    bytes[value.type.dtype] += static_cast<double>(*size) * (module == kNone ? 1 : folded_.times[module]);
  }
  double time = 0;
  for (const auto& one : bytes) {
    const Result<OpCost> cost = model_->CollectiveCost(Exchange::kAllReduce, options_.axis, one.second, 1);
    if (!cost.ok()) return kNever;
    time += TimeOf(*cost);
  }
  return time;
}

Estimate::Time Estimate::Of(const Choices& choices) {
  const std::vector<std::pair<size_t, Held>> cuts = CutBy(choices);
  std::optional<Steps::Sum> sum;
  if (!options_.regather) {  // which makes all copies go in the middle
    std::vector<Steps::Start> starts;
    for (const auto& [i, held] : cuts) starts.push_back({folded_.program.params[i].value, held});
    sum = steps_.Add(starts, walker_);
  }
  if (!sum) sum = Propagate(cuts);
  if (sum->impossible) return {kNever, false};
  sum->transfers += SharedSums(sum->summed_last);
  double data = 0;
  double held = 0, trained = 0;
  for (size_t r = 0; r < roles_.size(); ++r) {
    const bool cut = roles_[r].choices[static_cast<size_t>(choices[r])].dim >= 0;
    const auto parts = static_cast<double>(cut ? variant_.AxisSize(options_.axis) : 1);
    held += static_cast<double>(roles_[r].bytes) / parts;
    trained += static_cast<double>(roles_[r].trained_bytes) / parts;
  }
  double stepped = trained;
  for (const std::string& axis : data_axes_) {
    for (Exchange kind : {Exchange::kGather, Exchange::kGather, Exchange::kReduce}) {
      const Result<OpCost> cost = model_->CollectiveCost(kind, axis, kind == Exchange::kReduce ? trained : held, 1);
      if (cost.ok()) data += TimeOf(*cost);
    }
    stepped /= static_cast<double>(variant_.AxisSize(axis));
  }
  const double update =
      1e6 * KernelUs(costs_.cluster, {.kind = KernelWork::Kind::kMemory, .bytes = kUpdateBytes * stepped});
  return {sum->transfers + std::max(sum->compute, data) + update, sum->gathers_weight};
}

}  // namespace interlace::tensor
