// Regions (ir/func.h): a compiled kernel of the library that the executor was given, else the body, op by op.
//
// The library has a plain function for each region, `r_KEY(void* const* pointers)`: operands, results, workspace; and
// its workspace's bytes, `w_KEY`. KEY is the first 16 digits of the func's key. Whoever made the library has compared
// its results with the body's; here sizes are what the program says, and nothing is looked at again.
#include <ATen/ops/empty.h>
#include <dlfcn.h>

#include <algorithm>

#include "ir/func.h"
#include "runtime/allocator.h"
#include "runtime/op_kernel.h"
#include "runtime/plan.h"

namespace interlace {
namespace {

struct GivenSlot {
  ValueId value = kNone;
  const Geometry* geometry = nullptr;
  bool placed = false, into = false;
  Target target;
};

std::vector<GivenSlot> GivenSlots(const BuildContext& context, const Op& op) {
  std::vector<GivenSlot> out;
  for (ValueId id : op.results) {
    GivenSlot slot;
    slot.value = id;
    if (id != kNone) {
      slot.geometry = &context.geometry[id];
      slot.placed = context.has_place(id);
      slot.into = context.program.value(id).placed;
      if (slot.placed) slot.target = TargetOf(context, id);
    }
    out.push_back(std::move(slot));
  }
  return out;
}

// The body with slots of its own.
struct BodyKernel final : KernelData {
  std::shared_ptr<const Program> body;
  std::vector<Geometry> geometry;
  std::vector<at::Tensor> fixed;  // nothing is
  std::vector<ValueId> operands, inside, gives;
  std::vector<GivenSlot> results;
  Plan plan;
  Frame frame;

  explicit BodyKernel(c10::Device device) : frame(device) {}

  void Run(Frame& outer) {
    for (size_t i = 0; i < operands.size(); ++i) frame.slots[inside[i]] = outer.slots[operands[i]];
    for (ValueId id : plan.unused) frame.slots[id].reset();
    for (const Instruction& at : plan.instructions) {
      at.run(at.data, frame);
      for (int32_t i = at.free_begin; i < at.free_end; ++i) frame.slots[plan.frees[i]].reset();
    }
    for (size_t i = 0; i < results.size(); ++i) {
      at::Tensor made = std::move(frame.slots[gives[i]]);
      const GivenSlot& result = results[i];
      if (result.value == kNone) continue;
      if (result.placed) {
        at::Tensor target = result.target.Get(outer);
        if (made.const_data_ptr() != target.const_data_ptr()) {
          if (!result.into) ArenaHook::IsResult(made.const_data_ptr(), target.const_data_ptr());
          target.copy_(made);
          if (result.into) outer.counters.copied_bytes += static_cast<int64_t>(target.nbytes());
        }
        made = std::move(target);
      }
      outer.slots[result.value] = std::move(made);
    }
  }
};

Result<Kernel> BodyOf(const BuildContext& context, const Op& op, const Func& func) {
  auto kernel = std::make_unique<BodyKernel>(context.device);
  const Program& body = *func.body;
  kernel->body = func.body;
  for (ValueId id = 0; id < body.num_values(); ++id) {
    INTERLACE_ASSIGN(Geometry geometry, body.HasValue(id) ? GeometryOf(body, body.value(id)) : Geometry());
    kernel->geometry.push_back(std::move(geometry));
  }
  kernel->fixed.resize(body.num_values());
  kernel->inside = OperandsOf(func);
  kernel->gives = GivenBy(func);
  INTERLACE_ASSIGN(kernel->operands, OperandsOf(op));
  kernel->results = GivenSlots(context, op);
  kernel->frame.keys = c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, context.device));
  kernel->frame.options = &context.options;
  kernel->frame.slots.resize(body.num_values());
  kernel->frame.transfer_of.assign(body.num_values(), -1);
  BuildContext inner{.program = body,
                     .phase = body.phases[0],
                     .geometry = kernel->geometry,
                     .fixed = kernel->fixed,
                     .comms = context.comms,
                     .ranks = context.ranks,
                     .group_position = context.group_position,
                     .options = context.options,
                     .device = context.device,
                     .lanes = nullptr,
                     .dies_here = {},
                     .receive_buffer = {}};
  inner.types_checked = context.types_checked;
  INTERLACE_ASSIGN(kernel->plan, BuildPlan(inner, body.phases[0], /*keep_operands=*/false));
  return MakeKernel(std::move(kernel));
}

using Compiled = void (*)(void* const*);

struct CompiledKernel final : KernelData {
  std::shared_ptr<void> library;  // open as long as one of its kernels is there
  Compiled function = nullptr;
  int64_t workspace = 0;  // bytes
  std::vector<ValueId> operands;
  std::vector<GivenSlot> results;
  std::vector<void*> pointers;
  std::vector<at::Tensor> given;

  void Run(Frame& frame) {
    pointers.clear();
    // NOLINTNEXTLINE: the function reads its operands only
    for (ValueId id : operands) pointers.push_back(const_cast<void*>(frame.slots[id].const_data_ptr()));
    for (size_t i = 0; i < results.size(); ++i) {
      const GivenSlot& result = results[i];
      given[i] = result.placed ? result.target.Get(frame) : Allocate(*result.geometry, frame.device, /*zero=*/false);
      if (result.into) frame.counters.placed_bytes += static_cast<int64_t>(given[i].nbytes());
      pointers.push_back(given[i].mutable_data_ptr());
    }
    at::Tensor scratch;
    if (workspace > 0) scratch = at::empty({workspace}, at::TensorOptions(c10::kByte).device(frame.device));
    pointers.push_back(workspace > 0 ? scratch.mutable_data_ptr() : nullptr);
    function(pointers.data());
    for (size_t i = 0; i < results.size(); ++i) frame.slots[results[i].value] = std::move(given[i]);
  }
};

// nullopt: the library has no such region, or the program drops a result that the function would write.
std::optional<Kernel> CompiledOf(const BuildContext& context, const Op& op, const Func& func) {
  const RuntimeOptions& options = context.options;
  const std::string key = func.key.substr(0, 16);
  if (options.regions.empty() || !context.device.is_cpu() || options.debug) return std::nullopt;
  if (std::find(options.region_keys.begin(), options.region_keys.end(), key) == options.region_keys.end())
    return std::nullopt;
  if (std::find(op.results.begin(), op.results.end(), kNone) != op.results.end()) return std::nullopt;
  const std::shared_ptr<void> library(dlopen(options.regions.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* handle) {
    if (handle != nullptr) dlclose(handle);
  });
  if (library == nullptr) return std::nullopt;
  void* const function = dlsym(library.get(), ("r_" + key).c_str());
  const void* const workspace = dlsym(library.get(), ("w_" + key).c_str());
  if (function == nullptr || workspace == nullptr) return std::nullopt;
  const Result<std::vector<ValueId>> operands = OperandsOf(op);
  if (!operands.ok()) return std::nullopt;
  auto kernel = std::make_unique<CompiledKernel>();
  kernel->library = library;
  kernel->function = reinterpret_cast<Compiled>(function);
  kernel->workspace = *static_cast<const int64_t*>(workspace);
  kernel->operands = *operands;
  kernel->results = GivenSlots(context, op);
  kernel->given.resize(op.results.size());
  return MakeKernel(std::move(kernel));
}

}  // namespace

Result<Kernel> BuildRegionKernel(const BuildContext& context, const Op& op) {
  const int32_t index = FuncOf(context.program, op);
  if (index == kNone) return OpError(context, op, "the program has no such func");
  const Func& func = context.program.funcs[index];
  if (std::optional<Kernel> compiled = CompiledOf(context, op, func)) return std::move(*compiled);
  return BodyOf(context, op, func);
}

}  // namespace interlace
