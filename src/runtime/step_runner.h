// step_runner.h — runs the phases of a step op by op. There is one loop; what else is to be done at each op is an
// observer's business, and a template parameter, so that a plain step pays nothing for it.
//
//   NoObserver      nothing                                       here
//   LearnedArena    notes what kernels ask the allocator for      learned_arena.h
//   StepRecorder    takes times and bytes                         step_recorder.h
//   Inspection      looks at what results hold, may stop          debug.h
//   PendingStates   brings states into memory and back out        moving_states.h
//   PhaseGraphs     gives whole phases to the device at once      phase_graphs.h
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/memory_plan.h"
#include "ir/program.h"
#include "runtime/allocator.h"
#include "runtime/op_kernel.h"
#include "runtime/plan.h"
#include "runtime/step_scope.h"

namespace interlace {

struct NoObserver {
  static constexpr bool kServed = true;   // the arena may serve what kernels ask for
  static constexpr bool kGraphs = false;  // runs phases itself: RunPhase(runner, plan)
  static constexpr bool kOneByOne = false;  // each op has done its work when it has run
  void BeginPhase(const Plan&, const PlanVariant* /*of the arena, or nullptr*/, size_t /*micro_batch*/) {}
  bool Skips(const Instruction&) const { return false; }
  Status Before(const Instruction&) { return Ok{}; }
  void Run(const Instruction& at, Frame& frame) { at.run(at.data, frame); }
  // After the op, with its operands; false: the step stops here.
  bool After(const Plan&, const Instruction&, const Frame&) { return true; }
  // When what died there has gone and transfers have been looked at.
  Status Ended(const Instruction&) { return Ok{}; }
  bool stopped() const { return false; }
};

// The inputs of a step: micro_batches[i][j] is input j of micro-batch i.
using MicroBatches = std::vector<std::vector<at::Tensor>>;

class StepRunner {
 public:
  StepRunner(const Program& program, const std::vector<at::Tensor>& fixed, c10::Device device)
      : frame(device), program_(program), fixed_(fixed) {}

  Frame frame;

  void SetComms(const std::map<std::string, std::shared_ptr<Comm>>& comms);
  const std::vector<std::shared_ptr<Comm>>& comms() const { return comms_; }
  void SetRandom(std::unique_ptr<KeyedRandom> random);
  // Puts the slots back to what is fixed: `of_turn` in the arena, nullptr without one.
  void ResetSlots(const std::vector<std::vector<at::Tensor>>* of_turn);
  // Forgets what a step that failed has left.
  void DropTemporaries(const std::vector<std::vector<at::Tensor>>* of_turn);
  // Nothing that a phase gave waits for the next.
  bool between_steps() const { return handed_on_.empty(); }
  // Whether the last op that failed had asked for more memory than there is.
  bool out_of_memory() const { return out_of_memory_; }

  // Runs the program's order. `plans`: by variant of `arena`; without it by index into Program::phases. Without
  // `update` only what takes inputs runs.
  template <typename Observer>
  Status RunStep(const std::vector<Plan>& plans, const MemoryPlan* arena, MicroBatches& micro_batches, int64_t step,
                 bool update, Observer& observer);
  template <typename Observer>
  Status RunPhase(const Plan& plan, Observer& observer);

  // The op that runs now or ran last, and its step. Any thread may ask, also while a step hangs.
  struct Place {
    int64_t step = -1;
    std::string op, units, module;  // the op's text; "u3 u4"; a module path. Empty: no op yet
  };
  Place Where() const;
  void AtOp(OpId op) {
    at_op_.store(op, std::memory_order_relaxed);
    MemoryScope::SetCurrentOp(op);
  }

 private:
  Error OpFailure(OpId op, const std::string& what) const;
  Error KeptBlock(OpId op) const;
  void UseTurn(int32_t turn);
  // Around a run: what it takes, and loads of its micro-batch, into its slots; what it gives and saves out of them.
  Status EnterPhase(const Phase& phase, const PlanVariant* variant, size_t micro_batch);
  void LeavePhase(const Phase& phase, const PlanVariant* variant, size_t micro_batch);
  Status Take(const Phase& phase, const PlanVariant* variant);
  // By micro-batch: how many runs of a step see its inputs.
  std::vector<int32_t> UsesOfInputs(const std::vector<Program::StepRun>& runs) const;
  // Into the slots; at the last of their uses nothing else holds them any more.
  Status BindInputs(MicroBatches& micro_batches, size_t first, std::vector<int32_t>& uses);
  bool IsFixed(ValueId id) const { return fixed_[id].defined(); }
  // Whether the value has a place of its own in the arena, for the variant that runs.
  bool InArena(const PlanVariant* variant, ValueId id) const {
    return variant != nullptr && variant->block_of[program_.RootOf(id)] >= 0;
  }

  const Program& program_;
  const std::vector<at::Tensor>& fixed_;  // by value id
  std::vector<std::shared_ptr<Comm>> comms_;
  std::unique_ptr<KeyedRandom> random_;
  std::vector<std::vector<at::Tensor>> parked_slots_;  // of turns that do not run
  int32_t turn_ = 0;
  bool out_of_memory_ = false;
  std::vector<std::pair<at::Tensor, int32_t>> handed_on_;  // gives of the last phase, with their transfers
  // By name and micro-batch: what runs saved that has no place in the arena, where what is saved lies until its load,
  // and messages under way.
  struct Saved {
    at::Tensor tensor;
    int32_t transfer = -1;
  };
  std::map<std::pair<std::string_view, size_t>, Saved> saved_;
  // What Where() tells; written without an order, because a place that is one op old tells as much.
  std::atomic<OpId> at_op_{kNone};
  std::atomic<int64_t> at_step_{-1};
};

// Index into the plans of run `i` of an entry of the program's order.
inline size_t PlanIndexOf(const Program& program, const MemoryPlan* arena, const Phase* phase, size_t entry,
                          int64_t i) {
  if (arena == nullptr) return static_cast<size_t>(phase - program.phases.data());
  return static_cast<size_t>(arena->variants[arena->VariantOf(entry, i)].same_as);
}

template <typename Observer>
Status StepRunner::RunPhase(const Plan& plan, Observer& observer) {
  const Instruction* at = plan.instructions.data();
  const Instruction* const end = at + plan.instructions.size();
  frame.one_by_one = Observer::kOneByOne;
  try {
    for (; at != end; ++at) {
      if (observer.Skips(*at)) continue;
      INTERLACE_TRY(observer.Before(*at));
      AtOp(at->op);
      if constexpr (Observer::kServed)
        ArenaHook::Expect(at->op, plan.expected.data() + at->expect_begin, plan.expected.data() + at->expect_end);
      observer.Run(*at, frame);
      if (!observer.After(plan, *at, frame)) return Ok{};
      if (Observer::kServed && ArenaHook::Outstanding() != 0) return KeptBlock(at->op);
      for (int32_t i = at->free_begin; i < at->free_end; ++i) frame.slots[plan.frees[i]].reset();
      for (const auto& comm : comms_) comm->Progress();  // transfers go on in this thread (transport/mesh.h)
      INTERLACE_TRY(observer.Ended(*at));
    }
  } catch (const std::exception& error) {
    out_of_memory_ = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
    return OpFailure(at->op, MessageOf(error));
  }
  frame.counters.ops += static_cast<int64_t>(plan.instructions.size());
  return Ok{};
}

template <typename Observer>
Status StepRunner::RunStep(const std::vector<Plan>& plans, const MemoryPlan* arena, MicroBatches& micro_batches,
                           int64_t step, bool update, Observer& observer) {
  at_step_.store(step, std::memory_order_relaxed);
  out_of_memory_ = false;
  frame.BeginStep();
  const std::vector<Program::StepRun> runs = program_.RunsOfStep();
  std::vector<int32_t> uses = UsesOfInputs(runs);
  for (size_t entry = 0; entry < runs.size(); ++entry) {
    const Phase& phase = *runs[entry].phase;
    const bool takes_inputs = phase.kind == PhaseKind::kMicroBatch;
    if (!takes_inputs && !update) continue;
    for (int64_t i = 0; i < runs[entry].count; ++i) {
      const size_t micro_batch = takes_inputs ? static_cast<size_t>(runs[entry].first + i * program_.width)
                                              : static_cast<size_t>(program_.accumulation);
      const size_t index = PlanIndexOf(program_, arena, &phase, entry, i);
      const Plan& plan = plans[index];
      const PlanVariant* variant = arena != nullptr ? &arena->variants[index] : nullptr;
      if (variant != nullptr) UseTurn(variant->turn);
      frame.micro_batch = static_cast<int64_t>(micro_batch);
      INTERLACE_TRY(EnterPhase(phase, variant, micro_batch));
      if (random_) random_->SetPosition(static_cast<uint64_t>(step), micro_batch);
      if (takes_inputs) INTERLACE_TRY(BindInputs(micro_batches, micro_batch, uses));
      for (ValueId id : plan.unused) frame.slots[id].reset();
      observer.BeginPhase(plan, variant, micro_batch);
      if constexpr (Observer::kGraphs) {
        INTERLACE_TRY(observer.RunPhase(*this, plan));
      } else {
        INTERLACE_TRY(RunPhase(plan, observer));
      }
      if (observer.stopped()) return Ok{};
      LeavePhase(phase, variant, micro_batch);
    }
  }
  return Ok{};
}

}  // namespace interlace
