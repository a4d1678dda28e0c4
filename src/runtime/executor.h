// executor.h — runs the training steps of one program on one rank.
//
// Built once: the text is parsed, `rank_AXIS` bound, states allocated, every phase turned into a Plan. A step then runs
// the phases in order; nothing in its loop allocates besides the kernels' own results. Not thread-safe: one step at a
// time. It puts together what the work is divided among:
//
//   StepRunner     the one loop over phases and ops        step_runner.h
//   LearnedArena   the memory of a step                    learned_arena.h
//   PhaseGraphs    whole micro-batches given to a device   phase_graphs.h
//   MovingStates   states that lie in the tier             moving_states.h
//   StepRecorder   what a recorded step did                step_recorder.h
//   StateStore     what outlives a step                    state_store.h
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/comm.h"
#include "runtime/debug.h"
#include "runtime/learned_arena.h"
#include "runtime/moving_states.h"
#include "runtime/op_kernel.h"
#include "runtime/phase_graphs.h"
#include "runtime/plan.h"
#include "runtime/recorder.h"
#include "runtime/state_store.h"
#include "runtime/step_recorder.h"
#include "runtime/step_runner.h"

namespace interlace {

struct StepResult {
  std::map<std::string, std::vector<at::Tensor>> outputs;  // one tensor per micro-batch
  double norm = 0;                                         // of the gradients, times scale; only when has_norm
  bool has_norm = false;
  bool finite = true;                    // the norm, and every scalar output
  std::optional<DebugRecord> nonfinite;  // debug runs: what first made a value that is not finite
  std::string note;                      // why device graphs were turned off in this step
};

struct ExecutorStats {
  Counters counters;
  int64_t persistent_bytes = 0;  // states, parameters, buffers, constants
  int64_t live_bytes = 0;        // persistent and what the last step left alive
  int64_t peak_bytes = 0;        // highest of any step, persistent included
  std::string peak_op;           // text of the op that reached it
  int64_t instructions = 0;      // of all plans
  Comm::Stats comm;              // sum over axes
  TierStats tier;
  int64_t heap_bytes = 0;  // the page heap's, of the process
  std::string tier_note;
  std::vector<std::pair<std::string, int64_t>> op_counts;  // by op name, of one pass over each phase
};

class Executor {
 public:
  // With a donor, between two of its steps, the new executor shares the donor's states, parameters, buffers and
  // connections instead of making its own: nothing is copied, and either can run the next step (not both at once).
  // Without `take_states` it shares the donor's tier only, and has states of its own.
  // Error: the text does not parse, a symbol is unbound, an op cannot be run, a process group is missing, or the
  // program's units and states are not the donor's.
  static Result<std::unique_ptr<Executor>> Create(std::string_view text, c10::Device device,
                                                  const std::vector<AxisSpec>& axes, double timeout_s,
                                                  RuntimeOptions options, const Executor* donor = nullptr,
                                                  bool take_states = true);

  // The storage of a state, parameter, buffer or constant: shared, not copied. What lies in the tier comes into memory
  // and stays there until the next step begins, or until Settle.
  Result<at::Tensor> TensorOf(ValueId id);
  // Every state goes where the program has it between steps. A step begins with this.
  Status Settle();
  // A state that TensorOf brought into memory, and nobody has changed, goes back without being written anew.
  Status PutBack(ValueId id) { return moving_.PutBack(id); }
  // hyper[k]: numbers of optimizer group k (docs/architecture.md). `step` counts the steps of the training run and keys
  // the random streams.
  Result<StepResult> Step(MicroBatches micro_batches, const std::vector<std::vector<double>>& hyper, int64_t step);
  // Runs what the last step left pending (ir/pending.h): parameters and optimizer states are then those after that
  // step. Every rank must call it, before it reads them, or before another executor takes them. Whether there was
  // anything.
  Result<bool> Flush();
  // Runs the micro-batch phases op by op and describes every floating result, then puts the buffers back; no update.
  // Stops after the last forward op of the module `stop_at` in the first micro-batch, if it is not empty. All ranks
  // must call it.
  Result<DebugReport> DebugStep(MicroBatches micro_batches, int64_t step, const std::string& stop_at);
  // Tells the other ranks that this one takes no more part: whoever waits for it gets an error at once.
  void Leave() {
    for (auto& [name, comm] : comms_) comm->Leave();
  }
  // Called in every later step before the first op that changes a state (a snapshot waits for its last copies there).
  void SetBeforeUpdate(std::function<void()> call) { runner_.frame.before_update = std::move(call); }
  // The op that runs now or ran last, and its step. Any thread may ask, also while a step hangs.
  using Place = StepRunner::Place;
  Place Where() const { return runner_.Where(); }
  ExecutorStats stats() const;
  ArenaStats ArenaStatistics() const { return arena_.Statistics(plans_, use_.peak_bytes); }
  GraphStats GraphStatistics() const { return graphs_.Statistics(); }
  // nullptr: there is no arena.
  const MemoryPlan* memory_plan() const { return arena_.plan(); }
  // Bytes that kernels take inside, as learned: what PlanMemory needs beside the program to plan the same arena.
  std::vector<std::vector<int64_t>> Workspaces() const { return arena_.Workspaces(); }
  // Every later step is recorded (and not, with kOff). All ranks must ask for kSerial together.
  void SetTrace(TraceMode mode) { trace_mode_ = mode; }
  // The last recorded step.
  const StepRecord& record() const { return recorder_.record(); }
  const Program& program() const { return program_; }

 private:
  // Memory of steps beyond what persists and the arena: counted bytes.
  struct Use {
    int64_t peak_bytes = 0, live_bytes = 0;  // highest of any step; after the last one
    OpId peak_op = kNone;
    int64_t settled_bytes = 0;  // of states, when the last step began
    int64_t device_bytes = -1;  // on a device: in use when the first step that counts began
  };

  explicit Executor(c10::Device device) : device_(device), store_(device), runner_(program_, fixed_, device) {}
  Status TakeFrom(const Executor& donor, bool take_states);
  Status Load(std::string_view text, const std::vector<AxisSpec>& axes, double timeout_s);
  Status JoinAxes(const Program& parsed, const std::vector<AxisSpec>& axes, double timeout_s);
  Status OpenTier();
  Status AllocateFixed();
  Status Prepare();
  Status BuildArenaPlans(bool moved = false);
  Status RenewArena(bool moved);
  Status BuildPlans(bool keep_operands, std::vector<Plan>& plans);
  Result<Plan> BuildPhase(const Phase& phase, const std::vector<at::Tensor>& fixed, bool keep_operands,
                          const std::vector<at::Tensor>* receive_buffers);
  size_t CountInstructions() const;
  // Runs the step with the observer that it needs.
  Status RunObserved(MicroBatches& micro_batches, int64_t step, DebugObserver* inspector);
  StepResult ResultOfStep();
  // The error, with what takes the memory of this device, and what to lower.
  Error WithMemory(Error error) const;
  // Waits, on the device alone, for what a step that failed has left under way.
  void JoinTransfers();
  // What lanes were given comes before whatever the current stream is given from here on.
  void JoinLanes();
  Error DeviceFailure(const std::exception& error) const;

  c10::Device device_;
  RuntimeOptions options_;
  Program program_;
  std::vector<Geometry> geometry_;  // by value id
  std::vector<at::Tensor> fixed_;   // by value id: states, parameters, buffers, constants, and their views
  StateStore store_;
  std::map<std::string, std::shared_ptr<Comm>> comms_;
  int64_t rank_ = 0, ranks_in_run_ = 1;
  int64_t data_rank_ = 0;  // among the ranks that see different batches
  Binding ranks_;
  std::map<int32_t, int32_t> group_position_;
  // By variant of the memory plan; without arena, and those of debug steps, which are built when first wanted, by index
  // into program_.phases.
  std::vector<Plan> plans_, debug_plans_;
  Phase pending_phase_;                 // the ops of the step before, by themselves
  std::optional<Plan> pending_plan_;    // made when first wanted
  std::shared_ptr<LaneStreams> lanes_;  // nullptr on CPUs
  bool on_heap_ = false;                // the program moves storages: memory of its steps comes from the page heap
  LearnedArena arena_{program_, geometry_, device_};
  StepRunner runner_;
  PhaseGraphs graphs_{program_, device_};  // after what they use
  MovingStates moving_{program_, fixed_, geometry_};  // after runner_: what is under way ends before its memory does
  TraceMode trace_mode_ = TraceMode::kOff;
  StepRecorder recorder_{program_, comms_, arena_};
  int64_t const_bytes_ = 0;
  Use use_;
};

}  // namespace interlace
