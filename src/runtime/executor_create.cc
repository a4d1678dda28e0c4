// How an executor comes to be: from text to states and plans.
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "ir/pending.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "runtime/allocator.h"
#include "runtime/executor.h"
#include "runtime/pinned_tier.h"
#include "runtime/step_heap.h"
#include "runtime/step_scope.h"
#include "runtime/stream.h"

namespace interlace {

namespace {

Result<at::Tensor> TensorOfConst(const Program& program, const Const& constant, const Geometry& g, c10::Device device) {
  const std::vector<Arg>& items = constant.data.list;
  if (static_cast<int64_t>(items.size()) != g.elements) {
    return MakeError("const %", constant.value, " \"", constant.name, "\" has ", items.size(),
                     " numbers, its type needs ", g.elements);
  }
  std::vector<double> reals;
  std::vector<int64_t> integers;
  const bool integral = c10::isIntegralType(g.dtype, /*includeBool=*/true);
  for (const Arg& item : items) {
    const double real = item.kind == Arg::Kind::kFloat  ? item.real
                        : item.kind == Arg::Kind::kBool ? item.boolean
                                                        : static_cast<double>(item.integer.value);
    reals.push_back(real);
    integers.push_back(item.kind == Arg::Kind::kInt
                           ? item.integer.value
                           : static_cast<int64_t>(item.kind == Arg::Kind::kBool ? item.boolean : real));
  }
  at::Tensor staged = integral ? at::tensor(integers) : at::tensor(reals, c10::kDouble);
  at::Tensor out = Allocate(g, device, /*zero=*/true);
  out.copy_(staged.view(out.sizes()));
  return out;
}

}  // namespace

Result<std::unique_ptr<Executor>> Executor::Create(std::string_view text, c10::Device device,
                                                   const std::vector<AxisSpec>& axes, double timeout_s,
                                                   RuntimeOptions options, const Executor* donor, bool take_states) {
  InstallCountingAllocator();
  if (!device.is_cpu() && !device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  std::unique_ptr<Executor> executor(new Executor(device));
  executor->options_ = std::move(options);
  if (donor != nullptr) INTERLACE_TRY(executor->TakeFrom(*donor, take_states));
  INTERLACE_TRY(executor->Load(text, axes, timeout_s));
  return executor;
}

Status Executor::TakeFrom(const Executor& donor, bool take_states) {
  if (donor.device_ != device_)
    return MakeError("the running program is on ", donor.device_.str(), ", the new one is for ", device_.str());
  if (take_states && !donor.runner_.between_steps())
    return MakeError("the running program has transfers under way between its steps");
  if (take_states && donor.runner_.frame.pending.on) {
    return MakeError(
        "the running program has left its optimizer step pending; flush it before another program takes the states");
  }
  // States of its own have places of their own: those of the donor are still read.
  const TierBank& bank = *donor.moving_.bank();
  const std::string prefix = take_states ? bank.prefix() : bank.prefix().empty() ? "new " : "";
  moving_.SetBank(std::make_unique<TierBank>(bank.tier(), device_, prefix));
  lanes_ = donor.lanes_;
  if (take_states) {
    store_.TakeOver(donor.store_);
    comms_ = donor.comms_;
    arena_.ShareFloor(donor.arena_);
  }
  return Ok{};
}

namespace {

// Whether ranks along an axis see batches of their own: those that units shard or replicate over do. Along the others,
// which cut what one batch goes through, random numbers are the same. A program without units has data on every axis
// but those of stages and rings, whose ranks send to one another.
bool HasDataAlong(const Program& program, std::string_view axis) {
  if (program.units.empty()) return !program.MessageAxes().contains(std::string(axis));
  return std::any_of(program.units.begin(), program.units.end(),
                     [&](const Unit& unit) { return NamesAxis(unit.axis, axis) || NamesAxis(unit.replicas, axis); });
}

}  // namespace

// Those of a donor go on: one set of connections, whatever program runs on it.
Status Executor::JoinAxes(const Program& parsed, const std::vector<AxisSpec>& axes, double timeout_s) {
  const auto given = [&](std::string_view name) {
    return std::find_if(axes.begin(), axes.end(), [&](const AxisSpec& s) { return s.name == name; });
  };
  for (const Axis& axis : parsed.mesh) {
    ranks_in_run_ *= axis.size;
    const auto spec = given(axis.name);
    if (spec == axes.end()) {
      if (axis.size > 1)
        return MakeError("the program runs on ", axis.size, " ranks of the axis \"", axis.name,
                         "\", but no such axis was given");
      ranks_["rank_" + axis.name] = 0;
      continue;
    }
    if (spec->size != axis.size) {
      return MakeError("the program was compiled for ", axis.size, " ranks of the axis \"", axis.name,
                       "\", this run has ", spec->size);
    }
    if (spec->rank < 0 || spec->rank >= spec->size)
      return MakeError("rank ", spec->rank, " is not in 0..", spec->size - 1);
    ranks_["rank_" + axis.name] = spec->rank;
    rank_ = rank_ * spec->size + spec->rank;
    if (HasDataAlong(parsed, axis.name)) data_rank_ = data_rank_ * spec->size + spec->rank;
  }
  const auto open = [&](std::string_view group) -> Status {
    const auto spec = given(group);
    if (comms_.contains(std::string(group))) return Ok{};
    if (spec == axes.end()) {
      return MakeError("the program transfers along \"", group, "\", and no process group was given for it");
    }
    AxisSpec along = *spec;
    along.row = RowOf(parsed.mesh, group);
    INTERLACE_ASSIGN(comms_[spec->name], Comm::Create(along, timeout_s));
    return Ok{};
  };
  const bool tcp = std::any_of(axes.begin(), axes.end(), [](const AxisSpec& s) { return s.backend == "tcp"; });
  for (const std::string& group : parsed.TransferAxes(/*grids=*/tcp)) INTERLACE_TRY(open(group));
  for (const auto& [axis, channels] : parsed.MessageAxes()) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      const std::string name = MessagesAlong(axis, channel);
      if (comms_[name] != nullptr) continue;
      AxisSpec spec = comms_.at(axis)->spec();
      if (channel > 0 && spec.backend != "tcp") {  // process groups of its own
        const auto own = given(name);
        if (own == axes.end()) return MakeError("no process groups were given for \"", name, "\"");
        spec = *own;
      }
      spec.channel = channel;
      INTERLACE_ASSIGN(comms_[name], Comm::Create(spec, timeout_s));
    }
  }
  return Ok{};
}

Status Executor::OpenTier() {
  if (moving_.bank() != nullptr) return Ok{};  // the donor's
  const TierOptions options{
      .folder = options_.tier, .bytes_per_second = options_.tier_bandwidth, .rank = rank_, .ranks = ranks_in_run_};
  INTERLACE_ASSIGN(std::shared_ptr<Tier> tier, MakeTier(options, device_));
  moving_.SetBank(std::make_unique<TierBank>(std::move(tier), device_));
  return Ok{};
}

Status Executor::Load(std::string_view text, const std::vector<AxisSpec>& axes, double timeout_s) {
  INTERLACE_ASSIGN(Program parsed, Parse(text));
  INTERLACE_TRY(Verify(parsed));
  INTERLACE_TRY(JoinAxes(parsed, axes, timeout_s));
  INTERLACE_ASSIGN(program_, Bind(parsed, ranks_));
  for (size_t i = 0; i < program_.groups.size(); ++i) group_position_[program_.groups[i].id] = static_cast<int32_t>(i);
  pending_phase_ = {"update", {}, {}, PendingOps(program_), PhaseKind::kStep};
  geometry_.resize(program_.num_values());
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    if (!program_.HasValue(id)) continue;
    INTERLACE_ASSIGN(geometry_[id], GeometryOf(program_, program_.value(id)));
  }
  Frame& frame = runner_.frame;
  frame.keys = c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, device_));
  frame.options = &options_;
  frame.transfer_of.assign(program_.num_values(), -1);
  runner_.SetComms(comms_);
  if (options_.keyed_random)
    runner_.SetRandom(std::make_unique<KeyedRandom>(device_, options_.seed, static_cast<uint64_t>(data_rank_)));
  INTERLACE_TRY(OpenTier());
  if (!device_.is_cpu() && lanes_ == nullptr) lanes_ = std::make_shared<LaneStreams>(device_);
  recorder_.SetDevice(device_, lanes_, &graphs_);
  try {
    INTERLACE_TRY(Prepare());
  } catch (const std::exception& error) {
    return MakeError("cannot prepare the program: ", MessageOf(error));
  }
  return graphs_.Decide(options_, comms_, arena_.on());
}

Status Executor::Prepare() {
  StepScope scope(device_);
  MemoryScope counted;  // what leaves memory in a step was counted when it came
  bool moves = std::any_of(program_.phases.begin(), program_.phases.end(), [&](const Phase& phase) {
    return std::any_of(phase.ops.begin(), phase.ops.end(),
                       [&](OpId id) { return program_.op(id).kind == OpKind::kOffloadStart; });
  });
  const StepHeap::Serving serving(moves && device_.is_cpu());
  INTERLACE_TRY(AllocateFixed());
  INTERLACE_TRY(moving_.Find());
  moves = moves || !moving_.empty();
  on_heap_ = moves && device_.is_cpu();
  if (moves) arena_.TurnOff("the program moves storages to a tier");
  if (options_.arena && !options_.debug && !moves) {
    const Status status = BuildArenaPlans();
    if (status.ok()) return Ok{};
    if (!device_.is_cpu() && arena_.wanted_bytes() > 0) return WithMemory(status.error());
    arena_.TurnOff(status.error().ToString());
  }
  runner_.ResetSlots(nullptr);
  return BuildPlans(/*keep_operands=*/false, plans_);
}

// Where there is no room for the arena any more, a step fails, and those after it go without.
Status Executor::RenewArena(bool moved) {
  const Status status = BuildArenaPlans(moved);
  if (status.ok()) return Ok{};
  arena_.TurnOff(status.error().ToString());
  graphs_.TurnOff(status.error().ToString());
  runner_.ResetSlots(nullptr);
  INTERLACE_TRY(BuildPlans(/*keep_operands=*/false, plans_));
  return WithMemory(status.error());
}

Status Executor::AllocateFixed() {
  fixed_.assign(program_.num_values(), at::Tensor());
  const auto adopt = [&](ValueId id, const std::string& name, bool persistent = true, bool out = false) -> Status {
    if (program_.RootOf(id) != id) return Ok{};
    INTERLACE_ASSIGN(fixed_[id], store_.Adopt(name, geometry_[id], persistent, out));
    return Ok{};
  };
  for (const State& state : program_.states)
    INTERLACE_TRY(adopt(state.value, StateKey(state), state.persistent, state.out));
  // A parameter of a unit lies in the unit's state (resident), or exists only while it is gathered.
  for (const Param& param : program_.params) {
    if (param.unit == kNone) INTERLACE_TRY(adopt(param.value, "parameter " + param.name));
  }
  // A plain buffer may be a constant of the trace, which a program for other shapes has not.
  for (const Buffer& buffer : program_.buffers) {
    INTERLACE_TRY(adopt(buffer.value, "buffer " + buffer.name, buffer.persistent));
  }
  INTERLACE_TRY(store_.DropOthers());
  const_bytes_ = 0;
  for (const Const& constant : program_.consts) {
    INTERLACE_ASSIGN(fixed_[constant.value], TensorOfConst(program_, constant, geometry_[constant.value], device_));
    const_bytes_ += static_cast<int64_t>(fixed_[constant.value].storage().nbytes());
  }
  // Every view of what is fixed is fixed: made here, once.
  for (ValueId id = 0; id < program_.num_values(); ++id) {
    if (!program_.HasValue(id) || fixed_[id].defined()) continue;
    const ValueId root = program_.RootOf(id);
    if (root == id || !fixed_[root].defined()) continue;
    if (geometry_[id].end_bytes() > geometry_[root].end_bytes()) {
      return MakeError("%", id, " reaches beyond the end of %", root);
    }
    fixed_[id] = MakeView(fixed_[root].storage(), geometry_[id]);
  }
  return Ok{};
}

Status Executor::BuildPlans(bool keep_operands, std::vector<Plan>& plans) {
  plans.clear();
  for (const Phase& phase : program_.phases) {
    INTERLACE_ASSIGN(Plan plan, BuildPhase(phase, fixed_, keep_operands, nullptr));
    plans.push_back(std::move(plan));
  }
  return Ok{};
}

// The arena for what is known of the kernels, or (moved) the one there is at its new place, and plans of the phases
// with its tensors.
Status Executor::BuildArenaPlans(bool moved) {
  StepScope scope(device_);
  try {
    graphs_.Clear();
    plans_.clear();
    runner_.ResetSlots(nullptr);
    if (moved) {
      arena_.MakeTensors(fixed_);
    } else {
      arena_.Clear();
      INTERLACE_TRY(arena_.Make(fixed_));
    }
    for (size_t v = 0; v < arena_.plan()->variants.size(); ++v) {
      const PlanVariant& variant = arena_.plan()->variants[v];
      if (variant.same_as != static_cast<int32_t>(v)) {  // runs by the plan of that one
        plans_.emplace_back();
        continue;
      }
      const std::vector<at::Tensor> receive = arena_.ReceiveBuffers(static_cast<int32_t>(v));
      const std::vector<at::Tensor>& slots = (*arena_.slots_of_turn())[variant.turn];
      INTERLACE_ASSIGN(Plan built, BuildPhase(*variant.phase, slots, /*keep_operands=*/false, &receive));
      arena_.ExpectIn(static_cast<int32_t>(v), built);
      plans_.push_back(std::move(built));
    }
  } catch (const std::exception& error) {
    return MakeError("cannot prepare the program: ", MessageOf(error));
  }
  runner_.ResetSlots(arena_.slots_of_turn());
  return Ok{};
}

Result<Plan> Executor::BuildPhase(const Phase& phase, const std::vector<at::Tensor>& fixed, bool keep_operands,
                                  const std::vector<at::Tensor>* receive_buffers) {
  std::map<std::string, Comm*> comms;
  for (const auto& [name, comm] : comms_) comms[name] = comm.get();
  const BuildContext context{.program = program_,
                             .phase = phase,
                             .geometry = geometry_,
                             .fixed = fixed,
                             .comms = comms,
                             .ranks = ranks_,
                             .group_position = group_position_,
                             .options = options_,
                             .device = device_,
                             .bank = moving_.bank(),
                             .lanes = lanes_,
                             .dies_here = {},
                             .types_checked = arena_.plans_outgrown() > 0,
                             .receive_buffer = {},
                             .on_heap = on_heap_};
  return BuildPlan(context, phase, keep_operands, receive_buffers);
}

}  // namespace interlace
