#include "sim/arena_picture.h"

#include <algorithm>
#include <tuple>

#include "ir/memory_plan.h"
#include "sim/critical_path.h"

namespace interlace {
namespace {

// A span of a block, by places of ops: -1 the beginning of its phase, the number of ops its end.
struct Stay {
  int32_t block, first, last;
};

class Drawing {
 public:
  Drawing(const Lowered& lowered, const MemoryPlan& plan, const std::vector<int64_t>& start_ps,
          const std::vector<int64_t>& end_ps)
      : lowered_(lowered),
        program_(*lowered.program),
        plan_(plan),
        start_ps_(start_ps),
        end_ps_(end_ps),
        kinds_(KindsOfRoots(lowered)) {}

  ArenaPicture Run() {
    ArenaPicture out;
    out.top_bytes = plan_.taken_bytes;
    out.live_bytes = plan_.live_bytes;
    out.fragmentation = plan_.Fragmentation();
    const std::vector<std::vector<Stay>> stays = StaysOfVariants();
    std::vector<int64_t> open(plan_.blocks.size(), -1),
        goes_on;  // by block: its piece, when the run before ended with it
    size_t run = 0, entry = 0;
    for (const auto& [phase, count] : program_.RunOrder()) {
      for (int64_t i = 0; i < count; ++i, ++run) {
        goes_on.assign(open.size(), -1);
        const int32_t variant = plan_.VariantOf(entry, i);
        const auto ops = static_cast<int32_t>(phase->ops.size());
        for (const Stay& stay : stays[variant]) {
          int64_t& piece = open[stay.block];
          if (stay.first >= 0 || piece < 0) {
            piece = static_cast<int64_t>(out.pieces.size());
            out.pieces.push_back(Begin(stay, run));
          }
          ArenaPiece& at = out.pieces[piece];
          at.last = Slot(run, stay.last);
          at.end_ps = TimeOf(run, stay.last, /*end=*/true);
          if (stay.last == ops) goes_on[stay.block] = piece;
        }
        open.swap(goes_on);
      }
      ++entry;
    }
    std::stable_sort(out.pieces.begin(), out.pieces.end(),
                     [](const ArenaPiece& a, const ArenaPiece& b) { return a.first < b.first; });
    return out;
  }

 private:
  std::vector<std::vector<Stay>> StaysOfVariants() const {
    std::vector<std::vector<Stay>> out(plan_.variants.size());
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      for (const LifeSpan& span : plan_.lives[b].spans) {
        // Variants follow each other on the axis, and a span lies within one.
        const auto after = std::upper_bound(plan_.variants.begin(), plan_.variants.end(), span.first,
                                            [](int32_t slot, const PlanVariant& v) { return slot < v.axis; });
        const auto v = static_cast<size_t>(after - plan_.variants.begin()) - 1;
        const int32_t begin = plan_.variants[v].axis + 1;
        out[v].push_back({static_cast<int32_t>(b), span.first - begin, span.last - begin});
      }
    }
    return out;
  }

  int64_t Slot(size_t run, int32_t place) const {
    return lowered_.first[run] + 2 * static_cast<int64_t>(run) + place + 1;
  }

  int64_t TimeOf(size_t run, int32_t place, bool end) const {
    const int64_t first = lowered_.first[run], behind = lowered_.first[run + 1];
    if (first == behind) return first == 0 ? 0 : end_ps_[first - 1];
    if (place < 0) return start_ps_[first];
    if (first + place >= behind) return end_ps_[behind - 1];
    return end ? end_ps_[first + place] : start_ps_[first + place];
  }

  ArenaPiece Begin(const Stay& stay, size_t run) const {
    const PlannedBlock& block = plan_.blocks[stay.block];
    ArenaPiece out;
    out.offset = plan_.OffsetOf(stay.block);
    out.bytes = block.bytes;
    out.first = Slot(run, stay.first);
    out.start_ps = TimeOf(run, stay.first, /*end=*/false);
    out.name = NameOfBlock(program_, block);
    const bool storage = block.what == PlannedBlock::What::kStorage;
    out.kind = storage ? kinds_[block.root] : MemoryKind::kWorkspace;
    out.op = storage ? program_.value(block.root).def : block.op;
    if (out.op != kNone) out.module = ModuleOf(program_, program_.op(out.op));
    return out;
  }

  const Lowered& lowered_;
  const Program& program_;
  const MemoryPlan& plan_;
  const std::vector<int64_t>&start_ps_, &end_ps_;
  const std::vector<MemoryKind> kinds_;
};

}  // namespace

Result<ArenaPicture> DrawArena(const Lowered& lowered, const std::vector<int64_t>& start_ps,
                               const std::vector<int64_t>& end_ps) {
  const Program& program = *lowered.program;
  MemoryPlanOptions options;
  for (const Phase& phase : program.phases) options.workspace.emplace_back(phase.ops.size(), 0);
  for (size_t p = 0; p < lowered.phases.size(); ++p) {
    std::vector<int64_t>& inside = options.workspace[static_cast<size_t>(lowered.phases[p] - program.phases.data())];
    for (size_t i = 0; i < inside.size(); ++i) inside[i] = lowered.ops[p][i].transient_bytes;
  }
  INTERLACE_ASSIGN(const MemoryPlan plan, PlanMemory(program, options));
  if (!plan.placed()) return MakeError("a program that moves storages has no arena");
  return Drawing(lowered, plan, start_ps, end_ps).Run();
}

Result<std::vector<MemoryEvent>> ArenaEvents(const Lowered& lowered, const ArenaPicture& picture, int32_t rank) {
  INTERLACE_ASSIGN(std::vector<MemoryEvent> out, PersistentEvents(lowered, rank));
  const auto before = static_cast<int64_t>(out.size());
  const int64_t end = lowered.first.back() + 2 * static_cast<int64_t>(lowered.run.size()) - 1;  // the last slot
  std::vector<std::tuple<int64_t, bool, int64_t>> order;  // slot, whether it ends there, piece
  for (size_t i = 0; i < picture.pieces.size(); ++i) {
    order.emplace_back(picture.pieces[i].first, false, static_cast<int64_t>(i));
    // What lives when the step ends is there when the next begins.
    if (picture.pieces[i].last < end) order.emplace_back(picture.pieces[i].last, true, static_cast<int64_t>(i));
  }
  std::sort(order.begin(), order.end());
  for (const auto& [slot, ends, index] : order) {
    const ArenaPiece& piece = picture.pieces[index];
    MemoryEvent& e = out.emplace_back();
    e.rank = rank;
    e.time_ns = (ends ? piece.end_ps : piece.start_ps) / 1000;
    e.allocate = !ends;
    e.storage = before + index;
    e.bytes = piece.bytes;
    e.address = piece.offset;
    e.name = piece.name;
    e.module = piece.module;
    SetSource(*lowered.program, piece.op, e);
  }
  return out;
}

}  // namespace interlace
