#include "ir/memory_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "ir/carried_places.h"
#include "ir/liveness.h"
#include "ir/op_table.h"
#include "ir/residency.h"

namespace interlace {
namespace {

constexpr int32_t kMostTurns = 4, kMostTurnsCarried = 64;  // with what runs save

// A span of a block in one variant, by places of ops: -1 the beginning, ops.size() the end.
struct Stay {
  int32_t block, variant, first, last;
};

// What is still under way of one value: blocks that must stay until it is waited for.
using Pending = std::map<ValueId, std::vector<int32_t>>;

class Planner {
 public:
  Planner(const Program& program, const MemoryPlanOptions& options, const std::vector<PhaseLiveness>& liveness)
      : program_(program), options_(options), liveness_(liveness) {}

  // nullopt: two storages of one place live together, so that more turns are needed.
  Result<std::optional<MemoryPlan>> Run(int32_t turns) {
    INTERLACE_TRY(MakeVariants(turns));
    for (size_t v = 0; v < plan_.variants.size(); ++v) INTERLACE_TRY(Collect(static_cast<int32_t>(v)));
    for (const PlanVariant& v : plan_.variants) JoinSame(v, plan_.variants[static_cast<size_t>(v.same_as)]);
    for (const auto& [from, to] : edges_) HandOn(from, to);
    JoinPlaces();
    Renumber();
    FollowTransfers();
    if (!Spans()) return std::optional<MemoryPlan>();
    INTERLACE_TRY(Total());
    if (!options_.pack) return std::optional<MemoryPlan>(std::move(plan_));
    if (moves_) {
      LiveOf(plan_.lives, plan_.packing);
      std::vector<ArenaBlock> pieces = plan_.lives;
      for (ArenaBlock& piece : pieces) piece.bytes = HeapBytes(piece.bytes);
      ArenaPacking heap;
      LiveOf(pieces, heap);
      plan_.taken_bytes = heap.live;
      return std::optional<MemoryPlan>(std::move(plan_));
    }
    plan_.packing = PackArena(plan_.lives);
    plan_.taken_bytes = plan_.packing.top;
    if (Status status = CheckPacking(plan_.lives, plan_.packing.offsets, plan_.packing.top); !status.ok()) {
      return MakeError("the memory plan is wrong, a bug: ", status.error().message);
    }
    return std::optional<MemoryPlan>(std::move(plan_));
  }

 private:
  // `same_as`: kNone when it is the first of its places.
  int32_t AddVariant(const Phase* phase, int32_t turn, int32_t same_as = kNone) {
    PlanVariant& v = plan_.variants.emplace_back();
    v.phase = phase;
    v.turn = turn;
    v.same_as = same_as == kNone ? static_cast<int32_t>(plan_.variants.size()) - 1 : same_as;
    v.axis = axis_;
    v.block_of.assign(program_.num_values(), -1);
    v.workspace.assign(phase->ops.size(), -1);
    v.receive.assign(phase->ops.size(), -1);
    axis_ += static_cast<int32_t>(phase->ops.size()) + 2;
    return static_cast<int32_t>(plan_.variants.size()) - 1;
  }

  Status MakeVariants(int32_t turns) {
    if (program_.Carries()) return MakeCarriedVariants(turns);
    for (const auto& [phase, count] : program_.RunOrder()) {
      const auto used = static_cast<int32_t>(std::min<int64_t>(turns, count));
      const auto first = static_cast<int32_t>(plan_.variants.size());
      plan_.turns.emplace_back();
      for (int32_t t = 0; t < used; ++t) {
        plan_.turns.back().push_back(AddVariant(phase, t));
        if (t > 0) edges_.emplace_back(first + t - 1, first + t);
      }
      if (count > used) edges_.emplace_back(first + used - 1, first);
      if (first > 0) edges_.emplace_back(last_run_, first);
      last_run_ = first + static_cast<int32_t>((count - 1) % used);
    }
    if (!plan_.variants.empty()) edges_.emplace_back(last_run_, 0);
    return Ok{};
  }

  // A variant for each choice of places that a phase runs with.
  Status MakeCarriedVariants(int32_t turns) {
    INTERLACE_ASSIGN(const CarriedPlaces places, PlaceCarried(program_));
    places_.assign(places.saved_by.size(), -1);
    // Of a phase with a choice: its runs so far, and the first variants of those that they take turns with. Of each of
    // these, by what lives beside it: the variant.
    std::map<std::pair<const Phase*, std::vector<int32_t>>, std::pair<int32_t, std::vector<int32_t>>> known;
    std::map<std::pair<int32_t, std::vector<int32_t>>, int32_t> beside;
    std::set<std::pair<int32_t, int32_t>> edges;
    int32_t run = 0, before = -1;
    for (const auto& [phase, count] : program_.RunOrder()) {
      std::vector<int32_t>& variants = plan_.turns.emplace_back();
      for (int64_t i = 0; i < count; ++i, ++run) {
        const CarriedRun& at = places.runs[static_cast<size_t>(run)];
        std::vector<int32_t> choice = at.loads;
        choice.insert(choice.end(), at.saves.begin(), at.saves.end());
        auto& [ran, taking_turns] = known[{phase, choice}];
        const auto number = static_cast<size_t>(ran++ % turns);
        const auto next = static_cast<int32_t>(plan_.variants.size());
        if (number == taking_turns.size()) taking_turns.push_back(next);
        const auto [found, fresh] = beside.try_emplace({taking_turns[number], at.through}, next);
        if (fresh) {
          if (axis_ > (1 << 30) - static_cast<int32_t>(phase->ops.size()))
            return MakeError("the runs of a step are too many to be planned with what they save");
          AddVariant(phase, taking_turns[number], taking_turns[number]);
          choices_.push_back(std::move(choice));
          for (int32_t place : at.through) through_.emplace_back(next, place);
        }
        const int32_t variant = found->second;
        variants.push_back(variant);
        if (before >= 0) edges.emplace(before, variant);
        before = variant;
      }
    }
    if (before >= 0) edges.emplace(before, 0);
    edges_.assign(edges.begin(), edges.end());
    return Ok{};
  }

  // Everything of two variants lies at the same places.
  void JoinSame(const PlanVariant& a, const PlanVariant& b) {
    const auto join = [&](const std::vector<int32_t>& of_a, const std::vector<int32_t>& of_b) {
      for (size_t i = 0; i < of_a.size(); ++i) {
        if (of_a[i] >= 0 && of_b[i] >= 0) Join(of_a[i], of_b[i]);
      }
    };
    join(a.block_of, b.block_of);
    join(a.workspace, b.workspace);
    join(a.receive, b.receive);
  }

  // What is saved into a place, and loaded from it, is one storage, and alive in all runs between.
  void JoinPlaces() {
    for (size_t v = 0; v < choices_.size(); ++v) {
      const PlanVariant& variant = plan_.variants[v];
      size_t k = 0;
      for (const std::vector<Carried>* list : {&variant.phase->loads, &variant.phase->saves}) {
        for (const Carried& carried : *list) {
          const int32_t block = variant.block_of[carried.value];
          int32_t& of_place = places_[static_cast<size_t>(choices_[v][k++])];
          if (block < 0) continue;
          if (of_place < 0) of_place = block;
          Join(of_place, block);
        }
      }
    }
    for (const auto& [variant, place] : through_) {
      const int32_t block = places_[static_cast<size_t>(place)];
      const auto end = static_cast<int32_t>(plan_.variants[static_cast<size_t>(variant)].phase->ops.size());
      if (block >= 0) stays_.push_back({block, variant, -1, end});
    }
  }

  int32_t NewBlock(PlannedBlock block) {
    plan_.blocks.push_back(block);
    parent_.push_back(static_cast<int32_t>(parent_.size()));
    return parent_.back();
  }

  Status Collect(int32_t index) {
    PlanVariant& v = plan_.variants[index];
    const auto place_of_phase = static_cast<size_t>(v.phase - program_.phases.data());
    const auto count = static_cast<int32_t>(v.phase->ops.size());
    for (const StorageLife& life : liveness_[place_of_phase].storages) {
      if (life.bytes == 0 || LeftOut(life.root)) continue;
      const bool comes_back = life.first >= 0 && MoveOf(program_.op(v.phase->ops[life.first])) != nullptr;
      const bool state = program_.value(life.root).kind == ValueKind::kState;
      int32_t block = -1;
      if (state) {
        int32_t& own = state_block_.emplace(life.root, -1).first->second;
        block = own = own >= 0 ? own : NewBlock({PlannedBlock::What::kStorage, life.root, kNone, life.bytes});
      } else if (comes_back) {
        block = v.block_of[life.root];
      } else {
        block = NewBlock({PlannedBlock::What::kStorage, life.root, kNone, life.bytes});
      }
      if (!state) v.block_of[life.root] = block;
      moves_ = moves_ || state || comes_back;
      stays_.push_back({block, index, life.first, life.last});
    }
    std::unordered_map<ValueId, int32_t> waited;  // place of the last wait
    for (int32_t i = 0; i < count; ++i) {
      const Op& op = program_.op(v.phase->ops[i]);
      if (IsWait(op)) ForEachOperand(op, [&](ValueId id) { waited[id] = i; });
    }
    const auto workspace =
        place_of_phase < options_.workspace.size() ? options_.workspace[place_of_phase] : std::vector<int64_t>();
    for (int32_t i = 0; i < count; ++i) {
      const Op& op = program_.op(v.phase->ops[i]);
      if (i < static_cast<int32_t>(workspace.size()) && workspace[i] > 0) {
        v.workspace[i] = NewBlock({PlannedBlock::What::kWorkspace, kNone, op.id, workspace[i]});
        stays_.push_back({v.workspace[i], index, i, i});
      }
      if (!IsStart(op)) continue;
      std::vector<int32_t> kept;  // blocks that stay until the wait
      ForEachOperand(op, [&](ValueId id) {
        const int32_t block = BlockOf(v, program_.RootOf(id));
        if (block >= 0) kept.push_back(block);
      });
      if (const int64_t bytes = ReceiveBytes(program_, op, options_.receive_buffers); bytes > 0) {
        v.receive[i] = NewBlock({PlannedBlock::What::kReceive, kNone, op.id, bytes});
        int32_t last = -1;
        for (ValueId id : op.results) {
          const auto found = waited.find(id);
          last = std::max(last, found == waited.end() ? count : found->second);
        }
        stays_.push_back({v.receive[i], index, i, last});
        kept.push_back(v.receive[i]);
      }
      for (ValueId id : op.results) {
        if (id != kNone && !waited.contains(id) && !kept.empty()) pending_[index][id] = kept;
      }
    }
    waits_.push_back(std::move(waited));
    return Ok{};
  }

  bool LeftOut(ValueId root) const {
    return static_cast<size_t>(root) < options_.left_out.size() && options_.left_out[static_cast<size_t>(root)];
  }

  int32_t Find(int32_t block) {
    while (parent_[block] != block) block = parent_[block] = parent_[parent_[block]];
    return block;
  }

  // Of a root in this variant; of a state that moves, wherever it is in memory.
  int32_t BlockOf(const PlanVariant& v, ValueId root) const {
    const auto state = state_block_.find(root);
    return state != state_block_.end() ? state->second : v.block_of[root];
  }

  // What `from` gives and `to` takes is one storage.
  void HandOn(int32_t from, int32_t to) {
    const PlanVariant &a = plan_.variants[from], &b = plan_.variants[to];
    for (size_t i = 0; i < a.phase->gives.size() && i < b.phase->takes.size(); ++i) {
      const ValueId give = a.phase->gives[i], take = b.phase->takes[i];
      const int32_t x = a.block_of[program_.RootOf(give)], y = b.block_of[program_.RootOf(take)];
      if (x < 0 || y < 0 || program_.RootOf(give) != give || program_.RootOf(take) != take)
        continue;  // copied, or persistent
      Join(x, y);
    }
  }

  void Join(int32_t x, int32_t y) {
    const int32_t low = std::min(Find(x), Find(y)), high = std::max(Find(x), Find(y));
    parent_[high] = low;
    plan_.blocks[low].bytes = std::max(plan_.blocks[low].bytes, plan_.blocks[high].bytes);
  }

  void Renumber() {
    std::vector<int32_t> number(parent_.size(), -1);
    std::vector<PlannedBlock> blocks;
    for (int32_t i = 0; i < static_cast<int32_t>(parent_.size()); ++i) {
      if (Find(i) != i) continue;
      number[i] = static_cast<int32_t>(blocks.size());
      blocks.push_back(plan_.blocks[i]);
    }
    const auto renumber = [&](int32_t& block) {
      if (block >= 0) block = number[Find(block)];
    };
    for (PlanVariant& v : plan_.variants) {
      for (auto* list : {&v.block_of, &v.workspace, &v.receive}) {
        for (int32_t& block : *list) renumber(block);
      }
    }
    for (Stay& stay : stays_) renumber(stay.block);
    for (auto& [variant, pending] : pending_) {
      for (auto& [id, kept] : pending) {
        for (int32_t& block : kept) renumber(block);
      }
    }
    plan_.blocks = std::move(blocks);
  }

  // A transfer that a later phase waits for keeps its sources and its receive buffer until there.
  void FollowTransfers() {
    std::vector<std::pair<int32_t, ValueId>> todo;
    for (const auto& [variant, pending] : pending_) {
      for (const auto& [id, kept] : pending) todo.emplace_back(variant, id);
    }
    while (!todo.empty()) {
      const auto [from, id] = todo.back();
      todo.pop_back();
      const std::vector<int32_t> kept = pending_[from][id];
      const Phase& ended = *plan_.variants[from].phase;
      for (const auto& [a, to] : edges_) {
        if (a != from) continue;
        const PlanVariant& next = plan_.variants[to];
        for (size_t i = 0; i < ended.gives.size() && i < next.phase->takes.size(); ++i) {
          if (ended.gives[i] != id) continue;
          const ValueId take = next.phase->takes[i];
          const auto wait = waits_[to].find(take);
          const bool goes_on = wait == waits_[to].end();
          std::vector<int32_t> more;
          for (int32_t block : kept) {
            const Stay stay{block, to, -1, goes_on ? static_cast<int32_t>(next.phase->ops.size()) : wait->second};
            if (!seen_.insert({{to, take}, block}).second) continue;
            stays_.push_back(stay);
            more.push_back(block);
          }
          if (!goes_on || more.empty()) continue;
          std::vector<int32_t>& list = pending_[to][take];
          list.insert(list.end(), more.begin(), more.end());
          todo.emplace_back(to, take);
        }
      }
    }
  }

  // Spans of every block on the axis. False: two storages that share a block live together.
  bool Spans() {
    plan_.lives.resize(plan_.blocks.size());
    for (size_t i = 0; i < plan_.blocks.size(); ++i) plan_.lives[i].bytes = ArenaBytes(plan_.blocks[i].bytes);
    // What begins while something of the same place is still alive is another storage.
    std::sort(stays_.begin(), stays_.end(), [](const Stay& a, const Stay& b) {
      return a.block != b.block       ? a.block < b.block
             : a.variant != b.variant ? a.variant < b.variant
                                      : a.first < b.first;
    });
    for (const Stay& stay : stays_) {
      const int32_t axis = plan_.variants[stay.variant].axis + 1;
      const LifeSpan span{axis + stay.first, axis + stay.last};
      std::vector<LifeSpan>& spans = plan_.lives[stay.block].spans;
      if (!spans.empty() && span.first <= spans.back().last) {
        if (stay.first >= 0) return false;
        spans.back().last = std::max(spans.back().last, span.last);  // both are what was there at the beginning
        continue;
      }
      spans.push_back(span);
    }
    return true;
  }

  Status Total() {
    std::map<int32_t, int64_t> change;
    double sum = 0;
    for (size_t i = 0; i < plan_.blocks.size(); ++i) {
      sum += static_cast<double>(plan_.lives[i].bytes);
      for (const LifeSpan& s : plan_.lives[i].spans) {
        change[s.first] += plan_.blocks[i].bytes;
        change[s.last + 1] -= plan_.blocks[i].bytes;
      }
    }
    if (sum > 4e18) return MakeError("the bytes of a step do not fit in 64 bits");
    int64_t live = 0;
    for (const auto& [time, bytes] : change) plan_.live_bytes = std::max(plan_.live_bytes, live += bytes);
    return Ok{};
  }

  const Program& program_;
  const MemoryPlanOptions& options_;
  const std::vector<PhaseLiveness>& liveness_;
  MemoryPlan plan_;
  std::vector<std::pair<int32_t, int32_t>> edges_;  // variants that follow each other
  int32_t axis_ = 0, last_run_ = 0;
  // Of what runs save: by place its block; by variant the places of its loads and saves; variants that a place lives
  // through.
  std::vector<int32_t> places_;
  std::vector<std::vector<int32_t>> choices_;
  std::vector<std::pair<int32_t, int32_t>> through_;
  std::vector<int32_t> parent_;                       // of blocks that are one
  std::unordered_map<ValueId, int32_t> state_block_;  // of states that move
  bool moves_ = false;                                // something goes out and comes back
  std::vector<Stay> stays_;
  std::map<int32_t, Pending> pending_;  // by variant: started there or before, and not waited for at its end
  std::set<std::pair<std::pair<int32_t, ValueId>, int32_t>> seen_;
  std::vector<std::unordered_map<ValueId, int32_t>> waits_;  // by variant
};

}  // namespace

// Whether equal parts along the dimension that the attribute names are pieces of memory, one behind the other.
static bool LieInARow(const Op& op, const char* attribute, const Type& type) {
  const Arg* along = op.Attr(attribute);
  if (along == nullptr) return true;  // of units: flat
  for (int64_t i = 0; i < along->integer.value && i < static_cast<int64_t>(type.sizes.size()); ++i) {
    if (!(type.sizes[static_cast<size_t>(i)] == Dim(1))) return false;
  }
  return true;
}

int64_t ReceiveBytes(const Program& program, const Op& op, bool own) {
  const Exchange exchange = IsStart(op) ? TraitsOf(op).exchange : Exchange::kNone;
  if (!own) {
    int64_t sum = 0;
    for (size_t i = 0; i < op.units.size() && op.kind == OpKind::kReduceStart; ++i) {
      const Unit& unit = program.units[op.units[i]];
      if (unit.parted()) sum += ArenaBytes(unit.shard * DTypeBytes(program.value(op.results[i]).type.dtype));
    }
    return sum;
  }
  if (exchange == Exchange::kNone || exchange == Exchange::kBroadcast || exchange == Exchange::kPointToPoint) return 0;
  const auto [axes, replicas] = RanksOf(program, op);
  int64_t others = program.AxisSize(axes) - 1;
  const int64_t copies = program.AxisSize(replicas);
  // In rows and columns: the row's parts for this column, their sums, and what the column adds to them; the sums of
  // replicas come into memory of their own, behind what is added up within the shard axes (transport/collectives.h).
  const int64_t row = exchange == Exchange::kReduce && copies < 2 ? RowOf(program.mesh, axes) : 0;
  if (row > 0) {
    const int64_t column = (others + 1) / row;
    others = (row - 1) * column + 2 * (column - 1);
  }
  others += copies - 1;
  const bool to_all = exchange == Exchange::kAllToAll;
  int64_t sum = 0;
  for (ValueId id : op.results) {
    if (id == kNone) continue;
    const Type& type = program.value(id).type;
    const Result<int64_t> bytes = program.StorageBytes(type);
    if (!bytes.ok() || *bytes >= int64_t{1} << 40) continue;
    if (exchange == Exchange::kGather || to_all) {
      if (!LieInARow(op, to_all ? "to" : "dim", type)) sum += ArenaBytes(*bytes);  // else they come where they belong
    } else {
      sum += ArenaBytes(*bytes) * others;
    }
  }
  // What is sent in other pieces than it lies in is packed first.
  if (op.kind != OpKind::kReduceScatterStart && !to_all) return sum;
  for (const Arg& arg : op.args) {
    if (arg.kind != Arg::Kind::kValue) continue;
    const Type& type = program.value(arg.value).type;
    const Result<int64_t> bytes = program.StorageBytes(type);
    if (bytes.ok() && *bytes < int64_t{1} << 40 && !LieInARow(op, "dim", type)) sum += ArenaBytes(*bytes);
  }
  return sum;
}

Result<MemoryPlan> PlanMemory(const Program& program, const MemoryPlanOptions& options) {
  std::vector<PhaseLiveness> liveness;
  for (const Phase& phase : program.phases) {
    INTERLACE_ASSIGN(PhaseLiveness life, ComputeLiveness(program, phase));
    liveness.push_back(std::move(life));
  }
  const bool carries = program.Carries();
  const int32_t most = carries ? kMostTurnsCarried : kMostTurns;
  for (int32_t turns = 1; turns <= most; turns = carries ? 2 * turns : turns + 1) {
    INTERLACE_ASSIGN(std::optional<MemoryPlan> plan, Planner(program, options, liveness).Run(turns));
    if (plan) return std::move(*plan);
  }
  return MakeError("more than ", most,
                   " micro-batches or steps hold the same handed-on value at once; wait for transfers sooner");
}

}  // namespace interlace
