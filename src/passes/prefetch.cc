// prefetch.cc — gathers start as early as memory allows, small neighbours as one call (DeepCompile, Algorithm 1).
//
//   before: gather.start(u0)  wait  mm  release  gather.start(u1)  wait  mm  release
//   after:  gather.start(u0, u1)  wait  mm  release  wait  mm  release
//
// Forward and backward of every micro-batch phase are scanned in reverse, each by itself, with a set U of gathers that
// have no place yet. An op o passes while P(op before o) + bytes of U stays under `limit` and bytes of U under
// `prefetch`; where it does not, U is put down just before o. The algorithm as printed is changed in these places:
// every op is tested, not only gathers, so that a spike between two of them counts; a gather that overflows begins the
// next U, or stays where it is when it overflows by itself; the first op is not left out. Neighbours V1, V2 that end up
// at one place become one call while T(V1) + T(V2) > alpha * T(V1 + V2). Gathers are put back to their first uses
// before, so the result does not depend on where they were. Runs after shard and, with several micro-batches, after
// accumulate. Options: limit, prefetch (bytes of U, 2GB), alpha (1.5), cluster, profile. Errors: symbolic sizes, an
// unknown cluster.
#include <algorithm>
#include <limits>

#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/phase_memory.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

struct PrefetchLimits {
  int64_t total = 0, open = 0;  // M, M_prefetch
  double alpha = 0;
};

// Every gather just before what waits for it.
Status PutBack(Program& program, Phase& phase) {
  INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, phase));
  int64_t order = std::numeric_limits<int64_t>::max() / 2;  // behind everything else in the gap
  for (Gather& gather : transfers.gathers) {
    if (gather.need >= transfers.size()) continue;  // another phase waits for it
    gather.at = gather.need;
    gather.order = ++order;
  }
  return transfers.Write();
}

class PrefetchScan {
 public:
  PrefetchScan(Program& program, Phase& phase, Transfers& transfers, const PhaseMemory& memory, CostModel& model,
               const PrefetchLimits& limits)
      : program_(program), phase_(phase), transfers_(transfers), memory_(memory), model_(model), limits_(limits) {
    gather_of_.assign(phase.ops.size(), -1);
    gap_after_.assign(phase.ops.size(), 0);
    std::vector<int32_t> gather_of_op(program.num_ops(), -1);
    for (size_t g = 0; g < transfers.gathers.size(); ++g) {
      gather_of_op[transfers.gathers[g].start] = static_cast<int32_t>(g);
    }
    int32_t gap = 0;
    for (size_t i = 0; i < phase.ops.size(); ++i) {
      gather_of_[i] = gather_of_op[phase.ops[i]];
      if (gap < transfers.size() && transfers.op_id(gap) == phase.ops[i]) ++gap;
      gap_after_[i] = gap;
    }
  }

  Status Run() {
    const auto end = static_cast<int32_t>(phase_.ops.size());
    int32_t backward = end;
    if (transfers_.backward_begin() < transfers_.size()) {
      const OpId first = transfers_.op_id(transfers_.backward_begin());
      backward = static_cast<int32_t>(std::find(phase_.ops.begin(), phase_.ops.end(), first) - phase_.ops.begin());
      // Gathers and reductions of the backward part that come before its first other op.
      while (backward > 0 && program_.op(phase_.ops[backward - 1]).part == Part::kBackward) --backward;
    }
    INTERLACE_TRY(Scan(backward, end));
    return Scan(0, backward);
  }

 private:
  bool Fits(int32_t place, int32_t begin, int64_t open) const {
    // P of the op before; before the first of the part, what lives there.
    const int64_t before = place > begin ? memory_.at[place - 1] : memory_.Before(place);
    return before < limits_.total - open && open < limits_.open;
  }

  // The part of the phase from place `begin` to before `end`.
  Status Scan(int32_t begin, int32_t end) {
    for (int32_t i = end - 1; i >= begin; --i) {
      const int32_t g = gather_of_[i];
      if (g >= 0 && transfers_.gathers[g].need >= transfers_.size()) continue;  // waited for in another phase
      const int64_t bytes = g >= 0 ? Bytes(transfers_.gathers[g]) : 0;
      if (!Fits(i, begin, open_bytes_ + bytes)) {
        INTERLACE_TRY(PutDown(g >= 0 ? i : i - 1));      // a later gather does not overtake an earlier one
        if (g >= 0 && !Fits(i, begin, bytes)) continue;  // too much by itself: it stays
      }
      if (g >= 0) {
        open_.push_back(g);
        open_bytes_ += bytes;
      }
    }
    return PutDown(begin - 1);
  }

  // What the gather allocates: its buffers and a cast of the shard.
  static int64_t Bytes(const Gather& gather) { return gather.bytes + (gather.lead.empty() ? 0 : gather.shard_bytes); }

  // Puts U just behind the op at `place` (-1: at the head), neighbours fused.
  Status PutDown(int32_t place) {
    std::reverse(open_.begin(), open_.end());  // as in the program
    Gather* last = nullptr;
    for (size_t i = 0; i < open_.size(); ++i) {
      Gather& gather = transfers_.gathers[open_[i]];
      gather.at = place < 0 ? 0 : gap_after_[place];
      gather.order = (place + 1) * Transfers::kSpacing + 1 + static_cast<int64_t>(i);
      if (last != nullptr) {
        INTERLACE_ASSIGN(bool fuse, Pays(*last, gather));
        if (fuse) {
          transfers_.Merge(*last, gather);
          continue;
        }
      }
      last = &gather;
    }
    open_.clear();
    open_bytes_ = 0;
    return Ok{};
  }

  Result<bool> Pays(const Gather& a, const Gather& b) {
    if (!MayMerge(program_, a.units, b.units)) return false;
    INTERLACE_ASSIGN(int64_t one, Time(a, a.bytes, a.units.size()));
    INTERLACE_ASSIGN(int64_t two, Time(b, b.bytes, b.units.size()));
    INTERLACE_ASSIGN(int64_t both, Time(a, a.bytes + b.bytes, a.units.size() + b.units.size()));
    return static_cast<double>(one) + static_cast<double>(two) > limits_.alpha * static_cast<double>(both);
  }

  Result<int64_t> Time(const Gather& gather, int64_t bytes, size_t units) {
    INTERLACE_ASSIGN(OpCost cost, model_.CollectiveCost(Exchange::kGather, program_.units[gather.units[0]].axis,
                                                        static_cast<double>(bytes), static_cast<int64_t>(units)));
    return TimeAlone(cost);
  }

  Program& program_;
  Phase& phase_;
  Transfers& transfers_;
  const PhaseMemory& memory_;
  CostModel& model_;
  const PrefetchLimits& limits_;
  std::vector<int32_t> gather_of_;  // by place: index of the gather, or -1
  std::vector<int32_t> gap_after_;  // by place
  std::vector<int32_t> open_;       // U, last first
  int64_t open_bytes_ = 0;
};

}  // namespace

Result<bool> Prefetch(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(PassCosts costs, ReadCosts(program, options));
  INTERLACE_ASSIGN(std::optional<int64_t> open, options.Bytes("prefetch"));
  PrefetchLimits limits;
  limits.total = costs.limit;
  limits.open =
      options.Find("prefetch") == nullptr ? int64_t{2'000'000'000} : open.value_or(std::numeric_limits<int64_t>::max());
  INTERLACE_ASSIGN(limits.alpha, options.Number("alpha", 1.5));
  INTERLACE_ASSIGN(CostModel model, costs.Model(program));
  bool changed = false;
  for (Phase* phase : MicroBatches(program)) {
    const std::vector<OpId> before = phase->ops;
    INTERLACE_TRY(PutBack(program, *phase));
    INTERLACE_ASSIGN(PhaseMemory memory, MemoryOf(program, *phase, model));
    INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phase));
    INTERLACE_TRY(PrefetchScan(program, *phase, transfers, memory, model, limits).Run());
    INTERLACE_TRY(transfers.Write());
    changed = changed || phase->ops != before;
  }
  return changed;
}

}  // namespace interlace
