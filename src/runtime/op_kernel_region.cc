// Regions (ir/func.h): a compiled kernel of those that the executor was given, else the body, op by op.
//
// On CPUs they are a library with a plain function for each region, `r_KEY(void* const* pointers)`: operands, results,
// workspace; and its workspace's bytes, `w_KEY`. On other devices they are cubins, which take the same pointers
// (region_driver.h). KEY is the first 16 digits of the func's key. Whoever made or named them has checked them; here
// sizes are what the program says, and nothing is looked at again.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <dlfcn.h>

#include <algorithm>

#include "ir/func.h"
#include "runtime/allocator.h"
#include "runtime/op_kernel.h"
#include "runtime/plan.h"
#include "runtime/region_driver.h"

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

// What every compiled kernel is called with. The workspace comes from torch's allocator, where the arena serves it.
struct CompiledKernel : KernelData {
  int64_t workspace = 0;  // bytes
  std::vector<ValueId> operands;
  std::vector<GivenSlot> results;
  std::vector<void*> pointers;  // of operands, results, workspace
  std::vector<at::Tensor> given;
  at::Tensor scratch;

  void Take(Frame& frame) {
    pointers.clear();
    // NOLINTNEXTLINE: the function reads its operands only
    for (ValueId id : operands) pointers.push_back(const_cast<void*>(frame.slots[id].const_data_ptr()));
    for (size_t i = 0; i < results.size(); ++i) {
      const GivenSlot& result = results[i];
      given[i] = result.placed ? result.target.Get(frame) : Allocate(*result.geometry, frame.device, /*zero=*/false);
      pointers.push_back(given[i].mutable_data_ptr());
    }
    if (workspace > 0) scratch = at::empty({workspace}, at::TensorOptions(c10::kByte).device(frame.device));
    pointers.push_back(workspace > 0 ? scratch.mutable_data_ptr() : nullptr);
  }
  void Give(Frame& frame) {
    scratch.reset();
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].into) frame.counters.placed_bytes += static_cast<int64_t>(given[i].nbytes());
      frame.slots[results[i].value] = std::move(given[i]);
    }
  }
  void Drop() {
    scratch.reset();
    for (at::Tensor& tensor : given) tensor.reset();
  }
};

struct LibraryKernel final : CompiledKernel {
  std::shared_ptr<void> library;  // open as long as one of its kernels is there
  void (*function)(void* const*) = nullptr;

  void Run(Frame& frame) {
    Take(frame);
    function(pointers.data());
    Give(frame);
  }
};

constexpr size_t kMovedBytes = 1 << 20;  // more takes longer to copy than a launch or two

struct DriverKernel final : CompiledKernel {
  std::shared_ptr<const Cubins> cubins;
  const CubinRegion* region = nullptr;
  std::string name;  // of the func
  Kernel body;
  bool refused = false, said = false;
  std::vector<at::Tensor> moved;

  void Run(Frame& frame) {
    if (!refused) {
      Take(frame);
      Move(frame);
      const Status launched = Launch();
      moved.clear();
      if (launched.ok()) return Give(frame);
      Drop();
      if (!said && frame.options->say)
        frame.options->say("region " + name + " runs op by op: " + launched.error().message);
      said = true;
    }
    body.run(body.data.get(), frame);
  }

 private:
  // Operands that lie where kernels cannot read them (labels without their first, of one row) to where they can.
  void Move(const Frame& frame) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const at::Tensor& operand = frame.slots[operands[i]];
      if (Cubins::Aligned({pointers[i]}) || operand.nbytes() > kMovedBytes) continue;
      moved.push_back(at::empty_strided(operand.sizes(), operand.strides(), operand.options()).copy_(operand));
      pointers[i] = moved.back().mutable_data_ptr();
    }
  }
  Status Launch() {
    const Result<void*> stream = cubins->CurrentStream();
    const Status launched = stream.ok() ? cubins->Launch(*region, pointers, *stream) : Status(stream.error());
    // Addresses differ from call to call; what the driver refuses once it is not asked again.
    refused = !launched.ok() && Cubins::Aligned(pointers);
    return launched;
  }
};

// A function of the library; nullptr where it has none for this region.
std::unique_ptr<LibraryKernel> FromLibrary(const std::string& path, const std::string& key) {
  auto kernel = std::make_unique<LibraryKernel>();
  kernel->library = std::shared_ptr<void>(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* handle) {
    if (handle != nullptr) dlclose(handle);
  });
  if (kernel->library == nullptr) return nullptr;
  void* const function = dlsym(kernel->library.get(), ("r_" + key).c_str());
  const void* const workspace = dlsym(kernel->library.get(), ("w_" + key).c_str());
  if (function == nullptr || workspace == nullptr) return nullptr;
  kernel->function = reinterpret_cast<void (*)(void* const*)>(function);
  kernel->workspace = *static_cast<const int64_t*>(workspace);
  return kernel;
}

// The kernels of the device, and the body for when they cannot run; nullptr where there are none for this region.
std::unique_ptr<DriverKernel> FromCubins(const BuildContext& context, const Op& op, const Func& func,
                                         const std::string& key) {
  const std::shared_ptr<const Cubins>& cubins = context.options.cubins;
  const CubinRegion* const region = cubins == nullptr ? nullptr : cubins->Find(key);
  if (region == nullptr || region->operands != std::ssize(OperandsOf(func)) ||
      region->results != std::ssize(GivenBy(func)))
    return nullptr;
  Result<Kernel> body = BodyOf(context, op, func);
  if (!body.ok()) return nullptr;
  auto kernel = std::make_unique<DriverKernel>();
  kernel->cubins = cubins;
  kernel->region = region;
  kernel->name = op.name.substr(kCallPrefix.size()) + " (" + key + ")";
  kernel->body = std::move(*body);
  kernel->workspace = region->workspace;
  return kernel;
}

template <typename Made>
std::optional<Kernel> Finished(const BuildContext& context, const Op& op, std::unique_ptr<Made> kernel) {
  const Result<std::vector<ValueId>> operands = OperandsOf(op);
  if (kernel == nullptr || !operands.ok()) return std::nullopt;
  kernel->operands = *operands;
  kernel->results = GivenSlots(context, op);
  kernel->given.resize(op.results.size());
  return MakeKernel(std::move(kernel));
}

// nullopt: there is no such region, or the program drops a result that the kernels would write.
std::optional<Kernel> CompiledOf(const BuildContext& context, const Op& op, const Func& func) {
  const RuntimeOptions& options = context.options;
  const std::string key = func.key.substr(0, 16);
  if (options.debug) return std::nullopt;
  if (std::find(options.region_keys.begin(), options.region_keys.end(), key) == options.region_keys.end())
    return std::nullopt;
  if (std::find(op.results.begin(), op.results.end(), kNone) != op.results.end()) return std::nullopt;
  if (context.device.is_cpu()) return Finished(context, op, FromLibrary(options.regions, key));
  return Finished(context, op, FromCubins(context, op, func, key));
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
