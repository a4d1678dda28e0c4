// moving_states.h — the states of a program that may lie in the tier, and where each is between steps.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/step_runner.h"
#include "runtime/tier_bank.h"
#include "runtime/view.h"

namespace interlace {

class MovingStates {
 public:
  MovingStates(const Program& program, const std::vector<at::Tensor>& fixed, const std::vector<Geometry>& geometry)
      : program_(program), fixed_(fixed), geometry_(geometry) {}

  void SetBank(std::unique_ptr<TierBank> bank) { bank_ = std::move(bank); }
  TierBank* bank() const { return bank_.get(); }
  // Finds the states that the program moves, and those that lie in the tier now, and reserves their places there.
  Status Find();
  bool empty() const { return states_.empty(); }

  // Every state goes where the program has it between steps.
  Status Settle();
  // The value's storage comes into memory, where it stays until the next Settle.
  Status BringIn(ValueId id);
  // A state that was brought in, and that nobody has changed, goes back without being written anew.
  Status PutBack(ValueId id);

 private:
  friend class PendingStates;
  bool Out(ValueId id) const { return IsOut(fixed_[id].storage(), geometry_[id].end_bytes()); }

  const Program& program_;
  const std::vector<at::Tensor>& fixed_;  // by value id
  const std::vector<Geometry>& geometry_;
  std::unique_ptr<TierBank> bank_;
  std::vector<std::pair<ValueId, bool>> states_;  // whether they are out between steps
};

// What a pending optimizer step (ir/pending.h) needs when it runs by itself, without the program's reloads and
// offloads: a state that lies out comes in for the ops that touch it and leaves behind the last of them, so that there
// are never more of them in memory than a step has. What is stepped where it lies stays there.
class PendingStates : public NoObserver {
 public:
  static constexpr bool kServed = false;
  PendingStates(MovingStates& states, const Plan& plan);
  Status Before(const Instruction& at);
  Status Ended(const Instruction& at);

 private:
  template <typename Visit>
  void ForEachTouched(OpId id, Visit&& visit) const;

  MovingStates& states_;
  // By root: the op behind which it may leave; kNone: a transfer may still read it.
  std::unordered_map<ValueId, OpId> last_;
};

}  // namespace interlace
