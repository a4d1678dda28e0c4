#include "passes/step_line.h"

#include <algorithm>
#include <unordered_map>

#include "ir/op_table.h"
#include "ir/residency.h"

namespace interlace {
namespace {

class Reader {
 public:
  Reader(Program& program, CostModel& model) : program_(program), model_(model) {}

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
        if (op.name.ends_with(".start") || op.name.ends_with(".wait")) continue;
        INTERLACE_ASSIGN(const OpCost cost, model_.Cost(op));
        if (cost.resource == Resource::kCompute) now_ps_ += cost.work_ps;
      }
      // The other runs of a repeated phase pass before what comes next begins.
      now_ps_ += (count - 1) * (now_ps_ - (first < line_.size() ? line_.begin_ps[first] : now_ps_));
      Uses(*phase, first, count > 1);
    }
    line_.begin_ps.push_back(now_ps_);
    return Finish();
  }

 private:
  void Uses(const Phase& phase, int32_t first, bool repeated) {
    std::unordered_map<ValueId, std::vector<std::pair<ValueId, size_t>>> sources;  // by result of a transfer: storage, its use
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      const Op& op = program_.op(phase.ops[i]);
      const int32_t here = first + static_cast<int32_t>(i);
      if (op.name == "view") continue;
      auto touch = [&](ValueId id, bool writes) {
        const ValueId root = program_.RootOf(id);
        std::vector<Use>& uses = uses_[root];
        if (repeated) repeated_[root] = true;
        if (!uses.empty() && uses.back().end == here) {
          uses.back().writes = uses.back().writes || writes;
        } else {
          uses.push_back({here, here, writes});
        }
        return std::pair(root, uses.size() - 1);
      };
      std::vector<std::pair<ValueId, size_t>> read;
      ForEachOperand(op, [&](ValueId id) {
        read.push_back(touch(id, false));
        auto found = sources.find(id);
        if (found == sources.end() || !op.name.ends_with(".wait")) return;
        for (const auto& [root, use] : found->second) uses_[root][use].end = here;
      });
      for (ValueId id : WrittenOperands(program_, op)) touch(id, true);
      for (ValueId id : op.results) {
        if (id == kNone) continue;
        const bool fresh = program_.RootOf(id) == id;
        if (!fresh && !program_.value(id).placed) continue;  // a view
        read.push_back(touch(id, true));
      }
      if (!op.name.ends_with(".start")) continue;
      for (ValueId id : op.results) {
        if (id != kNone) sources[id] = read;
      }
    }
    for (ValueId id : phase.takes) pinned_[program_.RootOf(id)] = true;
    for (ValueId id : phase.gives) pinned_[program_.RootOf(id)] = true;
  }

  Result<StepLine> Finish() {
    for (const State& state : program_.states) {
      if (program_.RootOf(state.value) != state.value || state.unit == kNone) continue;
      const bool weights = state.role == "shard" || state.role == "full";
      const OffloadKind kind = !state.persistent ? OffloadKind::kGradients : weights ? OffloadKind::kMaster : OffloadKind::kStates;
      INTERLACE_TRY(Add(state.value, kind, state.unit, state.persistent));
    }
    std::vector<std::pair<int32_t, ValueId>> results;
    for (const auto& [root, uses] : uses_) {
      const Value& value = program_.value(root);
      if (value.kind != ValueKind::kResult || pinned_.contains(root) || uses.size() < 2) continue;
      const Op& def = program_.op(value.def);
      // Gathered and flat buffers are short-lived; what a release names could be out there.
      if (def.name == "gather.start" || def.name == "grad.begin") continue;
      results.emplace_back(uses.front().begin, root);
    }
    std::sort(results.begin(), results.end());
    for (const auto& [first, root] : results) {
      const Op& def = program_.op(program_.value(root).def);
      const bool gradient = def.name == "reduce.start";
      INTERLACE_TRY(Add(root, gradient ? OffloadKind::kGradients : OffloadKind::kActivations, gradient ? def.units[0] : kNone, false));
    }
    return std::move(line_);
  }

  Status Add(ValueId root, OffloadKind kind, UnitId unit, bool state) {
    auto found = uses_.find(root);
    if (found == uses_.end()) return Ok{};
    Movable movable{root, kind, unit, 0, state, {}};
    INTERLACE_ASSIGN(movable.bytes, program_.StorageBytes(program_.value(root).type));
    if (movable.bytes == 0) return Ok{};
    // Uses that overlap or touch are one.
    std::vector<Use> uses = found->second;
    std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.begin < b.begin; });
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
  std::unordered_map<ValueId, bool> pinned_, repeated_;
};

}  // namespace

Result<StepLine> ReadStepLine(Program& program, CostModel& model) {
  return Reader(program, model).Run();
}

bool FreeGradients(Program& program) {
  // Where each step state is touched: one phase or several.
  std::unordered_map<ValueId, const Phase*> only;
  std::unordered_map<ValueId, bool> several;
  std::unordered_map<ValueId, ValueId> whole;  // state → the placed result that fills it
  std::unordered_map<ValueId, bool> early;     // touched before it is filled
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) {
      const Op& op = program.op(id);
      auto touch = [&](ValueId value) {
        const ValueId root = program.RootOf(value);
        if (program.value(root).kind != ValueKind::kState) return;
        auto [found, fresh] = only.try_emplace(root, &phase);
        if (!fresh && found->second != &phase) several[root] = true;
        if (!whole.contains(root)) early[root] = true;
      };
      for (ValueId result : op.results) {
        if (result == kNone || !program.value(result).placed) continue;
        const Value& value = program.value(result);
        const bool fills = op.name == "reduce.start" && value.offset == Dim(0) && value.type == program.value(value.root).type;
        if (fills && !whole.contains(value.root) && !early.contains(value.root)) {
          whole[value.root] = result;
        } else {
          early[value.root] = true;  // filled in parts, or twice
        }
        touch(result);
      }
      ForEachOperand(op, touch);
      for (ValueId value : op.writes) touch(value);
    }
  }
  bool changed = false;
  std::erase_if(program.states, [&](const State& state) {
    if (state.persistent || state.out || !whole.contains(state.value) || several[state.value] || early[state.value]) return false;
    const ValueId result = whole[state.value];
    Value& value = program.value(result);
    value.root = result;
    value.placed = false;
    for (ValueId id = 0; id < program.num_values(); ++id) {
      if (program.HasValue(id) && id != state.value && program.value(id).root == state.value) program.value(id).root = result;
    }
    for (Phase& phase : program.phases) ReplaceUses(program, phase, state.value, result);
    changed = true;
    return true;
  });
  return changed;
}

}  // namespace interlace
