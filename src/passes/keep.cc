#include "passes/keep.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "ir/op_table.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// What one phase does with the full buffers of a unit, in the order of issue.
struct Stretches {
  std::vector<ValueId> fulls;
};

std::unordered_map<UnitId, Stretches> StretchesOf(const Program& program, const Phase& phase) {
  std::unordered_map<UnitId, Stretches> out;
  for (OpId id : phase.ops) {
    const Op& op = program.op(id);
    if (op.kind != OpKind::kGatherStart || op.units.size() != op.results.size()) continue;
    for (size_t i = 0; i < op.units.size(); ++i) {
      if (program.RootOf(op.results[i]) == op.results[i]) out[op.units[i]].fulls.push_back(op.results[i]);
    }
  }
  return out;
}

// Makes one phase use `kept` in place of every buffer of `dropped`, whose gathers and waits go, and removes releases.
class PhaseRewriter {
 public:
  PhaseRewriter(Program& program, Phase& phase) : program_(program), phase_(phase) {}

  void Replace(ValueId dropped, ValueId kept) { kept_[dropped] = kept; }
  // Only `last` may be released, at its last release in this phase; kNone: nothing is.
  void Holds(ValueId kept, bool releases) { releases_[kept] = releases; }

  void Run() {
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      if (!program_.HasValue(id)) continue;
      const ValueId root = program_.RootOf(id);
      auto found = kept_.find(root);
      if (found != kept_.end() && root != id) program_.value(id).root = found->second;
    }
    std::set<ValueId> released;
    std::vector<OpId> ops;
    std::set<OpId> maybe_dead;
    for (auto it = phase_.ops.rbegin(); it != phase_.ops.rend(); ++it) {
      const OpKind kind = std::as_const(program_).op(*it).kind;
      const bool gathers = kind == OpKind::kGatherStart || kind == OpKind::kGatherWait;
      if (!gathers && kind != OpKind::kRelease && !Uses(*it)) {
        ops.push_back(*it);
        continue;
      }
      Op& op = program_.op(*it);
      if (op.kind == OpKind::kGatherStart) {
        if (!DropResults(op, maybe_dead)) continue;
      } else if (op.kind == OpKind::kGatherWait) {
        std::erase_if(op.args, [&](const Arg& arg) { return kept_.count(arg.value) > 0; });
        if (op.args.empty()) continue;
      } else if (op.kind == OpKind::kRelease) {
        std::vector<Arg> args;
        for (Arg& arg : op.args) {
          ValueId to = Map(arg.value);
          auto holds = releases_.find(to);
          if (holds != releases_.end() && (!holds->second || !released.insert(to).second)) continue;
          arg.value = to;
          args.push_back(arg);
        }
        op.args = std::move(args);
        if (op.args.empty()) continue;
      } else {
        ForEachOperand(op, [&](ValueId& id) { id = Map(id); });
        for (ValueId& id : op.writes) id = Map(id);
      }
      ops.push_back(op.id);
    }
    std::reverse(ops.begin(), ops.end());
    phase_.ops = std::move(ops);
    DropDead(maybe_dead);
  }

 private:
  // Whether an op has an operand that is replaced.
  bool Uses(OpId id) const {
    const Op& op = std::as_const(program_).op(id);
    const auto replaced = [&](ValueId value) { return kept_.contains(value); };
    return AnyOperand(op, replaced) || std::any_of(op.writes.begin(), op.writes.end(), replaced);
  }

  ValueId Map(ValueId id) const {
    auto found = kept_.find(id);
    return found == kept_.end() ? id : found->second;
  }

  // Takes the replaced buffers out of a coalesced gather; false: nothing is left of it.
  bool DropResults(Op& op, std::set<OpId>& maybe_dead) {
    size_t left = 0;
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (kept_.count(op.results[i]) > 0) {
        MayDie(op.args[i].value, maybe_dead);
        continue;
      }
      op.results[left] = op.results[i];
      op.args[left] = op.args[i];
      op.units[left] = op.units[i];
      program_.value(op.results[left]).result_index = static_cast<int32_t>(left);
      ++left;
    }
    op.results.resize(left);
    op.args.resize(left);
    op.units.resize(left);
    return left > 0;
  }

  // What made the operand of a gather that went: casts of shards, a buffer of several.
  void MayDie(ValueId operand, std::set<OpId>& maybe_dead) const {
    const Value& value = std::as_const(program_).value(operand);
    if (value.kind != ValueKind::kResult || value.def == kNone || !maybe_dead.insert(value.def).second) return;
    ForEachOperand(std::as_const(program_).op(value.def), [&](ValueId id) { MayDie(id, maybe_dead); });
  }

  void DropDead(const std::set<OpId>& maybe_dead) {
    if (maybe_dead.empty()) return;
    std::vector<bool> used(static_cast<size_t>(program_.num_values()), false);
    for (ValueId id : phase_.gives) used[id] = true;
    std::vector<OpId> ops;
    for (auto it = phase_.ops.rbegin(); it != phase_.ops.rend(); ++it) {
      const Op& op = std::as_const(program_).op(*it);
      const bool dead =
          maybe_dead.count(op.id) > 0 && !HasEffect(program_, op) &&
          std::none_of(op.results.begin(), op.results.end(), [&](ValueId v) { return v != kNone && used[v]; });
      if (dead) continue;
      ForEachOperand(op, [&](ValueId v) { used[v] = true; });
      ops.push_back(op.id);
    }
    phase_.ops.assign(ops.rbegin(), ops.rend());
  }

  Program& program_;
  Phase& phase_;
  std::unordered_map<ValueId, ValueId> kept_;  // buffer that goes -> buffer that stays
  std::unordered_map<ValueId, bool> releases_;
};

}  // namespace

std::vector<UnitId> UnitsGatheredAgain(const Program& program) {
  std::vector<int64_t> gathers(program.units.size(), 0);
  for (const auto& [phase, count] : program.RunOrder()) {
    if (phase->kind != PhaseKind::kMicroBatch) continue;
    for (OpId id : phase->ops) {
      const Op& op = program.op(id);
      if (op.kind != OpKind::kGatherStart || op.units.size() != op.results.size()) continue;
      for (size_t i = 0; i < op.units.size(); ++i) {
        if (program.RootOf(op.results[i]) == op.results[i]) gathers[op.units[i]] += count;
      }
    }
  }
  std::vector<UnitId> units;
  for (UnitId id = 0; id < static_cast<UnitId>(gathers.size()); ++id) {
    if (gathers[id] > 1) units.push_back(id);
  }
  return units;
}

std::vector<UnitId> KeepableUnits(const Program& program) {
  return program.stage ? std::vector<UnitId>() : UnitsGatheredAgain(program);
}

Result<bool> KeepGathered(Program& program, const std::vector<UnitId>& units) {
  if (units.empty()) return false;
  const std::vector<UnitId> keepable = UnitsGatheredAgain(program);
  std::set<UnitId> wanted;
  for (UnitId unit : units) {
    if (std::binary_search(keepable.begin(), keepable.end(), unit)) wanted.insert(unit);
  }
  if (wanted.empty()) return false;
  if (program.stage)
    return MakeError("a stage of a pipeline gathers for each of its runs; strategy zero1 keeps its parameters whole");
  const std::vector<Phase*> phases = MicroBatches(program);
  std::vector<std::unordered_map<UnitId, Stretches>> stretches;
  for (Phase* phase : phases) stretches.push_back(StretchesOf(program, *phase));
  for (size_t p = 1; p < phases.size(); ++p) {
    for (UnitId unit : wanted) {
      if (stretches[p].count(unit) == stretches[0].count(unit)) continue;
      return MakeError("u", unit, " is gathered in some micro-batches and not in others; it cannot be kept");
    }
  }
  for (size_t p = 0; p < phases.size(); ++p) {
    Phase& phase = *phases[p];
    const bool takes = p > 0, gives = p + 1 < phases.size();
    PhaseRewriter rewriter(program, phase);
    for (UnitId unit : wanted) {
      const std::vector<ValueId>& fulls = stretches[p][unit].fulls;
      if (fulls.empty()) continue;
      ValueId kept = fulls[0];
      if (takes) {
        kept = program.AddValue(ValueKind::kTake, program.value(fulls[0]).type).id;
        phase.takes.push_back(kept);
      }
      for (ValueId full : fulls) {
        if (full != kept) rewriter.Replace(full, kept);
      }
      rewriter.Holds(kept, !gives);
      if (gives) phase.gives.push_back(kept);
    }
    rewriter.Run();
  }
  return true;
}

}  // namespace interlace
