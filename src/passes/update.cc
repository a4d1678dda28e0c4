// update.cc — adds the phase `update`: the optimizer step of every unit that has a gradient, on its shard or on the
// whole.
//   before: group 0 adamw                      states u0.shard, u0.grad
//   after:  state %8: f32[512] u0.exp_avg persistent   (and exp_avg_sq; momentum for sgd)
//           phase update once takes () gives () {
//             %9: i64[68] = norm.partial(%grad, ...) {upd units=[u0,...]}       with clip=
//             %10: i64[68] = all_reduce.start(%9) {upd axis=dp}                 when every rank has a part only
//             all_reduce.wait(%10) {upd}
//             %11: f64[3] = norm.coef(%10) {upd max_norm=1.0 scale=0.5}
//             update.adamw(%shard, %grad, %8, %7, %11) {upd units=[u0] scale=0.5 ranges=[0,1000,0]}
//           }
// A program with the buffer "interlace.loss_scale" has gradients that are so many times too large: norm.coef takes it
// too. scale = 1 / (ranks * micro-batches) makes the mean of the summed gradients. After zero1 each rank updates its
// own part of u0.full and the parts are gathered in place, as are those of a shard whose replicas have a part each.
// Groups whose step needs whole parameters have rounds of their own behind the others (update_matrices.h,
// update_factors.h). Runs after accumulate; a program without open symbols is scheduled then.
//
// Options: clip=X|none (none), norm=auto|always (auto: only when clipping), momentum=true|false (true: sgd gets a
// buffer). Error: no units, an update phase already, a trainable parameter without a group, a unit with two kinds of
// optimizer.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include "base/suggest.h"
#include "ir/op_table.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"
#include "passes/stages/recut.h"
#include "passes/update_factors.h"
#include "passes/update_matrices.h"
#include "passes/update_ops.h"

namespace interlace {
namespace {

// The buffer that capture multiplies the seed of backward by.
constexpr std::string_view kLossScale = "interlace.loss_scale";

// A unit with a gradient, and where its weights and gradient lie.
struct Target {
  UnitId unit = kNone;
  std::string_view optimizer;
  ValueId weights = kNone;  // shard or full
  ValueId grad = kNone;
  bool own_part = false;             // of the weights the gradient has a part: of whole ones, or of a parted shard
  std::vector<const Param*> params;  // with a gradient, by offset
  std::vector<int64_t> shared;       // stages that have the unit too; empty: none
};

class Builder : UpdateOps {
 public:
  Builder(Program& program, Phase& phase, std::optional<double> clip, bool norm, bool momentum)
      : UpdateOps(program, phase), clip_(clip), norm_(norm), momentum_(momentum) {}

  Result<bool> Run() {
    if (program_.UpdatePhase() != nullptr) return MakeError("the program has an update phase already");
    INTERLACE_TRY(FindTargets());
    for (const Buffer& buffer : program_.buffers) {
      if (buffer.name == kLossScale) loss_scale_ = buffer.value;
    }
    for (Target& target : targets_) {
      if (!target.shared.empty()) INTERLACE_TRY(AddStages(target));
    }
    norm_ = norm_ || loss_scale_ != kNone;  // its coefficient undoes the scale, and says whether the step counts
    ValueId coef = kNone;
    if (norm_ && !targets_.empty()) {
      INTERLACE_ASSIGN(coef, Norm());
    }
    std::vector<MatrixUpdate> matrices;
    std::vector<FactoredUpdate> factored;
    for (const Target& target : targets_) {
      const Group& group = program_.groups[target.params[0]->group];
      if (group.orthogonal) {
        INTERLACE_TRY(AddMatrix(target, matrices));
      } else if (group.factored) {
        INTERLACE_TRY(AddFactored(target, factored));
      } else {
        Gather(target, UpdateUnit(target, coef));
      }
    }
    const auto updated = [&](const auto& done) {
      Gather(*std::find_if(targets_.begin(), targets_.end(), [&](const Target& t) { return t.unit == done.unit; }),
             done.weights);
    };
    INTERLACE_TRY(AddMatrixUpdates(program_, phase_, matrices, coef, updated));
    INTERLACE_TRY(AddFactoredUpdates(program_, phase_, factored, coef, updated));
    if (gathering_ != kNone) Add(OpKind::kGatherWait).args = {Arg::Of(gathering_)};
    if (!program_.order.empty()) program_.order.push_back({phase_.name});
    program_.phases.push_back(std::move(phase_));
    if (program_.symbols.empty()) program_.level = Level::kScheduled;
    return true;
  }

 private:
  Status FindTargets() {
    std::map<std::pair<UnitId, std::string_view>, ValueId> states;
    for (const State& state : program_.states) states[{state.unit, state.role}] = state.value;
    auto find = [&](UnitId unit, std::string_view role) {
      auto found = states.find({unit, role});
      return found == states.end() ? kNone : found->second;
    };
    std::map<int32_t, std::string_view> optimizer;
    for (const Group& group : program_.groups) {
      constexpr std::array<std::string_view, 4> kKnown = {"adamw", "adam", "sgd", "rule"};
      if (std::find(kKnown.begin(), kKnown.end(), group.optimizer) == kKnown.end()) {
        return MakeError("group ", group.id, " has the optimizer '", group.optimizer,
                         "', expected adamw, adam, sgd or rule",
                         DidYouMean(group.optimizer, {kKnown.begin(), kKnown.end()}));
      }
      optimizer[group.id] = group.optimizer;
    }
    std::map<UnitId, Target> by_unit;
    for (const Param& param : program_.params) {
      ValueId grad = param.unit == kNone ? kNone : find(param.unit, "grad");
      if (!param.trainable || grad == kNone) continue;
      auto group = optimizer.find(param.group);
      if (group == optimizer.end()) {
        return MakeError("parameter '", param.name,
                         "' is trainable but in no optimizer group; give it to the optimizer or freeze it");
      }
      Target& target = by_unit[param.unit];
      if (!target.params.empty() && target.optimizer != group->second) {
        return MakeError("unit u", param.unit, " mixes parameters of ", target.optimizer, " and ", group->second);
      }
      if (!target.params.empty() && target.shared != param.shared)
        return MakeError("unit u", param.unit, " mixes parameters of different stages");
      if (!target.params.empty() && group->second == "rule" &&
          RuleOf(param.group)->states != RuleOf(target.params[0]->group)->states) {
        return MakeError("unit u", param.unit, " mixes parameters of rules with different states");
      }
      target.unit = param.unit;
      target.shared = param.shared;
      target.optimizer = group->second;
      target.grad = grad;
      target.params.push_back(&param);
    }
    for (auto& [unit, target] : by_unit) {
      ValueId shard = find(unit, "shard");
      target.weights = shard != kNone ? shard : find(unit, "full");
      if (target.weights == kNone) return MakeError("unit u", unit, " has neither a state 'shard' nor 'full'");
      target.own_part = !(program_.value(target.weights).type == program_.value(target.grad).type);
      std::sort(target.params.begin(), target.params.end(),
                [](auto* a, auto* b) { return a->unit_offset < b->unit_offset; });
      targets_.push_back(std::move(target));
    }
    return Ok{};
  }

  // Of stages with unlike ranks those that make the loss say over how many the mean is.
  double Scale(UnitId unit) const {
    int64_t ranks = program_.DataRanks(program_.units[unit]);
    if (const std::string* text = program_.Meta(stages::kStagesMean))
      std::from_chars(text->data(), text->data() + text->size(), ranks);
    return 1.0 / (static_cast<double>(ranks) * static_cast<double>(program_.accumulation));
  }

  static Type Limbs() { return FlatType(DType::kI64, kNormLimbs); }

  // Where the axis of the stages has every rank: the sum of a stage counts on its first rank only.
  ValueId OnFirst(ValueId limbs) {
    const StageOf& stage = *program_.stage;
    const int64_t ranks = stage.unlike() ? stage.ranks[static_cast<size_t>(stage.index)] : 1;
    if (ranks == 1) return limbs;
    DimTable& dims = program_.dims;
    const Dim last = Dim(stage.First(stage.index) + ranks - 1);
    const Dim first = dims.FloorDiv(dims.Sub(last, dims.Symbol("rank_" + stage.axis)), Dim(ranks - 1));  // 1 or 0
    return Aten("mul.Scalar", {Arg::Of(limbs), Arg::Int(first)}, Limbs());
  }

  // The gradient of a unit that stages share: each sends its own to the others, and all add them up in their order.
  Status AddStages(Target& target) {
    std::optional<stages::Recut> recut;  // stages of unlike ranks: each element goes to the ranks that have it there
    if (program_.stage->unlike()) {
      INTERLACE_ASSIGN(recut, stages::Recut::Of(program_));
      const int64_t ranks = recut->data(program_.stage->index), all = program_.units[target.unit].numel;
      if (!(program_.value(target.grad).type.sizes[0] == Dim(all / ranks)))
        return MakeError("'", target.params[0]->name,
                         "' is on several stages of unlike ranks, which exchange shards of its gradient; give stage ",
                         program_.stage->index, " the strategy zero1 or shard");
    }

    const Type type = program_.value(target.grad).type;
    const int64_t mine = program_.stage->index;
    std::vector<ValueId> tokens, arriving;
    std::vector<std::vector<ValueId>> parts;  // by stage: pieces of this rank's elements, one behind the other
    for (const int64_t peer : target.shared) {
      parts.emplace_back();
      if (peer == mine) {
        parts.back().push_back(target.grad);
        continue;
      }
      const int64_t pieces = recut ? recut->Pieces(mine, peer) : 1, width = recut ? recut->Width(mine, peer) : 1;
      const int64_t size = type.sizes[0].value / pieces;
      const auto parts_of = [&](int64_t from, int64_t to) {  // of a piece; 1: every rank along tp sends all of it
        const int64_t count = recut ? recut->Parts(from, to) : 1;
        return size % count == 0 ? count : 1;
      };
      const int64_t sent = parts_of(mine, peer), come = parts_of(peer, mine);
      const auto address = [&](Op& op, int64_t number) {
        op.SetAttr("axis", Arg::Word(program_.stage->axis));
        op.SetAttr("peer", Arg::Int(recut ? recut->Peer(program_.dims, mine, peer, number) : Dim(peer)));
        op.SetAttr("message", Arg::String("grad of " + target.params[0]->name));
      };
      for (int64_t number = 0; number < pieces * width; ++number) {
        ValueId value = target.grad;
        Dim at = Dim(size * (number / width));
        if (sent > 1)
          at = program_.dims.Add(at, program_.dims.Mul(recut->PartOf(program_.dims, mine), Dim(size / sent)));
        if (pieces * sent > 1) value = View(target.grad, FlatType(type.dtype, size / sent), at);
        Op& send = Add(OpKind::kSendStart);
        send.args = {Arg::Of(value)};
        address(send, number);
        tokens.push_back(program_.AddResult(send, FlatType(DType::kB8, 0)));
        Op& receive = Add(OpKind::kRecvStart);
        address(receive, number);
        arriving.push_back(program_.AddResult(receive, FlatType(type.dtype, size / come)));
        if (come > 1 || number % width == 0) parts.back().push_back(arriving.back());
      }
    }
    for (const ValueId part : arriving) Add(OpKind::kRecvWait).args = {Arg::Of(part)};
    for (const ValueId token : tokens) Add(OpKind::kSendWait).args = {Arg::Of(token)};
    std::vector<ValueId> whole;
    for (const std::vector<ValueId>& pieces : parts) {
      whole.push_back(pieces[0]);
      if (pieces.size() == 1) continue;
      std::vector<Arg> all;
      for (const ValueId piece : pieces) all.push_back(Arg::Of(piece));
      whole.back() = Aten("cat", {Arg::List(std::move(all)), Arg::Int(Dim(0))}, type);
    }
    ValueId sum = whole[0];
    for (size_t i = 1; i < whole.size(); ++i) sum = Aten("add.Tensor", {Arg::Of(sum), Arg::Of(whole[i])}, type);
    target.grad = sum;
    return Ok{};
  }

  // Sums the squares of all gradients. Units whose elements differ along the same axes have one sum, which the ranks
  // along these axes add up; along the others all have the same, and it counts once. These sums are added to one
  // another. Those of stages are added up in the end, what they share by the first that has it.
  Result<ValueId> Norm() {
    std::vector<std::pair<std::vector<std::string_view>, std::vector<const Target*>>> sets;
    for (const Target& target : targets_) {
      if (!target.shared.empty() && target.shared[0] != program_.stage->index) continue;
      const Unit& unit = program_.units[target.unit];
      const int64_t elements = program_.value(target.grad).type.sizes[0].value;
      const std::vector<std::string_view> axes = program_.AxesOfElements(unit, elements);
      auto set = std::find_if(sets.begin(), sets.end(), [&](const auto& entry) { return entry.first == axes; });
      if (set == sets.end()) set = sets.insert(sets.end(), {axes, {}});
      set->second.push_back(&target);
      if (Scale(unit.id) != Scale(targets_[0].unit)) {
        return MakeError("u", unit.id, " and u", targets_[0].unit,
                         " average their gradients over different numbers of ranks, and a norm has one scale for all");
      }
    }
    ValueId total = kNone;
    for (const auto& [axes, members] : sets) {
      Op& partial = Add(OpKind::kNormPartial);
      for (const Target* target : members) {
        partial.args.push_back(Arg::Of(target->grad));
        partial.units.push_back(target->unit);
      }
      ValueId sum = program_.AddResult(partial, Limbs());
      for (std::string_view axis : axes) sum = SumOver(axis, sum);
      total = total == kNone ? sum : Aten("add.Tensor", {Arg::Of(total), Arg::Of(sum)}, Limbs());
    }
    if (total == kNone)
      return MakeError("every parameter of stage ", program_.stage->index, " is another stage's, too");
    if (program_.stage) total = SumOver(program_.stage->axis, OnFirst(total));
    Op& coef = Add(OpKind::kNormCoef);
    coef.args = {Arg::Of(total)};
    if (loss_scale_ != kNone) coef.args.push_back(Arg::Of(loss_scale_));
    coef.SetAttr("max_norm", clip_ ? Arg::Float(*clip_) : Arg::None());
    coef.SetAttr("scale", Arg::Float(Scale(targets_[0].unit)));
    return program_.AddResult(coef, FlatType(DType::kF64, 3));
  }

  const UpdateRule* RuleOf(int32_t group) const {
    const int32_t rule = program_.groups[group].rule;
    return rule == kNone ? nullptr : &program_.rules[rule];
  }

  ValueId AddOptimizerState(const Target& target, std::string role) {
    return program_.AddState(target.unit, std::move(role), program_.value(target.grad).type, /*persistent=*/true);
  }

  // What a unit's step changes: the state, or this rank's part of it.
  ValueId OwnWeights(const Target& target) {
    if (!target.own_part) return target.weights;
    const Unit& unit = program_.units[target.unit];
    const Dim own = program_.dims.Mul(Dim(unit.own()), program_.AxisRank(unit.parted() ? unit.replicas : unit.axis));
    return View(target.weights, FlatType(unit.dtype, unit.own()), own);
  }

  // Brings the parts that other ranks have updated: where the weights are whole, or, of a shard, its replicas'.
  void Gather(const Target& target, ValueId own) {
    if (!target.own_part) return;
    if (gathering_ != kNone) Add(OpKind::kGatherWait).args = {Arg::Of(gathering_)};
    Op& gather = Add(OpKind::kGatherStart);
    gather.units = {target.unit};
    if (program_.units[target.unit].parted()) gather.SetAttr(kParts, Arg::Bool(true));
    gather.args = {Arg::Of(own)};
    gathering_ = program_.AddPlaced(gather, program_.value(target.weights).type, target.weights, Dim(0));
  }

  Status CheckUncut(const Param& param) const {
    if (param.cuts.empty()) return Ok{};
    return MakeError("the mesh cuts parameter '", param.name, "' along ", param.cuts[0].axis, ", and ",
                     RuleOf(param.group)->name, " needs whole matrices; train on a mesh without ", param.cuts[0].axis,
                     ", or give this parameter to another optimizer");
  }

  Status AddFactored(const Target& target, std::vector<FactoredUpdate>& updates) {
    const Param& param = *target.params[0];
    const std::vector<Dim>& sizes = program_.value(param.value).type.sizes;
    if (target.params.size() != 1 || !std::all_of(sizes.begin(), sizes.end(), [](Dim d) { return d.is_const(); }))
      return MakeError("parameter '", param.name, "' is not in a unit of its own, which ", RuleOf(param.group)->name,
                       " needs");
    INTERLACE_TRY(CheckUncut(param));
    FactoredUpdate update{.unit = target.unit,
                          .param = &param,
                          .weights = OwnWeights(target),
                          .grad = target.grad,
                          .columns = sizes.empty() ? 1 : sizes.back().value,
                          .scale = Scale(target.unit)};
    if (sizes.size() > 1) update.rows = sizes[sizes.size() - 2].value;
    for (size_t i = 0; i + 2 < sizes.size(); ++i) update.batches *= sizes[i].value;
    updates.push_back(update);
    return Ok{};
  }

  Status AddMatrix(const Target& target, std::vector<MatrixUpdate>& matrices) {
    const Param& param = *target.params[0];
    const Unit& unit = program_.units[target.unit];
    const std::vector<Dim>& sizes = program_.value(param.value).type.sizes;
    if (target.params.size() != 1 || sizes.size() != 2 || !sizes[0].is_const() || !sizes[1].is_const())
      return MakeError("parameter '", param.name, "' is not a matrix in a unit of its own, which ",
                       RuleOf(param.group)->name, " needs");
    INTERLACE_TRY(CheckUncut(param));
    if (AxesOf(unit.axis).size() != 1)
      return MakeError(RuleOf(param.group)->name, " deals its matrices along one axis of the mesh, not along ",
                       unit.axis);
    matrices.push_back({.unit = target.unit,
                        .param = &param,
                        .weights = OwnWeights(target),
                        .grad = target.grad,
                        .momentum = AddOptimizerState(target, RuleOf(param.group)->states.at(0)),
                        .rows = sizes[0].value,
                        .columns = sizes[1].value,
                        .scale = Scale(target.unit)});
    return Ok{};
  }

  // Returns the weights that were updated: the state or this rank's part of it.
  ValueId UpdateUnit(const Target& target, ValueId coef) {
    const Unit& unit = program_.units[target.unit];
    const ValueId weights = OwnWeights(target);
    Op& op = Add(UpdateOf(target.optimizer));
    op.units = {unit.id};
    op.args = {Arg::Of(weights), Arg::Of(target.grad)};
    if (target.optimizer == "rule") {
      const UpdateRule& rule = *RuleOf(target.params[0]->group);
      std::vector<Arg> names;
      for (const std::string& state : rule.states) {
        op.args.push_back(Arg::Of(AddOptimizerState(target, state)));
        names.push_back(Arg::Word(state));
      }
      op.SetAttr("rule", Arg::String(rule.name));
      op.SetAttr("states", Arg::List(std::move(names)));
    } else if (target.optimizer != "sgd") {
      op.args.push_back(Arg::Of(AddOptimizerState(target, "exp_avg")));
      op.args.push_back(Arg::Of(AddOptimizerState(target, "exp_avg_sq")));
    } else if (momentum_) {
      op.args.push_back(Arg::Of(AddOptimizerState(target, "momentum")));
      op.SetAttr("momentum", Arg::Bool(true));
    }
    if (coef != kNone) op.args.push_back(Arg::Of(coef));
    op.SetAttr("scale", Arg::Float(Scale(unit.id)));
    std::vector<Arg> ranges;
    for (const Param* param : target.params) {
      Dim count = program_.NumElements(program_.value(param->value).type);
      ranges.push_back(Arg::Int(param->unit_offset));
      ranges.push_back(Arg::Int(program_.dims.Add(count, Dim(param->unit_offset))));
      ranges.push_back(Arg::Int(param->group));
    }
    op.SetAttr("ranges", Arg::List(std::move(ranges)));
    return weights;
  }

  std::optional<double> clip_;
  bool norm_, momentum_;
  ValueId loss_scale_ = kNone;
  ValueId gathering_ = kNone;    // the last gather that nothing waits for yet
  std::vector<Target> targets_;  // by unit
};

}  // namespace

Result<bool> Update(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(std::optional<double> clip, options.PositiveOrNone("clip"));
  INTERLACE_ASSIGN(const std::string norm, options.Choice("norm", {"auto", "always"}));
  INTERLACE_ASSIGN(const std::string momentum, options.Choice("momentum", {"true", "false"}));
  Phase phase;
  phase.name = "update";
  phase.kind = PhaseKind::kStep;
  return Builder(program, phase, clip, clip.has_value() || norm == "always", momentum == "true").Run();
}

}  // namespace interlace
