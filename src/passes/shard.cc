// shard.cc — ZeRO-3: a rank keeps its shard of every parameter; a unit is gathered before each stretch of uses
// (forward, backward) and released after it; gradients are reduced to shards as soon as they are complete.
//   before: %9 = aten.mm(%x, %w) {fwd}                        grad(%w, %dw) {bwd}
//   after:  %f = gather.start(%shard) {fwd units=[u0]}         %r into %grad+0 = reduce.start(%g) {bwd units=[u0]}
//           gather.wait(%f) {fwd}                              ... just before the next reduce.start:
//           %w2 in %f+0 = view(%f) {fwd}                       reduce.wait(%r) {bwd}
//           %9 = aten.mm(%x, %w2) {fwd}                        release(%g) {bwd}
//           release(%f) {fwd}
// A unit whose uses `precision` marked is cast before it is gathered: %s: bf16[512] = copy(%shard), gather.start(%s).
// With ranks=1 parameters are resident and gradients are written into the state: no collective at all.
// Runs on a captured program, before accumulate and update. Sources: ZeRO (Rajbhandari et al.), DeepCompile
// section 4.1.
//
// With replicas=, ranks along other axes have the same shards (hybrid sharding). states=all cuts gradients and
// optimizer states over these too, as ZeRO++'s hierarchical partitioning (Wang et al., 2023) does: a gradient is
// reduce-scattered on, each replica makes the step of its part, and the parts are gathered after it, which may wait for
// the next step (reposition_update):
//   %r: f32[part] into %grad+0 = reduce.start(%g)          update(%shard+part*rank_replica, %grad, ...)
//                                                          gather.start(its part) into %shard {parts=true}
//
// Options: axis (dp), ranks, replicas (none), states=shard|all|auto, wait=next|now, ahead (1): so many gathers start
// before the one that is waited for. Error: the program has units, a parameter has symbolic sizes or gaps, or is
// changed in place; states=all where it cannot be.
#include <algorithm>
#include <deque>
#include <map>
#include <tuple>

#include "ir/op_table.h"
#include "passes/passes.h"
#include "passes/sharding.h"

namespace interlace {
namespace {

// The uses of one unit in the forward or the backward part of the phase, in one dtype.
struct Stretch {
  UnitId unit = kNone;
  int backward = 0;
  DType dtype = DType::kF32;
  int32_t first = 0, last = 0;  // indices of ops
  ValueId full = kNone;         // the gathered buffer
  OpId cast = kNone;            // of the shard, in front of a gather in another dtype
  OpId start = kNone, wait = kNone;
  std::vector<OpId> views = {};
};

class Gathers {
 public:
  Gathers(Program& program, PhaseEditor& edit, int64_t ahead)
      : program_(program), edit_(edit), ahead_(ahead), param_index_(ParamIndex(program)) {}

  void Run() {
    for (int32_t i = 0; i < edit_.size(); ++i) FindCast(edit_.op(i));
    int backward = 0;
    for (int32_t i = 0; i < edit_.size(); ++i) {
      Op& op = edit_.op(i);
      if (op.part == Part::kForward) backward = 0;
      if (op.part == Part::kBackward) backward = 1;
      Use(op, i, backward);
    }
    Emit();
  }

 private:
  // What a cast that can be made on the shard gives is the parameter in another dtype.
  void FindCast(const Op& op) {
    if (op.Attr(kOnShard) != nullptr) param_index_[op.results[0]] = ParamOfStorage(op.args[0].value);
  }

  int32_t ParamOfStorage(ValueId id) const {
    ValueId root = program_.RootOf(id);
    return root < static_cast<ValueId>(param_index_.size()) ? param_index_[root] : -1;
  }

  void Use(Op& op, int32_t index, int backward) {
    if (op.kind == OpKind::kGrad) {
      ValueId& value = op.args[1].value;  // its first operand only names the parameter
      if (ParamOfStorage(value) >= 0) value = Local(value, op, index, backward);
      return;
    }
    if (IsWait(op)) return ReadUntil(op, index);
    if (!AnyOperand(op, [&](ValueId id) { return ParamOfStorage(id) >= 0; })) return;
    if (IsPureView(program_, op) || op.Attr(kOnShard) != nullptr) {
      edit_.Remove(index);  // made again in each stretch, where it is used
      return;
    }
    ForEachOperand(op, [&](ValueId& id) {
      if (ParamOfStorage(id) >= 0) id = Local(id, op, index, backward);
    });
    if (op.kind == OpKind::kOutput) CopyOut(op, index);
  }

  // A gathered parameter that is sent on is read until the wait.
  void ReadUntil(const Op& wait, int32_t index) {
    ForEachOperand(wait, [&](ValueId id) {
      const OpId start = program_.value(id).def;
      if (start == kNone) return;
      ForEachOperand(std::as_const(program_).op(start), [&](ValueId source) {
        for (Stretch& stretch : stretches_) {
          if (stretch.full == program_.RootOf(source)) stretch.last = index;
        }
      });
    });
  }

  // The stand-in of a parameter or of a view of it within the stretch.
  ValueId Local(ValueId id, const Op& user, int32_t index, int backward) {
    const Param& param = program_.params[ParamOfStorage(id)];
    DType dtype = program_.value(program_.RootOf(id)).type.dtype;
    Stretch& stretch = StretchOf(param.unit, dtype, user, index, backward);
    stretch.last = index;
    auto [found, fresh] = locals_.try_emplace({stretch.full, id}, kNone);
    if (!fresh) return found->second;
    Op& view = AddLike(program_, user, OpKind::kView, {stretch.full});
    const Value& value = program_.value(id);
    int64_t start = OffsetIn(param.unit_offset, dtype, value.type.dtype);
    found->second = program_.AddView(view, value.type, stretch.full, program_.dims.Add(value.offset, Dim(start)));
    stretch.views.push_back(view.id);
    return found->second;
  }

  Stretch& StretchOf(UnitId id, DType dtype, const Op& user, int32_t index, int backward) {
    auto [found, fresh] = current_.try_emplace({id, dtype, backward}, static_cast<int32_t>(stretches_.size()));
    if (!fresh) return stretches_[found->second];
    const Unit& unit = program_.units[id];
    ValueId shard = program_.FindState(id, "shard");
    Stretch stretch{.unit = id, .backward = backward, .dtype = dtype, .first = index, .last = index};
    if (dtype != unit.dtype) {
      Op& cast = AddLike(program_, user, OpKind::kCopy, {shard});
      shard = program_.AddResult(cast, FlatType(dtype, unit.shard));
      stretch.cast = cast.id;
    }
    Op& start = AddLike(program_, user, OpKind::kGatherStart, {shard});
    start.units = {id};
    stretch.start = start.id;
    stretch.full = program_.AddResult(start, FlatType(dtype, unit.numel));
    stretch.wait = AddLike(program_, user, OpKind::kGatherWait, {stretch.full}).id;
    return stretches_.emplace_back(std::move(stretch));
  }

  // An output must outlive the gathered buffer.
  void CopyOut(Op& output, int32_t index) {
    Op& copy = AddLike(program_, output, OpKind::kCopy, {output.args[0].value});
    Type type = program_.value(output.args[0].value).type;
    type.strides.clear();
    output.args[0] = Arg::Of(program_.AddResult(copy, std::move(type)));
    copies_.emplace_back(index, copy.id);
  }

  // Stretches that begin at one op are one step; a step's gathers start `ahead` steps before it, within its part of the
  // phase and not before the buffer of the same unit's stretch in the other part has ended.
  void Emit() {
    std::vector<int32_t> steps;  // positions of first uses, by step
    std::vector<size_t> step_of(stretches_.size());
    std::vector<size_t> part_begin;
    for (size_t i = 0; i < stretches_.size(); ++i) {
      bool new_part = i == 0 || stretches_[i].backward != stretches_[i - 1].backward;
      if (new_part || steps.back() != stretches_[i].first) {
        steps.push_back(stretches_[i].first);
        part_begin.push_back(new_part ? steps.size() - 1 : part_begin.back());
      }
      step_of[i] = steps.size() - 1;
    }
    for (size_t i = 0; i < stretches_.size(); ++i) {
      const Stretch& stretch = stretches_[i];
      size_t step = step_of[i];
      auto back = static_cast<size_t>(std::min<int64_t>(ahead_, static_cast<int64_t>(step - part_begin[step])));
      int32_t position = steps[step - back];
      auto other = current_.find({stretch.unit, stretch.dtype, 1 - stretch.backward});
      if (other != current_.end()) {
        const Stretch& before = stretches_[other->second];
        if (before.first < stretch.first && before.last < stretch.first) position = std::max(position, before.last + 1);
      }
      if (stretch.cast != kNone) edit_.Before(position, stretch.cast);
      edit_.Before(position, stretch.start);
    }
    for (const Stretch& stretch : stretches_) {
      edit_.Before(stretch.first, stretch.wait);
      for (OpId view : stretch.views) edit_.Before(stretch.first, view);
      const Op& last = edit_.op(stretch.last);
      edit_.After(stretch.last, AddLike(program_, last, OpKind::kRelease, {stretch.full}).id);
    }
    for (auto [index, copy] : copies_) edit_.Before(index, copy);
  }

  Program& program_;
  PhaseEditor& edit_;
  int64_t ahead_;
  std::vector<int32_t> param_index_;  // by storage: a parameter, or a cast of it made on the shard
  std::deque<Stretch> stretches_;     // in the order of their first uses
  // By unit, dtype, forward (0) or backward (1): its stretch.
  std::map<std::tuple<UnitId, DType, int>, int32_t> current_;
  std::map<std::pair<ValueId, ValueId>, ValueId> locals_;  // (full buffer, value of the parameter's storage) -> view
  std::vector<std::pair<int32_t, OpId>> copies_;
};

// Why replicas cannot have parts of a shard, or should not; empty: they can.
std::string WhyNoParts(const Program& program, const ShardingOptions& sharding) {
  if (sharding.ranks < 2 || sharding.copies < 2) return "there is one rank along axis or replicas";
  const std::string axes = sharding.replicas + "," + sharding.axis;
  const std::vector<std::string_view> names = AxesOf(axes);
  const auto same = [](const Axis& axis, std::string_view name) { return axis.name == name; };
  if (std::search(program.mesh.begin(), program.mesh.end(), names.begin(), names.end(), same) == program.mesh.end() ||
      RowOf(program.mesh, axes) != sharding.ranks)
    return "axis does not come right behind replicas in the mesh";
  for (const Group& group : program.groups) {
    if (group.orthogonal || group.factored) return "an optimizer needs whole matrices";
  }
  for (const Param& param : program.params) {
    if (!param.shared.empty()) return "stages share '" + param.name + "'";
  }
  return "";
}

}  // namespace

Result<bool> Shard(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(ShardingOptions sharding, ReadShardingOptions(program, options));
  INTERLACE_ASSIGN(int64_t ahead, options.Int("ahead", 1, 0));
  INTERLACE_ASSIGN(const std::string states, options.Choice("states", {"shard", "all", "auto"}));
  INTERLACE_TRY(CheckShardable(program, sharding));
  const std::string why_not = states == "shard" ? "" : WhyNoParts(program, sharding);
  if (states == "all" && !why_not.empty())
    return MakeError("option states: not every replica can have a part of a shard's states: ", why_not);
  sharding.parts = states == "all" || (states == "auto" && why_not.empty());
  ForEachPhaseOfUnits(program, sharding, /*resident=*/false, [&](PhaseEditor& edit, const PhaseFacts& facts) {
    if (sharding.ranks > 1) Gathers(program, edit, ahead).Run();
    PlaceGradients(program, edit, facts, sharding, /*whole=*/false);
  });
  return true;
}

}  // namespace interlace
