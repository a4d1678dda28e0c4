#include "ir/testing/arena_replay.h"

#include <map>
#include <unordered_map>

#include "ir/op_table.h"
#include "ir/text.h"

namespace interlace::testing {
namespace {

struct Stay {
  int64_t offset = -1, bytes = 0;
  uint32_t mark = 0;
};

class Replay {
 public:
  Replay(const Program& program, const MemoryPlan& plan)
      : program_(program), plan_(plan), cells_(static_cast<size_t>(plan.packing.top / kArenaAlignment) + 1, 0) {}

  Status Step() {
    size_t entry = 0;
    for (const auto& [phase, first, count] : program_.RunsOfStep()) {
      for (int64_t i = 0; i < count; ++i) {
        micro_batch_ = first + i * program_.width;
        INTERLACE_TRY(RunPhase(plan_.variants[static_cast<size_t>(plan_.VariantOf(entry, i))]));
      }
      ++entry;
    }
    return Ok{};
  }

 private:
  Stay Write(int32_t block) {
    const Stay stay{plan_.OffsetOf(block), plan_.blocks[static_cast<size_t>(block)].bytes, ++last_mark_};
    for (int64_t at = stay.offset; at < stay.offset + stay.bytes; at += kArenaAlignment) {
      cells_[static_cast<size_t>(at / kArenaAlignment)] = stay.mark;
    }
    return stay;
  }

  Status Read(const Stay& stay, const Op& op, std::string_view what) const {
    for (int64_t at = stay.offset; at < stay.offset + stay.bytes; at += kArenaAlignment) {
      if (cells_[static_cast<size_t>(at / kArenaAlignment)] != stay.mark) {
        return MakeError(what, " at ", at, " were overwritten before ", PrintOp(program_, op));
      }
    }
    return Ok{};
  }

  Status RunPhase(const PlanVariant& v) {
    const Phase& phase = *v.phase;
    for (size_t i = 0; i < phase.takes.size(); ++i) {
      const ValueId take = phase.takes[i];
      const int32_t block = v.block_of[program_.RootOf(take)];
      if (block < 0 || program_.RootOf(take) != take) continue;
      // Nothing was given in the first step; what is given in another place is copied.
      const bool here = i < given_.size() && given_[i].offset == plan_.OffsetOf(block);
      if (i < given_.size() && given_root_[i] && !here) {
        return MakeError("%", take, " is taken at ", plan_.OffsetOf(block), " but was given at ", given_[i].offset);
      }
      now_[take] = here ? given_[i] : Write(block);
      if (i < given_flights_.size() && !given_flights_[i].empty()) flights_[take] = given_flights_[i];
    }
    for (const Carried& load : phase.loads) {
      const Stay saved = saved_[{load.name, micro_batch_}];
      const int32_t block = v.block_of[load.value];
      if (block >= 0 && saved.offset != plan_.OffsetOf(block)) {
        return MakeError("%", load.value, " is loaded at ", plan_.OffsetOf(block), " but was saved at ", saved.offset);
      }
      if (block >= 0) now_[load.value] = saved;
    }
    for (size_t i = 0; i < phase.ops.size(); ++i) INTERLACE_TRY(RunOp(v, program_.op(phase.ops[i]), i));
    given_.clear(), given_root_.clear(), given_flights_.clear();
    for (ValueId give : phase.gives) {
      const ValueId root = program_.RootOf(give);
      given_.push_back(now_.contains(root) ? now_[root] : Stay{});
      given_root_.push_back(root == give && now_.contains(root));
      given_flights_.push_back(flights_.contains(give) ? flights_[give] : std::vector<Stay>());
    }
    for (const Carried& save : phase.saves) saved_[{save.name, micro_batch_}] = now_[save.value];
    flights_.clear();
    now_.clear();
    return Ok{};
  }

  Status RunOp(const PlanVariant& v, const Op& op, size_t place) {
    std::vector<ValueId> operands;
    ForEachOperand(op, [&](ValueId id) { operands.push_back(id); });
    std::vector<Stay> flight;
    for (ValueId id : operands) {
      if (now_.contains(program_.RootOf(id))) flight.push_back(now_[program_.RootOf(id)]);
    }
    // What the op writes while it reads.
    if (v.workspace[place] >= 0) Write(v.workspace[place]);
    if (v.receive[place] >= 0) flight.push_back(Write(v.receive[place]));
    for (ValueId id : op.results) {
      if (id != kNone && program_.RootOf(id) == id && v.block_of[id] >= 0) now_[id] = Write(v.block_of[id]);
    }
    if (op.kind != OpKind::kView) {
      for (ValueId id : operands) INTERLACE_TRY(Touch(op, id));
      for (ValueId id : op.writes) INTERLACE_TRY(Touch(op, id));
      for (ValueId id : op.results) {
        if (id != kNone) INTERLACE_TRY(Touch(op, id));
      }
    }
    for (ValueId id : operands) {
      const auto found = flights_.find(id);
      if (!IsWait(op) || found == flights_.end()) continue;
      for (const Stay& stay : found->second) INTERLACE_TRY(Read(stay, op, "sources or receive buffers of a transfer"));
      flights_.erase(found);
    }
    if (IsStart(op)) {
      for (ValueId id : op.results) {
        if (id != kNone) flights_[id] = flight;
      }
    }
    if (op.kind == OpKind::kRelease) {
      for (ValueId id : operands) now_.erase(program_.RootOf(id));
    }
    return Ok{};
  }

  Status Touch(const Op& op, ValueId id) const {
    const auto found = now_.find(program_.RootOf(id));
    return found == now_.end() ? Status(Ok{}) : Read(found->second, op, "bytes of %" + std::to_string(found->first));
  }

  const Program& program_;
  const MemoryPlan& plan_;
  std::vector<uint32_t> cells_;  // by offset / kArenaAlignment: mark of who wrote there last
  uint32_t last_mark_ = 0;
  std::unordered_map<ValueId, Stay> now_;                   // roots that are in the arena
  std::unordered_map<ValueId, std::vector<Stay>> flights_;  // by result of a start: what must stay until its wait
  int64_t micro_batch_ = 0;
  std::map<std::pair<std::string, int64_t>, Stay> saved_;  // by name and micro-batch
  std::vector<Stay> given_;
  std::vector<char> given_root_;
  std::vector<std::vector<Stay>> given_flights_;
};

}  // namespace

Status ReplayPlan(const Program& program, const MemoryPlan& plan, int steps) {
  Replay replay(program, plan);
  for (int step = 0; step < steps; ++step) INTERLACE_TRY(replay.Step());
  return Ok{};
}

}  // namespace interlace::testing
