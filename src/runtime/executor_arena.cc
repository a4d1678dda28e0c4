// Executor, fourth part: the arena of a step (arena.h).
#include <algorithm>

#include "ir/liveness.h"
#include "ir/text.h"
#include "runtime/executor.h"
#include "runtime/step_scope.h"

namespace interlace {

namespace {

constexpr int kMostPlans = 5;  // after so many, what still changes from step to step is left to torch's allocator

}  // namespace

// Tensors at the places of the plan, and plans of the phases with them.
Status Executor::BuildArena() {
  INTERLACE_ASSIGN(arena_, StepArena::Create(program_, geometry_, needs_, /*receive_buffers=*/true));
  const MemoryPlan& plan = arena_->plan();
  slots_of_turn_.assign(1, fixed_);
  for (size_t v = 0; v < plan.variants.size(); ++v) {
    const auto turn = static_cast<size_t>(plan.variants[v].turn);
    if (turn >= slots_of_turn_.size()) slots_of_turn_.resize(turn + 1, fixed_);
    arena_->AddTensors(static_cast<int32_t>(v), slots_of_turn_[turn]);
  }
  plans_.clear();
  for (size_t v = 0; v < plan.variants.size(); ++v) {
    const PlanVariant& variant = plan.variants[v];
    std::vector<at::Tensor> receive;
    for (size_t i = 0; i < variant.phase->ops.size(); ++i)
      receive.push_back(arena_->ReceiveBuffer(static_cast<int32_t>(v), static_cast<int32_t>(i)));
    INTERLACE_ASSIGN(Plan built,
                     BuildPhase(*variant.phase, slots_of_turn_[variant.turn], /*keep_operands=*/false, &receive));
    const auto& needs = needs_[variant.phase - program_.phases.data()];
    for (Instruction& at : built.instructions) {
      at.expect_begin = static_cast<int32_t>(built.expected.size());
      arena_->Expected(static_cast<int32_t>(v), at.index, needs[at.index], built.expected);
      at.expect_end = static_cast<int32_t>(built.expected.size());
    }
    plans_.push_back(std::move(built));
  }
  ResetSlots();
  return Ok{};
}

void Executor::ResetSlots() {
  if (arena_) {
    turn_ = 0;
    frame_.slots = slots_of_turn_[0];
    parked_slots_ = slots_of_turn_;
  } else {
    frame_.slots = fixed_;
  }
}

void Executor::UseTurn(int32_t turn) {
  if (turn == turn_) return;
  parked_slots_[turn_].swap(frame_.slots);
  frame_.slots.swap(parked_slots_[turn]);
  turn_ = turn;
}

void Executor::Learn(const Plan& plan, const Instruction& at) {
  OpNeeds& known = needs_[plan.phase - program_.phases.data()][at.index];
  if (log_.empty() && known.blocks.empty()) return;
  std::vector<std::pair<const void*, ValueId>> results;
  for (ValueId id : program_.op(at.op).results) {
    if (id == kNone || program_.RootOf(id) != id) continue;
    const at::Tensor& place = slots_of_turn_[turn_][id];
    if (place.defined()) results.emplace_back(place.const_data_ptr(), id);
  }
  OpNeeds needs = NeedsOf(log_, results);
  if (needs == known) return;
  known = std::move(needs);
  needs_changed_ = true;
}

// After a step: another plan if ops asked for something else than this one foresaw.
Status Executor::SettleArena() {
  if (!arena_) return Ok{};
  if (!learning_) {
    for (const UnforeseenBlock& u : ArenaHook::Unforeseen()) {
      const auto found = std::find_if(unforeseen_.begin(), unforeseen_.end(),
                                      [&](const UnforeseenBlock& v) { return v.op == u.op && v.bytes == u.bytes; });
      if (found != unforeseen_.end()) {
        found->times += u.times;
      } else if (unforeseen_.size() < 256) {
        unforeseen_.push_back(u);
      }
    }
    return Ok{};
  }
  first_peak_bytes_ = std::max(first_peak_bytes_, arena_->plan().top() + peak_extra_);
  learning_ = needs_changed_ && ++plans_made_ < kMostPlans;
  peak_extra_ = 0;
  if (!needs_changed_) return Ok{};
  needs_changed_ = false;
  StepScope scope(device_);
  try {
    return BuildArena();
  } catch (const std::exception& error) {
    return MakeError("cannot prepare the program: ", MessageOf(error));
  }
}

// One of the executors that share states runs at a time: the arena of the one before gives its pages back.
void Executor::TakeTheFloor() {
  if (!arena_) return;
  const std::shared_ptr<ArenaMemory> before = floor_->lock();
  if (before == arena_->shared_memory()) return;
  if (before) before->GiveBack();
  *floor_ = arena_->shared_memory();
}

std::vector<std::vector<int64_t>> Executor::Workspaces() const {
  std::vector<std::vector<int64_t>> out;
  for (const std::vector<OpNeeds>& phase : needs_) {
    std::vector<int64_t>& bytes = out.emplace_back();
    for (const OpNeeds& op : phase) bytes.push_back(op.workspace);
  }
  return out;
}

ArenaStats Executor::ArenaStatistics() const {
  ArenaStats out;
  out.why_not = arena_off_;
  if (!arena_) return out;
  const MemoryPlan& plan = arena_->plan();
  out.on = true;
  out.settled = !learning_;
  out.planned_bytes = plan.top();
  out.live_bytes = plan.live_bytes;
  out.fragmentation = plan.Fragmentation();
  out.resident_bytes = arena_->memory().ResidentBytes();
  out.first_peak_bytes = first_peak_bytes_;
  out.outside_peak_bytes = peak_extra_;
  // The highest byte that a tensor of the step or a served request can touch.
  for (const Plan& p : plans_) {
    for (const ExpectedBlock& e : p.expected) {
      if (e.place != nullptr) out.top_bytes = std::max(out.top_bytes, e.place + e.bytes - arena_->memory().data());
    }
  }
  for (const std::vector<at::Tensor>& slots : slots_of_turn_) {
    for (const at::Tensor& t : slots) {
      if (!t.defined() || t.numel() == 0) continue;
      const char* end = static_cast<const char*>(t.storage().data()) + t.storage().nbytes();
      const int64_t at = end - arena_->memory().data();
      if (at > 0 && at <= arena_->memory().bytes()) out.top_bytes = std::max(out.top_bytes, at);
    }
  }
  out.top_bytes = ArenaBytes(out.top_bytes);
  for (size_t p = 0; p < needs_.size(); ++p) {
    for (size_t i = 0; i < needs_[p].size(); ++i) {
      for (const OpNeeds::Block& block : needs_[p][i].blocks) {
        if (block.where == OpNeeds::Block::Where::kElsewhere)
          out.kept.push_back({PrintOp(program_, program_.op(program_.phases[p].ops[i])), block.bytes, 1});
      }
    }
  }
  for (const UnforeseenBlock& u : unforeseen_)
    out.unforeseen.push_back({u.op < 0 ? "between ops" : PrintOp(program_, program_.op(u.op)), u.bytes, u.times});
  return out;
}

}  // namespace interlace
