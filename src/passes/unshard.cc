// unshard.cc — units stay gathered through a whole step where memory allows, those that save most time per byte first
// (DeepCompile 4.3, selective unsharding).
//
//   before: forward: gather u0 .. release   backward: gather u0 .. release    the same in every micro-batch
//   after:  the first forward gathers u0, the last backward releases it
//
// `units=auto`: ranked by T(B)/B, the largest first; one is taken if the peak with it stays under `limit`, else it is
// skipped and the next is tried. A unit counts only where it is not gathered already. `all`, `none`, or a list such as
// `u0+u3`: those, whatever the limit. Runs after shard and accumulate, best after prefetch. Options: limit, units,
// cluster, profile. Errors: units that do not exist or are not gathered more than once.
#include <algorithm>
#include <unordered_map>

#include "base/sort.h"
#include "passes/cost_options.h"
#include "passes/keep.h"
#include "passes/passes.h"
#include "passes/phase_memory.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// Bytes added to P from place `first` to `last` of a phase, both included.
struct Change {
  size_t phase = 0;
  int32_t first = 0, last = 0;
  int64_t bytes = 0;
};

struct KeptUnit {
  UnitId unit = kNone;
  int64_t bytes = 0;
  int64_t time_ps = 0;
  std::vector<Change> changes;
};

class UnshardPlan {
 public:
  UnshardPlan(Program& program, CostModel& model) : program_(program), model_(model) {}

  Status Read(const std::vector<UnitId>& units) {
    const std::vector<Phase*> phases = MicroBatches(program_);
    std::unordered_map<UnitId, size_t> of_unit;
    for (UnitId unit : units) {
      of_unit[unit] = candidates_.size();
      INTERLACE_TRY(Add(unit));
    }
    for (size_t p = 0; p < phases.size(); ++p) {
      INTERLACE_ASSIGN(PhaseMemory memory, MemoryOf(program_, *phases[p], model_));
      INTERLACE_TRY(ReadPhase(*phases[p], p, p == 0, p + 1 == phases.size(), memory, of_unit));
      memory_.push_back(std::move(memory.at));
    }
    return Ok{};
  }

  // By time saved per byte held, while the peak stays under `limit`.
  std::vector<UnitId> Choose(int64_t limit) {
    StableSort(candidates_, [](const KeptUnit& a, const KeptUnit& b) {
      return static_cast<double>(a.time_ps) / static_cast<double>(a.bytes) >
             static_cast<double>(b.time_ps) / static_cast<double>(b.bytes);
    });
    std::vector<UnitId> taken;
    for (const KeptUnit& candidate : candidates_) {
      Apply(candidate, 1);
      if (Peak() < limit) {
        taken.push_back(candidate.unit);
      } else {
        Apply(candidate, -1);
      }
    }
    std::sort(taken.begin(), taken.end());
    return taken;
  }

 private:
  Status Add(UnitId id) {
    const Unit& unit = program_.units[id];
    KeptUnit candidate;
    candidate.unit = id;
    candidate.bytes = unit.numel * DTypeBytes(unit.dtype);
    INTERLACE_ASSIGN(OpCost cost,
                     model_.CollectiveCost(Exchange::kGather, unit.axis, static_cast<double>(candidate.bytes), 1));
    candidate.time_ps = TimeAlone(cost);
    candidates_.push_back(std::move(candidate));
    return Ok{};
  }

  // What keeping each unit does to the memory of one phase: its buffers go, one that lasts comes, and casts of the
  // shard for gathers that go are not made.
  Status ReadPhase(const Phase& phase, size_t p, bool first_phase, bool last_phase, const PhaseMemory& memory,
                   const std::unordered_map<UnitId, size_t>& of_unit) {
    std::unordered_map<ValueId, const StorageLife*> lives;
    for (const StorageLife& life : memory.liveness.storages) lives[life.root] = &life;
    std::unordered_map<ValueId, int32_t> uses;  // of casts
    for (OpId id : phase.ops) {
      ForEachOperand(program_.op(id), [&](ValueId v) { ++uses[v]; });
    }
    const auto end = static_cast<int32_t>(phase.ops.size());
    std::unordered_map<UnitId, std::pair<int32_t, int32_t>> spans;
    for (int32_t i = 0; i < end; ++i) {
      const Op& op = program_.op(phase.ops[i]);
      if (op.kind != OpKind::kGatherStart || op.units.size() != op.results.size()) continue;
      for (size_t k = 0; k < op.units.size(); ++k) {
        auto found = of_unit.find(op.units[k]);
        if (found == of_unit.end() || program_.RootOf(op.results[k]) != op.results[k]) continue;
        KeptUnit& candidate = candidates_[found->second];
        const StorageLife& life = *lives.at(op.results[k]);
        candidate.changes.push_back({p, life.first, std::min(life.last, end - 1), -life.bytes});
        candidate.bytes = life.bytes;
        auto [span, fresh] = spans.try_emplace(op.units[k], life.first, life.last);
        if (!fresh) span->second.second = std::max(span->second.second, life.last);
        auto cast = lives.find(op.args[k].value);
        const bool made_again = !fresh || !first_phase;
        if (made_again && cast != lives.end() && uses[op.args[k].value] == 1) {
          const StorageLife& shard = *cast->second;
          candidate.changes.push_back({p, shard.first, std::min(shard.last, end - 1), -shard.bytes});
        }
      }
    }
    for (const auto& [unit, span] : spans) {
      const int32_t from = first_phase ? span.first : 0, to = last_phase ? std::min(span.second, end - 1) : end - 1;
      KeptUnit& candidate = candidates_[of_unit.at(unit)];
      candidate.changes.push_back({p, from, to, candidate.bytes});
    }
    return Ok{};
  }

  void Apply(const KeptUnit& candidate, int64_t sign) {
    for (const Change& change : candidate.changes) {
      std::vector<int64_t>& at = memory_[change.phase];
      for (int32_t i = change.first; i <= change.last; ++i) at[i] += sign * change.bytes;
    }
  }

  int64_t Peak() const {
    int64_t peak = 0;
    for (const std::vector<int64_t>& at : memory_) {
      if (!at.empty()) peak = std::max(peak, *std::max_element(at.begin(), at.end()));
    }
    return peak;
  }

  Program& program_;
  CostModel& model_;
  std::vector<KeptUnit> candidates_;
  std::vector<std::vector<int64_t>> memory_;  // P(o) by phase and place, with what was taken so far
};

}  // namespace

Result<bool> Unshard(Program& program, const PassOptions& options) {
  const std::string wanted = options.Text("units", "auto");
  const std::vector<UnitId> keepable = UnitsGatheredAgain(program);
  if (wanted == "none") return false;
  if (wanted == "all") return KeepGathered(program, keepable);
  if (wanted != "auto") {
    INTERLACE_ASSIGN(const std::vector<UnitId> units, ReadUnits(program, wanted, "option units"));
    for (UnitId unit : units) {
      if (std::binary_search(keepable.begin(), keepable.end(), unit)) continue;
      return MakeError("option units: u", unit,
                       " is not gathered more than once in a step, so there is nothing to keep");
    }
    return KeepGathered(program, units);
  }
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  UnshardPlan plan(program, model);
  INTERLACE_TRY(plan.Read(keepable));
  return KeepGathered(program, plan.Choose(costs.limit));
}

}  // namespace interlace
