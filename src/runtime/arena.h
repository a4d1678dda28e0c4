// arena.h — the memory of a step in one piece, as ir/memory_plan.h lays it out, and the tensors in it.
//
// All that comes and goes in a step has its place before it runs, so tensors are made once: results and their views are
// always in their slots, operators write into them (`.out`), and what a kernel still asks torch for is served at
// planned places by the hook (allocator.h): a result without an `.out` form at its own place, scratch in the op's
// workspace.
//
// On a device the same memory plan holds: a transfer's sources and results live until its wait, which is where the
// compute stream waits for it, and a transfer begins behind what the compute stream was given; so whoever uses a place
// next, on whichever stream, comes after all that used it before. Receive buffers are the process group's own. Where the
// framework cannot be hooked, results without an `.out` form are left to it.
//
// What a kernel asks for inside is learned: the first steps note every request of every op. A request that turns out to
// be a result, or that is returned before the op ends, gets a place in the next plan; what a library keeps is left to
// torch's allocator. When a step has made no other request than the plan foresaw, nothing is noted any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "base/result.h"
#include "ir/memory_plan.h"
#include "runtime/allocator.h"
#include "runtime/arena_memory.h"
#include "runtime/view.h"

namespace interlace {

// What one op asks the allocator for, in order.
struct OpNeeds {
  struct Block {
    int64_t bytes = 0;
    enum class Where : uint8_t { kResult, kInside, kElsewhere } where = Where::kElsewhere;
    ValueId root = kNone;  // of a result
    int64_t offset = 0;    // inside: from the start of the workspace
    friend bool operator==(const Block&, const Block&) = default;
  };
  std::vector<Block> blocks;
  int64_t workspace = 0;  // bytes
  friend bool operator==(const OpNeeds&, const OpNeeds&) = default;
};

// By index into Program::phases and place of the op.
using ProgramNeeds = std::vector<std::vector<OpNeeds>>;

class StepArena {
 public:
  // Error: the program cannot be planned (memory_plan.h).
  // `left_out`: see MemoryPlanOptions.
  static Result<std::unique_ptr<StepArena>> Create(const Program& program, const std::vector<Geometry>& geometry,
                                                   const ProgramNeeds& needs, const std::vector<bool>& left_out,
                                                   c10::Device device);

  // Before any of what follows. Error: there is no room.
  Status TakeMemory(c10::Device device);

  const MemoryPlan& plan() const { return plan_; }
  const ArenaMemory& memory() const { return *memory_; }
  const std::shared_ptr<ArenaMemory>& shared_memory() const { return memory_; }
  // Adds to `tensors` (by value id) what lives in the arena in this variant: roots, views of them, results placed in
  // them.
  void AddTensors(int32_t variant, std::vector<at::Tensor>& tensors) const;
  // Where the op at this place receives into; undefined when it is no reduction between ranks.
  at::Tensor ReceiveBuffer(int32_t variant, int32_t place) const;
  // The requests of an op as the hook wants them.
  void Expected(int32_t variant, int32_t place, const OpNeeds& needs, std::vector<ExpectedBlock>& out) const;

 private:
  StepArena(const Program& program, const std::vector<Geometry>& geometry) : program_(program), geometry_(geometry) {}
  c10::Storage StorageAt(int32_t block, int64_t bytes) const;

  const Program& program_;
  const std::vector<Geometry>& geometry_;
  MemoryPlan plan_;
  std::shared_ptr<ArenaMemory> memory_;  // tensors share it: a transfer may outlive the executor
};

// What the op's log says that it needs. `results`: where results of the op have their places, with their roots.
OpNeeds NeedsOf(const std::vector<AskedBlock>& log, const std::vector<std::pair<const void*, ValueId>>& results);

}  // namespace interlace
