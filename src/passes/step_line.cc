#include "passes/step_line.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "ir/op_table.h"
#include "ir/pending.h"
#include "ir/residency.h"
#include "ir/touches.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// Whether a placed result takes the whole storage.
bool FillsRoot(const Program& program, const Value& value) {
  return value.placed && value.offset == Dim(0) && value.type == program.value(value.root).type;
}

class StepLineReader {
 public:
  StepLineReader(Program& program, CostModel& model) : program_(program), model_(model) {}

  Result<StepLine> Run() {
    for (const auto& [phase, count] : program_.RunOrder()) {
      Phase* mutable_phase = program_.FindPhase(phase->name);
      INTERLACE_ASSIGN(PhaseMemory memory, MemoryOf(program_, *phase, model_));
      const auto first = line_.size();
      for (size_t i = 0; i < phase->ops.size(); ++i) {
        line_.ops.push_back({mutable_phase, static_cast<int32_t>(i), count > 1});
        line_.bytes.push_back(memory.at[i]);
        line_.begin_ps.push_back(now_ps_);
        const Op& op = program_.op(phase->ops[i]);
        if (IsStart(op) || IsWait(op)) continue;
        INTERLACE_ASSIGN(const OpCost cost, model_.Cost(op));
        if (cost.resource == Resource::kCompute) now_ps_ += cost.work_ps;
      }
      // The other runs of a repeated phase pass before what comes next begins.
      now_ps_ += (count - 1) * (now_ps_ - (first < line_.size() ? line_.begin_ps[first] : now_ps_));
      Uses(*phase, first);
    }
    line_.begin_ps.push_back(now_ps_);
    return Finish();
  }

 private:
  void Uses(const Phase& phase, int32_t first) {
    const auto skip = [](const Op& op) { return op.kind == OpKind::kView || MoveOf(op) != nullptr || StepsOnHost(op); };
    ForEachTouch(program_, phase, skip, [&](const Touch& touch) {
      if (touch.how == Touch::How::kLeaves) return;
      const bool makes = touch.how == Touch::How::kMakes, writes = makes || touch.how == Touch::How::kWrites;
      const bool fills = makes && (touch.root == touch.value || FillsRoot(program_, program_.value(touch.value)));
      std::vector<Use>& uses = uses_[touch.root];
      if (touch.since == touch.at && !uses.empty() && uses.back().end == first + touch.at) {
        uses.back().writes = uses.back().writes || writes;
      } else {
        uses.push_back({first + touch.since, first + touch.at, writes, fills});
      }
    });
    for (OpId id : phase.ops) {  // what host_update moves keeps its places
      if (MoveOf(program_.op(id)) == nullptr) continue;
      ForEachOperand(program_.op(id), [&](ValueId operand) { moves_.insert(operand); });
    }
    for (ValueId id : phase.takes) pinned_[program_.RootOf(id)] = true;
    for (ValueId id : phase.gives) pinned_[program_.RootOf(id)] = true;
  }

  Result<StepLine> Finish() {
    for (const State& state : program_.states) {
      if (program_.RootOf(state.value) != state.value || state.unit == kNone) continue;
      const bool weights = state.role == "shard" || state.role == "full";
      const bool comes =
          state.out && state.persistent && weights && moves_.contains(state.value);  // of a step on the host
      if ((state.out || moves_.contains(state.value)) && !comes) continue;
      const OffloadKind kind = !state.persistent ? OffloadKind::kGradients
                               : weights         ? OffloadKind::kMaster
                                                 : OffloadKind::kStates;
      INTERLACE_TRY(Add(state.value, kind, state.unit, state.persistent));
      if (!line_.movables.empty() && line_.movables.back().root == state.value)
        line_.movables.back().ends = !state.persistent;
      if (comes && !line_.movables.empty() && line_.movables.back().root == state.value)
        line_.movables.back().comes = true;
    }
    std::vector<std::pair<int32_t, ValueId>> results;
    for (const auto& [root, uses] : uses_) {
      const Value& value = program_.value(root);
      if (value.kind != ValueKind::kResult || pinned_.contains(root) || moves_.contains(root) || uses.size() < 2)
        continue;
      const Op& def = program_.op(value.def);
      // Gathered and flat buffers are short-lived; what a release names could be out there.
      if (def.kind == OpKind::kGatherStart || def.kind == OpKind::kGradBegin) continue;
      results.emplace_back(uses.front().begin, root);
    }
    std::sort(results.begin(), results.end());
    for (const auto& [first, root] : results) {
      const Op& def = program_.op(program_.value(root).def);
      const bool gradient = def.kind == OpKind::kReduceStart;
      INTERLACE_TRY(Add(root, gradient ? OffloadKind::kGradients : OffloadKind::kActivations,
                        gradient ? def.units[0] : kNone, false));
    }
    return std::move(line_);
  }

  Status Add(ValueId root, OffloadKind kind, UnitId unit, bool state) {
    auto found = uses_.find(root);
    if (found == uses_.end()) return Ok{};
    Movable movable{root, kind, unit, 0, state, false, false, {}};
    INTERLACE_ASSIGN(movable.bytes, program_.StorageBytes(program_.value(root).type));
    if (movable.bytes == 0) return Ok{};
    // Uses that overlap or touch are one.
    std::vector<Use> uses = found->second;
    std::stable_sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.begin < b.begin; });
    for (const Use& use : uses) {
      if (!movable.uses.empty() && use.begin <= movable.uses.back().end + 1) {
        movable.uses.back().end = std::max(movable.uses.back().end, use.end);
        movable.uses.back().writes = movable.uses.back().writes || use.writes;
      } else {
        movable.uses.push_back(use);
      }
    }
    line_.movables.push_back(std::move(movable));
    return Ok{};
  }

  Program& program_;
  CostModel& model_;
  StepLine line_;
  int64_t now_ps_ = 0;
  std::unordered_map<ValueId, std::vector<Use>> uses_;  // by root
  std::unordered_map<ValueId, bool> pinned_;
  std::unordered_set<ValueId> moves_;
};

}  // namespace

Result<StepLine> ReadStepLine(Program& program, CostModel& model) {
  return StepLineReader(program, model).Run();
}

bool BeginGradients(Program& program) {
  std::unordered_set<ValueId> open;  // states that no op but one of the step before has touched so far
  for (const State& state : program.states) {
    if (state.persistent || state.out || state.unit == kNone || program.RootOf(state.value) != state.value) continue;
    const Type& type = program.value(state.value).type;
    if (type == FlatType(type.dtype, program.units[state.unit].numel)) open.insert(state.value);
  }
  bool any = false;
  for (const auto& [run, times] : program.RunOrder()) {
    if (open.empty()) break;
    Phase& phase = *program.FindPhase(run->name);
    const int64_t count = times;  // a lambda may not capture the binding itself
    PhaseEditor editor(program, phase);
    std::vector<std::pair<int32_t, ValueId>> begins;  // before which op, which state
    ForEachTouch(program, phase, IsPending, [&](const Touch& touch) {
      const bool parts = touch.how == Touch::How::kMakes && !FillsRoot(program, program.value(touch.value));
      if (open.erase(touch.root) > 0 && parts && count == 1) begins.emplace_back(touch.at, touch.root);
    });
    for (const auto& [at, root] : begins) {
      const Type type = program.value(root).type;
      Op& begin = AddLike(program, program.op(phase.ops[at]), OpKind::kGradBegin);
      for (const State& state : program.states) {
        if (state.value == root) begin.units = {state.unit};
      }
      program.AddPlaced(begin, type, root, Dim(0));
      editor.Before(at, begin.id);
      any = true;
    }
    editor.Finish();
  }
  return any;
}

bool FreeGradients(Program& program) {
  // By state: the one phase that touches it, where it does first, and the result that fills it whole there.
  struct Facts {
    Phase* phase = nullptr;
    size_t first = 0;
    ValueId whole = kNone;
    bool free = true;
  };
  std::unordered_map<ValueId, Facts> facts;
  for (const State& state : program.states) {
    if (!state.persistent && !state.out && state.unit != kNone && program.RootOf(state.value) == state.value)
      facts[state.value];
  }
  if (facts.empty()) return false;
  for (Phase& phase : program.phases) {
    ForEachTouch(program, phase, [&](const Touch& touch) {
      auto found = facts.find(touch.root);
      if (found == facts.end()) return;
      Facts& f = found->second;
      if (f.phase != nullptr) {
        f.free = f.free && f.phase == &phase;
        return;
      }
      f.phase = &phase;
      f.first = static_cast<size_t>(touch.at);
      f.free = touch.how == Touch::How::kMakes;  // a read first: it holds something from before
      const OpKind kind = program.op(phase.ops[touch.at]).kind;
      const bool fills = f.free && (kind == OpKind::kReduceStart || kind == OpKind::kGradBegin);
      if (fills && FillsRoot(program, program.value(touch.value))) f.whole = touch.value;
    });
  }
  std::unordered_map<Phase*, PhaseEditor> editors;
  const auto count = std::erase_if(program.states, [&](const State& state) {
    auto found = facts.find(state.value);
    if (found == facts.end() || !found->second.free || found->second.phase == nullptr) return false;
    Facts& f = found->second;
    const Unit& unit = program.units[state.unit];
    if (f.whole != kNone) {
      program.value(f.whole).root = f.whole;
      program.value(f.whole).placed = false;
    } else {
      if (!(program.value(state.value).type == FlatType(program.value(state.value).type.dtype, unit.numel)))
        return false;
      Op& begin = AddLike(program, program.op(f.phase->ops[f.first]), OpKind::kGradBegin);
      begin.units = {state.unit};
      f.whole = program.AddResult(begin, program.value(state.value).type);
      editors.try_emplace(f.phase, program, *f.phase).first->second.Before(static_cast<int32_t>(f.first), begin.id);
    }
    for (ValueId id = 0; id < program.num_values(); ++id) {
      if (program.HasValue(id) && id != state.value && program.value(id).root == state.value)
        program.value(id).root = f.whole;
    }
    ReplaceUses(program, *f.phase, state.value, f.whole);
    return true;
  });
  for (auto& [phase, editor] : editors) editor.Finish();
  return count > 0;
}

}  // namespace interlace
