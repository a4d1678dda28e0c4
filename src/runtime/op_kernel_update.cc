// Kernels of the exact norm and of the optimizers.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "runtime/allocator.h"
#include "runtime/kernels_aten.h"
#include "runtime/op_kernel.h"
#include "runtime/rule_loops.h"
#include "runtime/tier_bank.h"

namespace interlace {

namespace {

struct NormPartialKernel final : KernelData {
  std::vector<ValueId> operands;
  ValueId result;
  const Geometry* geometry;
  at::Tensor place;  // in the arena
  void Run(Frame& frame) {
    at::Tensor acc = place.defined() ? place.zero_() : Allocate(*geometry, frame.device, true);
    for (ValueId id : operands) NormPartial(frame.slots[id], acc);
    frame.slots[result] = std::move(acc);
  }
};

struct NormCoefKernel final : KernelData {
  ValueId operand, result;
  ValueId loss_scale = kNone;
  const Geometry* geometry;
  at::Tensor place;  // in the arena
  double max_norm = -1, scale = 1;
  void Run(Frame& frame) {
    at::Tensor out = place.defined() ? place : Allocate(*geometry, frame.device, true);
    const double too_large = loss_scale == kNone ? 1 : frame.slots[loss_scale].item<double>();
    const at::Tensor host = NormCoef(frame.slots[operand], max_norm, scale, out, too_large);
    const double* numbers = host.const_data_ptr<double>();
    frame.has_norm = true;
    frame.norm = numbers[0];
    frame.coef = numbers[1];
    frame.finite = numbers[2] != 0.0;
    if (!frame.finite && frame.options->skip_nonfinite) ++frame.counters.skipped_updates;
    frame.slots[result] = std::move(out);
  }
};

at::Tensor Slice(const at::Tensor& flat, int64_t begin, int64_t length) {
  if (!flat.defined() || (begin == 0 && length == flat.numel())) return flat;
  Geometry g;
  g.dtype = flat.scalar_type();
  g.sizes = {length};
  g.strides = {1};
  g.offset = flat.storage_offset() + begin;
  return MakeView(flat.storage(), g);
}

enum class Optimizer { kAdam, kAdamW, kSgd, kRule };

// Adjacent steps of a program on a device, which are given to it as one: a call of its own for each parameter takes as
// long as the smallest of them can, and the host's time. What they step stays where it is until the last has come;
// gradients are nobody's afterwards.
struct JoinedSteps {
  std::map<std::pair<int32_t, at::ScalarType>, AdamFlats> flats;  // by hyper-parameters and dtype
};

struct UpdateKernel final : KernelData {
  struct Range {
    int64_t begin, length;                   // elements of the flat operand
    int32_t group;                           // index into the hyper-parameters
    std::shared_ptr<const UpdateRule> rule;  // of the group
    std::vector<const RulePlace*> loops;     // of its forms, on the host
    std::vector<at::Tensor> sliced;          // per operand, when it is fixed
    // Of the form that a group's numbers name; nullptr: it has none, or not yet.
    RuleLoop LoopOf(const std::vector<double>& h) const {
      const RulePlace* const place = loops.empty() ? nullptr : loops[static_cast<size_t>(h[0])];
      return place == nullptr ? nullptr : place->load(std::memory_order_acquire);
    }
  };
  using Operands = std::array<at::Tensor, 2 + kMaxRuleStates>;  // w, g, states; undefined where there are fewer
  Optimizer optimizer;
  std::vector<ValueId> operands;
  bool clipped = false, pending = false;
  double scale = 1;
  std::shared_ptr<std::vector<Range>> ranges;  // of plans that are made anew, while a step on the host still runs
  TierBank* bank = nullptr;                    // of a step on the host
  bool on_device = false;
  std::shared_ptr<JoinedSteps> joined;  // with those beside it; nullptr: it is alone
  bool first = false, last = false;     // of them

  at::Tensor Operand(Frame& frame, const Range& range, size_t i) const {
    if (range.sliced[i].defined()) return range.sliced[i];
    return Slice(frame.slots[operands[i]], range.begin, range.length);
  }

  void Run(Frame& frame) {
    // Of a pending one the step before has decided: it runs only if it counts.
    if (!pending && frame.has_norm && !frame.finite && frame.options->skip_nonfinite) return;
    const double grad_scale = clipped ? scale * (pending ? frame.pending.coef : frame.coef) : scale;
    const std::vector<std::vector<double>>& hyper = pending ? frame.pending.hyper : *frame.hyper;
    if (bank != nullptr) {  // the numbers of this step go along: the job may still run when the next one has begun
      bank->StartStep(operands, [ranges = ranges, hyper, optimizer = optimizer, grad_scale, flats = operands.size()] {
        for (const Range& range : *ranges) {
          Operands x;
          std::copy(range.sliced.begin(), range.sliced.end(), x.begin());
          Step(optimizer, range, {x.data(), flats}, hyper[range.group], grad_scale);
        }
      });
      return;
    }
    const bool join = joined && !frame.one_by_one;
    if (join && first) joined->flats.clear();  // of a step that failed
    for (const Range& range : *ranges) {
      Operands x;
      for (size_t i = 0; i < operands.size(); ++i) x[i] = Operand(frame, range, i);
      if (join) {
        AdamFlats& flats = joined->flats[{range.group, x[0].scalar_type()}];
        for (const auto& [to, from] :
             {std::pair(&flats.w, 0), {&flats.g, 1}, {&flats.exp_avg, 2}, {&flats.exp_avg_sq, 3}})
          to->push_back(x[static_cast<size_t>(from)]);
        continue;
      }
      if (range.LoopOf(hyper[range.group]) != nullptr) ++frame.counters.looped_updates;
      Step(optimizer, range, {x.data(), operands.size()}, hyper[range.group], grad_scale);
    }
    if (!join || !last) return;
    const ArenaHook::Outside own;  // the places of what earlier ones stepped may be another's workspace by now
    for (const auto& [key, flats] : joined->flats)
      AdamStepOnDevice(flats, AdamArgsOf(optimizer, hyper[key.first], grad_scale), /*consume=*/true);
    joined->flats.clear();
  }

  bool CanJoin() const {
    const bool adam = optimizer == Optimizer::kAdam || optimizer == Optimizer::kAdamW;
    return on_device && adam && bank == nullptr && !pending;
  }

  static AdamArgs AdamArgsOf(Optimizer optimizer, const std::vector<double>& h, double grad_scale) {
    return {.lr = h[0],
            .beta1 = h[1],
            .beta2 = h[2],
            .eps = h[3],
            .weight_decay = h[4],
            .t = h[5],
            .maximize = h[6] != 0,
            .decoupled = optimizer == Optimizer::kAdamW,
            .grad_scale = grad_scale};
  }

  static void Step(Optimizer optimizer, const Range& range, std::span<const at::Tensor> x, const std::vector<double>& h,
                   double grad_scale) {
    if (optimizer == Optimizer::kRule) {
      const RuleForm& form = range.rule->forms[static_cast<size_t>(h[0])];
      RuleStep(form, x, std::span(h).subspan(1), grad_scale, range.LoopOf(h));
    } else if (optimizer == Optimizer::kSgd) {
      SgdStep(x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(),
              SgdArgs{.lr = h[0],
                      .momentum = h[1],
                      .dampening = h[2],
                      .weight_decay = h[3],
                      .t = h[5],
                      .nesterov = h[4] != 0,
                      .maximize = h[6] != 0,
                      .grad_scale = grad_scale});
    } else {
      AdamStep(x[0], x[1], x[2], x[3], AdamArgsOf(optimizer, h, grad_scale));
    }
  }
};

double NumberOr(const Arg* arg, double otherwise) {
  if (arg == nullptr) return otherwise;
  if (arg->kind == Arg::Kind::kInt) return static_cast<double>(arg->integer.value);
  return arg->kind == Arg::Kind::kFloat ? arg->real : otherwise;
}

// ranges=[start,end,group,...] of the unit, cut to [base, base + length) and merged where only padding (< 32 elements)
// lies between.
Result<std::vector<UpdateKernel::Range>> RangesOf(const BuildContext& context, const Op& op, int64_t base,
                                                  int64_t length) {
  const Arg* arg = op.Attr("ranges");
  if (!arg || arg->list.size() % 3 != 0) return OpError(context, op, "update needs ranges=[start,end,group,...]");
  struct Raw {
    int64_t begin, end, group;
  };
  std::vector<Raw> raw;
  for (size_t i = 0; i < arg->list.size(); i += 3) {
    const Raw r{arg->list[i].integer.value, arg->list[i + 1].integer.value, arg->list[i + 2].integer.value};
    if (r.begin < 0 || r.end < r.begin) return OpError(context, op, "a range of update ends before it begins");
    raw.push_back(r);
  }
  std::sort(raw.begin(), raw.end(), [](const Raw& a, const Raw& b) { return a.begin < b.begin; });
  std::vector<UpdateKernel::Range> ranges;
  for (const Raw& r : raw) {
    const int64_t begin = std::max(r.begin, base) - base, end = std::min(r.end, base + length) - base;
    if (begin >= end) continue;
    const auto position = context.group_position.find(static_cast<int32_t>(r.group));
    if (position == context.group_position.end())
      return OpError(context, op, "update names the group " + std::to_string(r.group) + ", which is not declared");
    // A rule might make something of the padding between them, which stays zero.
    if (!ranges.empty() && ranges.back().group == position->second && op.kind != OpKind::kUpdateRule) {
      UpdateKernel::Range& last = ranges.back();
      const int64_t gap = begin - (last.begin + last.length);
      if (gap >= 0 && gap < kUnitAlignment) {
        last.length = end - last.begin;
        continue;
      }
    }
    const int32_t rule = context.program.groups[position->second].rule;
    if (op.kind == OpKind::kUpdateRule && rule == kNone)
      return OpError(context, op, "group " + std::to_string(r.group) + " has no rule");
    std::shared_ptr<const UpdateRule> copy =
        rule == kNone ? nullptr : std::make_shared<const UpdateRule>(context.program.rules[rule]);
    ranges.push_back({begin, end - begin, position->second, std::move(copy), {}, {}});
  }
  return ranges;
}

// The operands of each range where they lie in the tier.
Status OnHost(const BuildContext& context, const Op& op, const std::vector<ValueId>& operands,
              std::vector<UpdateKernel::Range>& ranges) {
  for (ValueId id : operands) {
    if (!context.bank->Has(id)) return OpError(context, op, "%" + std::to_string(id) + " never goes out of memory");
    const Geometry& g = context.geometry[id];
    auto* const memory = static_cast<std::byte*>(context.bank->Memory(id));
    if (memory == nullptr) {
      return OpError(
          context, op,
          "an optimizer step on the host needs its states in host memory, and the tier is a folder; give tier=host");
    }
    const auto size = static_cast<int64_t>(c10::elementSize(g.dtype));
    for (UpdateKernel::Range& range : ranges) {
      range.sliced.push_back(
          at::from_blob(memory + range.begin * size, {range.length}, at::TensorOptions().dtype(g.dtype)));
    }
  }
  return Ok{};
}

}  // namespace

Result<Kernel> BuildUpdateKernel(const BuildContext& context, const Op& op) {
  INTERLACE_ASSIGN(std::vector<ValueId> operands, OperandsOf(op));
  if (op.kind == OpKind::kNormPartial) {
    if (op.results.size() != 1 || op.results[0] == kNone) return OpError(context, op, "norm.partial gives one result");
    auto kernel = std::make_unique<NormPartialKernel>();
    kernel->operands = operands;
    kernel->result = op.results[0];
    kernel->geometry = &context.geometry[op.results[0]];
    kernel->place = context.fixed[op.results[0]];
    if (kernel->geometry->elements != kNormLimbs || kernel->geometry->dtype != c10::ScalarType::Long) {
      return OpError(context, op, "norm.partial gives i64[68]");
    }
    return MakeKernel(std::move(kernel));
  }
  if (op.kind == OpKind::kNormCoef) {
    if (operands.empty() || operands.size() > 2 || op.results.size() != 1 || op.results[0] == kNone)
      return OpError(context, op, "norm.coef takes one or two values, gives one");
    auto kernel = std::make_unique<NormCoefKernel>();
    kernel->operand = operands[0];
    if (operands.size() == 2) kernel->loss_scale = operands[1];
    kernel->result = op.results[0];
    kernel->geometry = &context.geometry[op.results[0]];
    kernel->place = context.fixed[op.results[0]];
    if (kernel->geometry->elements != 3 || kernel->geometry->dtype != c10::ScalarType::Double) {
      return OpError(context, op, "norm.coef gives f64[3]");
    }
    kernel->max_norm = NumberOr(op.Attr("max_norm"), -1);
    kernel->scale = NumberOr(op.Attr("scale"), 1);
    return MakeKernel(std::move(kernel));
  }
  auto kernel = std::make_unique<UpdateKernel>();
  if (!IsUpdate(op)) return OpError(context, op, "this runtime does not have the op " + op.name + " yet");
  kernel->optimizer = op.kind == OpKind::kUpdateAdamW  ? Optimizer::kAdamW
                      : op.kind == OpKind::kUpdateAdam ? Optimizer::kAdam
                      : op.kind == OpKind::kUpdateRule ? Optimizer::kRule
                                                       : Optimizer::kSgd;
  const size_t flats = FlatOperands(op);
  if (operands.size() != flats && operands.size() != flats + 1)
    return OpError(context, op, op.name + " has the wrong number of operands");
  kernel->clipped = operands.size() == flats + 1;
  kernel->pending = IsPending(op);
  kernel->on_device = !context.device.is_cpu() && context.options.join_updates;
  operands.resize(flats);
  kernel->operands = operands;
  kernel->scale = NumberOr(op.Attr("scale"), 1);
  if (op.units.size() != 1) return OpError(context, op, op.name + " needs units=[u], one unit");
  const Unit& unit = context.program.units[op.units[0]];
  const Geometry& w = context.geometry[operands[0]];
  for (ValueId id : operands) {
    const Geometry& g = context.geometry[id];
    if (g.sizes.size() != 1 || g.elements != w.elements || !g.contiguous)
      return OpError(context, op, "operands of an update must be flat and of one length");
  }
  int64_t base = 0;
  if (w.elements != unit.numel) {
    if (w.elements != unit.own()) return OpError(context, op, "an update works on a unit's shard or its whole buffer");
    const auto along = [&](std::string_view axes) {  // this rank's index
      int64_t index = 0;
      for (std::string_view axis : AxesOf(axes)) {
        const auto rank = context.ranks.find("rank_" + std::string(axis));
        index = index * context.program.AxisSize(axis) + (rank == context.ranks.end() ? 0 : rank->second);
      }
      return index;
    };
    base = along(unit.axis) * unit.shard + (unit.parted() ? along(unit.replicas) * unit.part : 0);
  }
  INTERLACE_ASSIGN(std::vector<UpdateKernel::Range> ranges, RangesOf(context, op, base, w.elements));
  kernel->ranges = std::make_shared<std::vector<UpdateKernel::Range>>(std::move(ranges));
  const bool on_host = StepsOnHost(op);
  if (on_host) {
    INTERLACE_TRY(OnHost(context, op, operands, *kernel->ranges));
    kernel->bank = context.bank;
  }
  for (UpdateKernel::Range& range : *kernel->ranges) {
    if (kernel->optimizer == Optimizer::kRule && (on_host || context.device.is_cpu())) {
      const int states = static_cast<int>(operands.size()) - 2;
      for (const RuleForm& form : range.rule->forms) range.loops.push_back(PlaceOf(form, states, w.dtype));
    }
    for (ValueId id : operands) {
      if (on_host) break;
      range.sliced.push_back(context.is_fixed(id) ? Slice(context.fixed[id], range.begin, range.length) : at::Tensor());
    }
  }
  return MakeKernel(std::move(kernel));
}

bool JoinUpdates(KernelData* before, KernelData* after) {
  auto* const a = dynamic_cast<UpdateKernel*>(before);
  auto* const b = dynamic_cast<UpdateKernel*>(after);
  if (a == nullptr || b == nullptr || !a->CanJoin() || !b->CanJoin()) return false;
  if (a->optimizer != b->optimizer || a->clipped != b->clipped || a->scale != b->scale) return false;
  if (a->joined == nullptr) {
    a->joined = std::make_shared<JoinedSteps>();
    a->first = true;
  }
  a->last = false;
  b->joined = a->joined;
  b->last = true;
  return true;
}

}  // namespace interlace
