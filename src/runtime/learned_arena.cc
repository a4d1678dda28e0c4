#include "runtime/learned_arena.h"

#include <algorithm>

#include "ir/text.h"

namespace interlace {

namespace {

constexpr int kMostPlans = 5;  // after so many, what still changes from step to step is left to torch's allocator

}  // namespace

Status LearnedArena::Make(const std::vector<at::Tensor>& fixed) {
  if (needs_.empty()) {
    for (const Phase& phase : program_.phases) needs_.emplace_back(phase.ops.size());
    learning_ = true;
    hooked_ = device_.is_cpu() || InstallDeviceHook(device_);
  }
  if (!device_.is_cpu()) {  // whose memory is taken at once; what lies there is dead between steps
    if (const std::shared_ptr<ArenaMemory> before = floor_->lock()) before->GiveBack();
  }
  INTERLACE_ASSIGN(std::unique_ptr<StepArena> arena, StepArena::Create(program_, geometry_, needs_, left_out_, device_));
  wanted_bytes_ = arena->plan().taken_bytes;
  INTERLACE_TRY(arena->TakeMemory(device_));
  wanted_bytes_ = 0;
  arena_ = std::move(arena);
  if (!device_.is_cpu()) *floor_ = arena_->shared_memory();  // also before its next step, as far as others go
  MakeTensors(fixed);
  return Ok{};
}

void LearnedArena::MakeTensors(const std::vector<at::Tensor>& fixed) {
  const MemoryPlan& plan = arena_->plan();
  slots_of_turn_.assign(1, fixed);
  for (size_t v = 0; v < plan.variants.size(); ++v) {
    const auto turn = static_cast<size_t>(plan.variants[v].turn);
    if (turn >= slots_of_turn_.size()) slots_of_turn_.resize(turn + 1, fixed);
    arena_->AddTensors(static_cast<int32_t>(v), slots_of_turn_[turn]);
  }
}

void LearnedArena::Clear() {
  slots_of_turn_.clear();
  // What was handed on to the next step may still lie there, and goes with the tensors that hold it.
  if (arena_ && floor_->lock() == arena_->shared_memory()) floor_->reset();
  arena_.reset();
}

void LearnedArena::TurnOff(std::string why) {
  why_off_ = std::move(why);
  Clear();
  learning_ = false;
}

std::vector<at::Tensor> LearnedArena::ReceiveBuffers(int32_t variant) const {
  std::vector<at::Tensor> out;
  const size_t ops = arena_->plan().variants[variant].phase->ops.size();
  for (size_t i = 0; i < ops; ++i) out.push_back(arena_->ReceiveBuffer(variant, static_cast<int32_t>(i)));
  return out;
}

void LearnedArena::ExpectIn(int32_t variant, Plan& plan) const {
  const std::vector<OpNeeds>& needs = NeedsOf(plan.phase);
  for (Instruction& at : plan.instructions) {
    at.expect_begin = static_cast<int32_t>(plan.expected.size());
    arena_->Expected(variant, at.index, needs[at.index], plan.expected);
    at.expect_end = static_cast<int32_t>(plan.expected.size());
  }
}

void LearnedArena::BeginStep() {
  if (arena_) ArenaHook::Begin(learning_ ? &log_ : nullptr, device_.type());
}

// The arena of the executor that ran before gives its memory back.
Result<bool> LearnedArena::TakeTheFloor() {
  const std::shared_ptr<ArenaMemory> before = floor_->lock();
  if (!arena_) {
    if (before) before->GiveBack();
    floor_->reset();
    return false;
  }
  const std::shared_ptr<ArenaMemory>& own = arena_->shared_memory();
  if (before != own && before) before->GiveBack();
  *floor_ = own;
  wanted_bytes_ = arena_->plan().taken_bytes;
  INTERLACE_ASSIGN(const bool stayed, own->TakeBack());
  wanted_bytes_ = 0;
  own->UseHere();
  return !stayed;
}

// What a phase hands on has its place all the same: others expect it there.
void LearnedArena::LeaveOut(ValueId root) {
  const auto count = static_cast<size_t>(program_.num_values());
  if (handed_on_.empty()) {
    handed_on_.resize(count);
    for (const Phase& phase : program_.phases) {
      for (ValueId id : phase.Outgoing()) handed_on_[static_cast<size_t>(program_.RootOf(id))] = true;
    }
  }
  left_out_.resize(count);
  const auto at = static_cast<size_t>(root);
  if (handed_on_[at] || left_out_[at]) return;
  left_out_[at] = needs_changed_ = true;
}

void LearnedArena::Learn(const Instruction& at) {
  OpNeeds& known = (*needs_now_)[at.index];
  const std::vector<const void*>& copied = ArenaHook::Copied();
  if (log_.empty() && known.blocks.empty() && (hooked_ || copied.empty())) return;
  std::vector<std::pair<const void*, ValueId>> results;
  for (ValueId id : program_.op(at.op).results) {
    if (id == kNone || program_.RootOf(id) != id) continue;
    const at::Tensor& place = (*slots_now_)[id];
    if (place.defined()) results.emplace_back(place.const_data_ptr(), id);
  }
  for (const auto& [place, root] : results) {
    if (!hooked_ && std::find(copied.begin(), copied.end(), place) != copied.end()) LeaveOut(root);
  }
  OpNeeds needs = interlace::NeedsOf(log_, results);
  if (needs == known) return;
  known = std::move(needs);
  needs_changed_ = true;
}

bool LearnedArena::EndStep(int64_t outside_bytes) {
  if (!arena_) return false;
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
    return false;
  }
  first_peak_bytes_ = std::max(first_peak_bytes_, top() + outside_bytes);
  learning_ = needs_changed_ && ++plans_outgrown_ < kMostPlans;
  return std::exchange(needs_changed_, false);
}

std::vector<std::vector<int64_t>> LearnedArena::Workspaces() const {
  std::vector<std::vector<int64_t>> out;
  for (const std::vector<OpNeeds>& phase : needs_) {
    std::vector<int64_t>& bytes = out.emplace_back();
    for (const OpNeeds& op : phase) bytes.push_back(op.workspace);
  }
  return out;
}

ArenaStats LearnedArena::Statistics(const std::vector<Plan>& plans, int64_t outside_bytes) const {
  ArenaStats out;
  out.why_not = why_off_;
  if (!arena_) return out;
  const MemoryPlan& plan = arena_->plan();
  out.on = true;
  out.settled = !learning_;
  out.planned_bytes = plan.taken_bytes;
  out.live_bytes = plan.live_bytes;
  out.fragmentation = plan.Fragmentation();
  out.resident_bytes = arena_->memory().ResidentBytes();
  out.first_peak_bytes = first_peak_bytes_;
  out.outside_peak_bytes = outside_bytes;
  // The highest byte that a tensor of the step or a served request can touch.
  for (const Plan& p : plans) {
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
  for (ValueId id = 0; id < static_cast<ValueId>(left_out_.size()); ++id) {
    if (left_out_[static_cast<size_t>(id)])
      out.kept.push_back({PrintOp(program_, program_.op(program_.value(id).def)), geometry_[id].end_bytes(), 1});
  }
  for (const UnforeseenBlock& u : unforeseen_)
    out.unforeseen.push_back({u.op < 0 ? "between ops" : PrintOp(program_, program_.op(u.op)), u.bytes, u.times});
  return out;
}

}  // namespace interlace
