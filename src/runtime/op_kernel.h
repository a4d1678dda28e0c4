// op_kernel.h — what one op becomes when a plan is built: a function pointer and its data. All lookups (operator
// handles, constant arguments, geometry, communicators) happen at build time; at run time a kernel reads slots, calls,
// and writes slots.
//
//   slots[value id]: the tensor of every live value. States, parameters, buffers, constants and their views are
//   `fixed`: made once, always present. Everything else appears when its op runs and is dropped after its last use, so
//   reference counts free memory.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "runtime/comm.h"
#include "runtime/random.h"
#include "runtime/view.h"

namespace interlace {

class Cubins;

// Micro-batches as device graphs (phase_graphs.h): never, where they can be, or an error where they cannot.
enum class DeviceGraphs : uint8_t { kOff, kAuto, kOn };
class DeviceGraph;

struct RuntimeOptions {
  bool keyed_random = true;  // false: torch's default generator in program order
  uint64_t seed = 0;
  bool debug = false;         // examine every floating result; slow
  bool arena = true;          // one arena for what comes and goes in a step (arena.h); not in debug runs
  DeviceGraphs device_graphs = DeviceGraphs::kOff;
  std::function<std::unique_ptr<DeviceGraph>()> make_graph;  // for devices of which torch's registry has none
  bool captured_here = false;   // the program is of a model, not of a file: its operators are not looked at as closely
  bool join_updates = true;     // adjacent optimizer steps are given to a device as one
  bool own_kernels = true;      // on CPUs, where they are faster (own_operators.h); false: torch's, with its bits
  bool skip_nonfinite = false;  // no update when the gradient norm is not finite
  std::string tier;             // folder of the file tier, for what goes out of memory; empty: none
  double tier_bandwidth = 0;    // bytes per second at most, in each direction; 0: no such limit
  // Compiled regions, checked by whoever names them: on CPUs a library, else cubins; none: bodies run.
  std::string regions;
  std::shared_ptr<const Cubins> cubins;
  std::vector<std::string> region_keys;         // those to be used
  std::function<void(const std::string&)> say;  // tells the user what a step has to say; none: nobody is told
  // Runs an opaque module: (module path, "forward" | "backward", inputs) → results. Called with the step's thread state
  // undone.
  std::function<std::vector<at::Tensor>(const std::string&, const std::string&, const std::vector<at::Tensor>&)> opaque;
};

struct Counters {
  int64_t steps = 0, ops = 0;
  int64_t placed_bytes = 0;     // results written at their place by the op itself
  int64_t copied_bytes = 0;     // results computed elsewhere and copied to their place
  int64_t looped_updates = 0;   // parts of shards whose rule ran as a loop (rule_loops.h), the host lane apart
  int64_t skipped_updates = 0;  // steps whose update was skipped because the norm was not finite
};

// A collective that was started; `ticket` is 0 once it was waited for.
struct Transfer {
  Comm* comm = nullptr;
  Ticket ticket = 0;
  std::function<void()> landed = {};  // what is left to do once it has come: unpacking
};

// The optimizer step that the last step left to the next one (ir/pending.h).
struct PendingUpdate {
  bool on = false;
  double coef = 1;
  std::vector<std::vector<double>> hyper;  // of the step that made the gradients
};

// The name, among an executor's groups, of that for messages between two ranks of an axis (AxisSpec::channel).
inline std::string MessagesAlong(std::string_view axis, int64_t channel = 0) {
  return std::string(axis) + " messages" + (channel > 0 ? " " + std::to_string(channel) : "");
}

// Everything a kernel may touch while a step runs.
struct Frame {
  explicit Frame(c10::Device on) : device(on) {}
  c10::Device device;
  c10::DispatchKeySet keys;       // the backend's kernels, below autograd
  std::vector<at::Tensor> slots;  // by value id
  torch::jit::Stack stack;
  std::vector<int32_t> transfer_of;                         // by value id: index into transfers, or -1
  std::vector<Transfer> transfers;                          // of the current step
  KeyedRandom* random = nullptr;                            // nullptr in compat mode
  const std::vector<std::vector<double>>* hyper = nullptr;  // one list per optimizer group, in program order
  int64_t micro_batch = 0;                                  // of the run; behind all of them: it runs once a step
  std::map<std::string, std::multimap<int64_t, at::Tensor>> outputs;  // by name and micro-batch, in the order of ops
  double norm = 0, coef = 1;                                          // of the last norm.coef
  bool has_norm = false, finite = true;
  PendingUpdate pending;
  bool one_by_one = false;  // somebody looks at what each op has done
  const RuntimeOptions* options = nullptr;
  const at::ThreadLocalState* outer = nullptr;  // thread state outside the step
  Counters counters;
  // Called in a step before the first op that changes a state: whoever still copies states must be done by then.
  std::function<void()> before_update;

  // Forgets what the last step gave.
  void BeginStep() {
    outputs.clear();
    has_norm = false;
    finite = true;
    coef = 1;
  }
};

class LaneStreams;
class TierBank;

struct KernelData {
  virtual ~KernelData() = default;
};

struct Kernel {
  using Run = void (*)(void* data, Frame& frame);
  Run run = nullptr;                 // nullptr: nothing to do at run time
  std::unique_ptr<KernelData> data;  // passed to run as a KernelData*
};

// What the builders of kernels know of the op's surroundings.
struct BuildContext {
  const Program& program;
  const Phase& phase;
  const std::vector<Geometry>& geometry;  // by value id
  // By value id; undefined when the value is not fixed. What has its place in the arena is fixed, too.
  const std::vector<at::Tensor>& fixed;
  const std::map<std::string, Comm*>& comms;         // axes of more than one rank
  const Binding& ranks;                              // "rank_dp" → rank
  const std::map<int32_t, int32_t>& group_position;  // group id → index into the hyper-parameters
  const RuntimeOptions& options;
  c10::Device device;
  TierBank* bank = nullptr;                // storages that go out of memory
  std::shared_ptr<LaneStreams> lanes;      // nullptr on CPUs
  std::function<bool(ValueId)> dies_here;  // this op is the last to use the value, and its slot may be moved from
  bool types_checked = false;              // a step has shown that operators give the types that the program says
  at::Tensor receive_buffer;               // of this op, a reduction; undefined: the transport has its own
  bool on_heap = false;                    // a reduction receives into a buffer that goes with its wait
  bool is_fixed(ValueId id) const { return fixed[id].defined(); }
  // The op writes to a place that is there already: `into` another value, or the value's own in the arena.
  bool has_place(ValueId id) const { return program.value(id).placed || (program.RootOf(id) == id && is_fixed(id)); }
};

// A place to write to: a fixed tensor, or a geometry over a root that lives in a slot.
struct Target {
  at::Tensor fixed;
  ValueId root = kNone;
  const Geometry* geometry = nullptr;
  at::Tensor Get(const Frame& frame) const {
    return fixed.defined() ? fixed : MakeCheckedView(frame.slots[root].storage(), *geometry);
  }
};
Target TargetOf(const BuildContext& context, ValueId placed);

// Each builds the kernel of one op. Error: unknown operator, arguments that do not fit, an op this runtime does not
// have.
Result<Kernel> BuildAtenKernel(const BuildContext& context, const Op& op);
int HostedOf(const Op& op);  // which argument the operator reads on the host, wherever its others lie; -1: none
Result<Kernel> BuildCommKernel(const BuildContext& context, const Op& op);  // gather.*, reduce.*, all_reduce.*
// all_gather, reduce_scatter, all_to_all, broadcast, send, recv: starts
Result<Kernel> BuildExchangeKernel(const BuildContext& context, const Op& op);
Result<Kernel> BuildUpdateKernel(const BuildContext& context, const Op& op);  // norm.*, update.*
// Of two adjacent ops of a plan: the first leaves its work to the second, if both are steps that a device can be given
// as one. Whether it does.
bool JoinUpdates(KernelData* before, KernelData* after);
Result<Kernel> BuildOwnKernel(const BuildContext& context,
                              const Op& op);  // view, assign, copy, output, grad.begin, ...
Result<Kernel> BuildMoveKernel(const BuildContext& context, const Op& op);  // offload.*, reload.*
// `result` as a view of the storage of `operand`; nothing at all when it is a view of something fixed.
Kernel BuildViewKernel(const BuildContext& context, ValueId operand, ValueId result);
Result<Kernel> BuildRegionKernel(const BuildContext& context, const Op& op);  // call f0
// Any op: one of the above.
Result<Kernel> BuildKernel(const BuildContext& context, const Op& op);

// ---- small things the builders share ----
// Value operands in positional order. Error: an operand that is no value.
Result<std::vector<ValueId>> OperandsOf(const Op& op);
// "%3 = aten.mm(...)" for messages.
Error OpError(const BuildContext& context, const Op& op, std::string message);

template <typename Data>
Kernel MakeKernel(std::unique_ptr<Data> data) {
  Kernel kernel;
  kernel.run = [](void* raw, Frame& frame) { static_cast<Data*>(static_cast<KernelData*>(raw))->Run(frame); };
  kernel.data = std::move(data);
  return kernel;
}

}  // namespace interlace
