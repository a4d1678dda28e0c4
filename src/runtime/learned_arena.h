// learned_arena.h — the arena of a program's steps (arena.h), and what its kernels turn out to ask for inside: as an
// observer it notes every request of the first steps, and after each of them says whether the next needs another plan.
//
//   step 0   plan without workspaces          requests noted
//   step 1   plan with those of step 0        requests noted; none new: the plan has settled
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/arena.h"
#include "runtime/step_runner.h"

namespace interlace {

// What the arena is, and what did not go through it.
struct ArenaStats {
  struct Request {
    std::string op;  // text
    int64_t bytes = 0, times = 0;
  };
  bool on = false, settled = false;  // settled: the last plan foresaw every request of the step it was made for
  std::string why_not;               // not on although it was asked for
  int64_t planned_bytes = 0;         // top of the plan
  int64_t top_bytes = 0;             // highest byte that any tensor of the step has
  int64_t live_bytes = 0;            // largest live sum of the plan
  double fragmentation = 0;          // planned over live, rounded up to 64 bytes a block, less 1
  int64_t resident_bytes = 0;        // of its pages, in memory now
  int64_t first_peak_bytes = 0;      // while it learned: arena and what was outside of it
  // Tensor data outside of it since then, results of the step included; on a device also what others took meanwhile.
  int64_t outside_peak_bytes = 0;
  std::vector<Request> kept;         // what kernels keep beyond their op, left to torch's allocator
  std::vector<Request> unforeseen;   // since it settled
};

class LearnedArena : public NoObserver {
 public:
  LearnedArena(const Program& program, const std::vector<Geometry>& geometry, c10::Device device)
      : program_(program), geometry_(geometry), device_(device) {}
  // Executors that share states run one at a time, and only the one that runs has its arena in memory.
  void ShareFloor(const LearnedArena& other) { floor_ = other.floor_; }

  // Places for all that is known so far, and the tensors there beside what is `fixed`; learning goes on. Error: the
  // program cannot be planned, or there is no room.
  Status Make(const std::vector<at::Tensor>& fixed);
  // The tensors alone, where the arena lies now.
  void MakeTensors(const std::vector<at::Tensor>& fixed);
  // Lets go of the arena, so that there is room for the next.
  void Clear();
  void TurnOff(std::string why);
  bool on() const { return arena_ != nullptr; }
  // On a device: it has its block now; bytes of one for which there was no room (0: there was).
  bool Taken() const { return arena_ && arena_->memory().ResidentBytes() > 0; }
  int64_t wanted_bytes() const { return wanted_bytes_; }
  // nullptr while it is off.
  const MemoryPlan* plan() const { return arena_ ? &arena_->plan() : nullptr; }
  int64_t top() const { return arena_ ? arena_->plan().taken_bytes : 0; }
  // By turn of the plan: tensors that are always in their slots, by value id. nullptr while it is off.
  const std::vector<std::vector<at::Tensor>>* slots_of_turn() const { return arena_ ? &slots_of_turn_ : nullptr; }
  std::vector<at::Tensor> ReceiveBuffers(int32_t variant) const;
  // Fills in what each instruction of a variant's plan is expected to ask for.
  void ExpectIn(int32_t variant, Plan& plan) const;
  int64_t WorkspaceOf(const Phase* phase, size_t place) const { return NeedsOf(phase)[place].workspace; }
  // Plans that steps have already shown to be too small.
  int plans_outgrown() const { return plans_outgrown_; }

  bool learning() const { return learning_; }
  // Around a step. The first says whether the tensors are to be made anew, because a device has given the arena another
  // place; EndStep whether the arena is. `outside_bytes`: the peak outside of it.
  Result<bool> TakeTheFloor();
  void BeginStep();
  void StopServing() { ArenaHook::End(); }
  bool EndStep(int64_t outside_bytes);

  // As an observer.
  void BeginPhase(const Plan& plan, const PlanVariant* variant, size_t) {
    needs_now_ = &needs_[plan.phase - program_.phases.data()];
    slots_now_ = &slots_of_turn_[variant->turn];
  }
  bool After(const Plan&, const Instruction& at, const Frame&) {
    Learn(at);
    return true;
  }

  // By phase and place of the op: bytes that its kernel takes inside.
  std::vector<std::vector<int64_t>> Workspaces() const;
  ArenaStats Statistics(const std::vector<Plan>& plans, int64_t outside_bytes) const;

 private:
  const std::vector<OpNeeds>& NeedsOf(const Phase* phase) const { return needs_[phase - program_.phases.data()]; }
  void Learn(const Instruction& at);
  void LeaveOut(ValueId root);

  const Program& program_;
  const std::vector<Geometry>& geometry_;
  const c10::Device device_;
  std::unique_ptr<StepArena> arena_;
  std::string why_off_;
  ProgramNeeds needs_;
  bool hooked_ = true;            // what kernels ask for can be served
  std::vector<bool> left_out_;    // by value id: results that a device's framework makes the memory for
  std::vector<bool> handed_on_;   // by value id: roots that phases give or save
  std::vector<std::vector<at::Tensor>> slots_of_turn_;
  bool learning_ = false, needs_changed_ = false;
  int plans_outgrown_ = 0;
  int64_t wanted_bytes_ = 0;
  int64_t first_peak_bytes_ = 0;
  std::vector<AskedBlock> log_;  // of the op that runs
  std::vector<UnforeseenBlock> unforeseen_;
  std::vector<OpNeeds>* needs_now_ = nullptr;  // of the phase that runs
  const std::vector<at::Tensor>* slots_now_ = nullptr;
  std::shared_ptr<std::weak_ptr<ArenaMemory>> floor_ = std::make_shared<std::weak_ptr<ArenaMemory>>();
};

}  // namespace interlace
