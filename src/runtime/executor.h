// executor.h — runs the training steps of one program on one rank.
//
// Built once: the text is parsed, `rank_AXIS` bound, states allocated, every phase turned into a Plan. A step then runs
// the phases in order; nothing in its loop allocates besides the kernels' own results. Not thread-safe: one step at a
// time.
//
//   step = for each micro-batch: bind inputs to slots, run the phase's plan (values die at their last use);
//          then the update phase. `gives` of a phase are moved to the `takes` of the next.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/arena.h"
#include "runtime/comm.h"
#include "runtime/debug.h"
#include "runtime/op_kernel.h"
#include "runtime/plan.h"
#include "runtime/recorder.h"
#include "runtime/state_store.h"
#include "runtime/tier_bank.h"

namespace interlace {

struct StepResult {
  std::map<std::string, std::vector<at::Tensor>> outputs;  // one tensor per micro-batch
  double norm = 0;                                         // of the gradients, times scale; only when has_norm
  bool has_norm = false;
  bool finite = true;                    // the norm, and every scalar output
  std::optional<DebugRecord> nonfinite;  // debug runs: what first made a value that is not finite
};

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
  int64_t outside_peak_bytes = 0;    // tensor data outside of it since then, results of the step included
  std::vector<Request> kept;         // what kernels keep beyond their op, left to torch's allocator
  std::vector<Request> unforeseen;   // since it settled
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
  Status PutBack(ValueId id);
  // micro_batches[i][j]: input j of micro-batch i. hyper[k]: numbers of optimizer group k (docs/architecture.md).
  // `step` counts the steps of the training run and keys the random streams.
  Result<StepResult> Step(std::vector<std::vector<at::Tensor>> micro_batches,
                          const std::vector<std::vector<double>>& hyper, int64_t step);
  // Runs what the last step left pending (ir/pending.h): parameters and optimizer states are then those after that
  // step. Every rank must call it, before it reads them, or before another executor takes them. Whether there was
  // anything.
  Result<bool> Flush();
  // Runs the micro-batch phases op by op and describes every floating result, then puts the buffers back; no update.
  // Stops after the last forward op of the module `stop_at` in the first micro-batch, if it is not empty. All ranks
  // must call it.
  Result<DebugReport> DebugStep(std::vector<std::vector<at::Tensor>> micro_batches, int64_t step,
                                const std::string& stop_at);
  // The full flat buffer of a unit; every rank of its axis must call it.
  Result<at::Tensor> GatherUnit(UnitId unit);
  // Tells the other ranks that this one takes no more part: whoever waits for it gets an error at once.
  void Leave() {
    for (auto& [name, comm] : comms_) comm->Leave();
  }
  // Called in every later step before the first op that changes a state (a snapshot waits for its last copies there).
  void SetBeforeUpdate(std::function<void()> call) { frame_.before_update = std::move(call); }
  // The op that runs now or ran last, and its step. Any thread may ask, also while a step hangs.
  struct Place {
    int64_t step = -1;
    std::string op, units, module;  // the op's text; "u3 u4"; a module path. Empty: no op yet
  };
  Place Where() const;
  ExecutorStats stats() const;
  ArenaStats ArenaStatistics() const;
  // nullptr: there is no arena.
  const MemoryPlan* memory_plan() const { return arena_ ? &arena_->plan() : nullptr; }
  // Bytes that kernels take inside, as learned: what PlanMemory needs beside the program to plan the same arena.
  std::vector<std::vector<int64_t>> Workspaces() const;
  // Every later step is recorded (and not, with kOff). All ranks must ask for kSerial together.
  void SetTrace(TraceMode mode) { trace_mode_ = mode; }
  // The last recorded step. CPU only: elsewhere ops are issued, not executed, by the thread that would time them.
  const StepRecord& record() const { return record_; }
  const Program& program() const { return program_; }

 private:
  explicit Executor(c10::Device device) : device_(device), store_(device), frame_(device) {}
  Status Load(std::string_view text, const std::vector<AxisSpec>& axes, double timeout_s);
  Status AllocateFixed();
  Status AddToBank();
  Status BuildPlans(bool keep_operands, std::vector<Plan>& plans);
  Result<Plan> BuildPhase(const Phase& phase, const std::vector<at::Tensor>& fixed, bool keep_operands,
                          const std::vector<at::Tensor>* receive_buffers);
  Status BuildArena();
  void ResetSlots();
  void UseTurn(int32_t turn);
  void Learn(const Plan& plan, const Instruction& at);
  Status SettleArena();
  void TakeTheFloor();
  // Index into plans of run `i` of an entry of RunOrder.
  size_t PlanIndex(const Phase* phase, size_t entry, int64_t i, bool in_arena) const {
    if (!in_arena) return static_cast<size_t>(phase - program_.phases.data());
    const MemoryPlan& plan = arena_->plan();
    return static_cast<size_t>(plan.first_variant[entry] + i % plan.turns[entry]);
  }
  // Whether the value has a place of its own in the arena, for the variant that runs.
  bool InArena(const PlanVariant* variant, ValueId id) const {
    return variant != nullptr && variant->block_of[program_.RootOf(id)] >= 0;
  }
  Status CheckInputs(std::vector<std::vector<at::Tensor>>& micro_batches) const;
  Status CheckHyper(const std::vector<std::vector<double>>& hyper) const;
  Status RunPhase(const Plan& plan);
  Status RunPending(const Plan& plan);
  Status RunPhaseRecorded(const Plan& plan);
  struct ArenaLive {
    std::vector<std::pair<int64_t, int64_t>> at;  // by place: bytes before the op, and while it runs; empty: no arena
  };
  ArenaLive LiveInArena(const Plan& plan) const;
  void BeginRecord();
  void EndRecord();
  // Serial mode: waits until every rank has come here, then runs a collective's start, its transfer and its sum.
  void RunAlone(const Instruction& at, OpSample& sample);
  void RememberTransfers(const Instruction& at, int32_t run, size_t first);
  Status RunPhaseObserved(const Plan& plan, bool update, DebugObserver& observer);
  // Runs the phases in order; with an observer op by op.
  Status RunStep(std::vector<std::vector<at::Tensor>>& micro_batches, const std::vector<Plan>& plans, int64_t step,
                 bool update, DebugObserver* observer);
  // Between two ops: transfers go on in this thread (transport/mesh.h).
  void MoveTransfers() {
    for (const auto& [name, comm] : comms_) comm->Progress();
  }
  Status EnterPhase(const Phase& phase, const PlanVariant* variant);
  void LeavePhase(const Phase& phase, const PlanVariant* variant);
  void AtOp(OpId op);
  void DropTemporaries();
  Error OpFailure(OpId op, const std::string& what) const;
  Error KeptBlock(OpId op) const;

  c10::Device device_;
  RuntimeOptions options_;
  Program program_;
  std::vector<Geometry> geometry_;  // by value id
  std::vector<at::Tensor> fixed_;   // by value id
  StateStore store_;
  std::map<std::string, std::shared_ptr<Comm>> comms_;
  Binding ranks_;
  std::map<int32_t, int32_t> group_position_;
  // By variant of the memory plan; without arena, and those of debug steps, which are built when first wanted, by index
  // into program_.phases.
  std::vector<Plan> plans_, debug_plans_;
  Phase pending_phase_;               // the ops of the step before, by themselves
  std::optional<Plan> pending_plan_;  // made when first wanted
  std::unique_ptr<StepArena> arena_;
  std::string arena_off_;  // why there is none
  bool on_heap_ = false;   // the program moves storages: memory of its steps comes from the page heap
  ProgramNeeds needs_;
  bool learning_ = false, needs_changed_ = false;
  int plans_made_ = 0;
  int64_t first_peak_bytes_ = 0;
  std::vector<AskedBlock> log_;
  std::vector<UnforeseenBlock> unforeseen_;
  std::vector<std::vector<at::Tensor>> slots_of_turn_,
      parked_slots_;  // what is fixed for a turn; slots of those not running
  int32_t turn_ = 0;
  // Of the executors that share states: the arena whose pages are in use.
  std::shared_ptr<std::weak_ptr<ArenaMemory>> floor_ = std::make_shared<std::weak_ptr<ArenaMemory>>();
  std::unique_ptr<KeyedRandom> random_;
  Frame frame_;
  std::unique_ptr<TierBank> bank_;  // after store_ and frame_: what is under way ends before their memory does
  std::vector<std::pair<ValueId, bool>> moving_;           // states that may be out, and whether they are between steps
  int64_t settled_bytes_ = 0;                              // of states, when the last step began
  std::vector<std::pair<at::Tensor, int32_t>> handed_on_;  // gives of the last phase, with their transfers
  int64_t const_bytes_ = 0;
  int64_t peak_extra_ = 0, live_extra_ = 0;
  OpId peak_op_ = kNone;
  // What Where() tells; written without an order, because a place that is one op old tells as much.
  std::atomic<OpId> at_op_{kNone};
  std::atomic<int64_t> at_step_{-1};
  TraceMode trace_mode_ = TraceMode::kOff;
  int64_t live_before_ = 0;  // counted bytes when the step began
  StepRecord record_;
};

}  // namespace interlace
