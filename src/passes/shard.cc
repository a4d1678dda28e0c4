#include "passes/shard.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "passes/sharding.h"

namespace interlace {
namespace {

// The uses of one unit in the forward or the backward part of the phase.
struct Stretch {
  UnitId unit = kNone;
  int backward = 0;
  int32_t first = 0, last = 0;  // indices of ops
  ValueId full = kNone;         // the gathered buffer
  OpId start = kNone, wait = kNone;
  std::vector<OpId> views;
};

class Gathers {
 public:
  Gathers(Program& program, PhaseEditor& edit, int64_t ahead)
      : program_(program),
        edit_(edit),
        ahead_(ahead),
        param_index_(ParamIndex(program)),
        current_(program.units.size(), {-1, -1}) {}

  void Run() {
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
  int32_t ParamOfStorage(ValueId id) const {
    ValueId root = program_.RootOf(id);
    return root < static_cast<ValueId>(param_index_.size()) ? param_index_[root] : -1;
  }

  void Use(Op& op, int32_t index, int backward) {
    if (op.name == "grad") {
      ValueId& value = op.args[1].value;  // its first operand only names the parameter
      if (ParamOfStorage(value) >= 0) value = Local(value, op, index, backward);
      return;
    }
    bool of_param = false;
    ForEachOperand(op, [&](ValueId& id) { of_param = of_param || ParamOfStorage(id) >= 0; });
    if (!of_param) return;
    if (IsPureView(program_, op)) {
      edit_.Remove(index);  // made again in each stretch, where it is used
      return;
    }
    ForEachOperand(op, [&](ValueId& id) {
      if (ParamOfStorage(id) >= 0) id = Local(id, op, index, backward);
    });
    if (op.name == "output") CopyOut(op, index);
  }

  // The stand-in of a parameter or of a view of it within the stretch.
  ValueId Local(ValueId id, const Op& user, int32_t index, int backward) {
    const Param& param = program_.params[ParamOfStorage(id)];
    Stretch& stretch = StretchOf(param.unit, user, index, backward);
    stretch.last = index;
    auto [found, fresh] = locals_.try_emplace({stretch.full, id}, kNone);
    if (!fresh) return found->second;
    Op& view = program_.AddOp("view");
    CopyTags(user, view);
    view.args.push_back(Arg::Of(stretch.full));
    const Value& value = program_.value(id);
    int64_t start = OffsetIn(param.unit_offset, program_.units[param.unit].dtype, value.type.dtype);
    found->second = program_.AddView(view, value.type, stretch.full, program_.dims.Add(value.offset, Dim(start)));
    stretch.views.push_back(view.id);
    return found->second;
  }

  Stretch& StretchOf(UnitId id, const Op& user, int32_t index, int backward) {
    int32_t& current = current_[id][backward];
    if (current >= 0) return stretches_[current];
    current = static_cast<int32_t>(stretches_.size());
    const Unit& unit = program_.units[id];
    Op& start = program_.AddOp("gather.start");
    CopyTags(user, start);
    start.units = {id};
    start.args.push_back(Arg::Of(program_.FindState(id, "shard")));
    ValueId full = program_.AddResult(start, FlatType(unit.dtype, unit.numel));
    OpId wait = Ending("gather.wait", user, full);
    return stretches_.emplace_back(Stretch{id, backward, index, index, full, start.id, wait, {}});
  }

  OpId Ending(std::string name, const Op& tags, ValueId full) {
    Op& op = program_.AddOp(std::move(name));
    CopyTags(tags, op);
    op.args.push_back(Arg::Of(full));
    return op.id;
  }

  // An output must outlive the gathered buffer.
  void CopyOut(Op& output, int32_t index) {
    Op& copy = program_.AddOp("copy");
    CopyTags(output, copy);
    Type type = program_.value(output.args[0].value).type;
    type.strides.clear();
    copy.args.push_back(output.args[0]);
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
      int32_t other = current_[stretch.unit][1 - stretch.backward];
      if (other >= 0 && stretches_[other].first < stretch.first && stretches_[other].last < stretch.first) {
        position = std::max(position, stretches_[other].last + 1);
      }
      edit_.Before(position, stretch.start);
    }
    for (const Stretch& stretch : stretches_) {
      edit_.Before(stretch.first, stretch.wait);
      for (OpId view : stretch.views) edit_.Before(stretch.first, view);
      const Op& last = edit_.op(stretch.last);
      edit_.After(stretch.last, Ending("release", last, stretch.full));
    }
    for (auto [index, copy] : copies_) edit_.Before(index, copy);
  }

  Program& program_;
  PhaseEditor& edit_;
  int64_t ahead_;
  std::vector<int32_t> param_index_;
  std::deque<Stretch> stretches_;                          // in the order of their first uses
  std::vector<std::array<int32_t, 2>> current_;            // by unit: its stretch in the forward, the backward part
  std::map<std::pair<ValueId, ValueId>, ValueId> locals_;  // (full buffer, value of the parameter's storage) -> view
  std::vector<std::pair<int32_t, OpId>> copies_;
};

}  // namespace

Result<bool> Shard(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(ShardingOptions sharding, ReadShardingOptions(options));
  INTERLACE_ASSIGN(int64_t ahead, options.Int("ahead", 1, 0));
  INTERLACE_TRY(CheckShardable(program, sharding));
  Phase& phase = *program.FindPhase("micro_batch");
  PhaseFacts facts(program, phase);
  DeclareUnits(program, sharding, /*resident=*/false);
  PhaseEditor edit(program, phase);
  if (sharding.ranks > 1) Gathers(program, edit, ahead).Run();
  PlaceGradients(program, edit, facts, sharding, /*whole=*/false);
  edit.Finish();
  return true;
}

}  // namespace interlace
