// step_line.h — the ops of one step in the order they run, with the memory and the time of each: what passes that send
// storages out of memory look at. A micro-batch that is repeated stands there once.
//
//   op                   0      1      2    ...   n-1 | 0 ...   `update` of a step is before the next `micro_batch`
//   bytes                P(0)   P(1)   P(2)
//   uses of a storage    [2,4]     [9,9]                        from the op that first touches it to the last in a row
#pragma once

#include <vector>

#include "ir/program.h"
#include "passes/phase_memory.h"

namespace interlace {

// One op, or one transfer from its start to its wait, that needs a storage in memory.
struct Use {
  int32_t begin = 0, end = 0;  // indices in the line
  bool writes = false;
  bool fills = false;  // its first op writes the whole storage and reads nothing of it
};

enum class OffloadKind : uint8_t { kStates, kMaster, kGradients, kActivations };

// A storage that could go out.
struct Movable {
  ValueId root = kNone;
  OffloadKind kind = OffloadKind::kStates;
  UnitId unit = kNone;
  int64_t bytes = 0;
  bool state = false;  // lives from step to step
  bool ends = false;   // a state that ends with its step: what it holds is of no use once it is filled anew
  bool comes =
      false;  // it lies in the tier, and the program has it come for its uses: offload intervals lie between them
  std::vector<Use> uses;  // ascending, apart
};

struct StepLine {
  struct Entry {
    Phase* phase = nullptr;
    int32_t index = 0;      // of the op in the phase
    bool repeated = false;  // the phase runs more than once a step
  };
  std::vector<Entry> ops;
  std::vector<int64_t> bytes;     // P(o)
  std::vector<int64_t> begin_ps;  // when the op begins if nothing ever waits; one more at the end
  std::vector<Movable> movables;  // states by unit and role, then results by first use
  int32_t size() const { return static_cast<int32_t>(ops.size()); }
};

// The program must outlive it and keep its op lists. Error: a symbolic size, an op without a cost.
Result<StepLine> ReadStepLine(Program& program, CostModel& model);

// Gradients that are written in parts begin with an op that fills them whole (grad.begin), where a step first writes
// them: what they held before is of no use then, and needs no memory. True when any did.
bool BeginGradients(Program& program);

// Gradients that are made and used up in one phase (overlap_update) become values that live from the first write to the
// last use, instead of states that take memory through the step. True when any did.
bool FreeGradients(Program& program);

}  // namespace interlace
