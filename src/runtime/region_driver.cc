#include "runtime/region_driver.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "runtime/step_scope.h"

namespace interlace {

namespace {

constexpr uintptr_t kAlignment = 16;              // ALIGNED in python/interlace/regions/cuda.py
constexpr uint32_t kPlainSharedBytes = 48 << 10;  // of a block; a kernel that wants more says so beforehand

// Older versions of torch have no such method.
template <typename Guard>
void* HandleOf(const Guard& guard, c10::Stream stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    TORCH_CHECK(false, "this torch gives no handles of streams; torch 2.13 does");
  }
}

}  // namespace

Result<std::shared_ptr<const Cubins>> Cubins::Load(std::string_view target, c10::Device device,
                                                   std::vector<CubinRegion> regions) {
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  INTERLACE_ASSIGN(const CudaDriver driver, CudaDriver::Open());
  int ordinal = 0, major = 0, minor = 0;
  INTERLACE_TRY(driver.Check(driver.cuDeviceGet(&ordinal, device.index()), "cuDeviceGet"));
  for (const auto& [attribute, value] :
       {std::pair(CudaDriver::kComputeCapabilityMajor, &major), std::pair(CudaDriver::kComputeCapabilityMinor, &minor)})
    INTERLACE_TRY(driver.Check(driver.cuDeviceGetAttribute(value, attribute, ordinal), "cuDeviceGetAttribute"));
  // Devices of 8.x run what is made for 8.0; what is made for 9.0 is of sm_90a, which is 9.0 alone.
  const std::string here = "sm_" + std::to_string(major == 8 ? 80 : 10 * major + minor);
  if (target != here) return MakeError("kernels are for ", target, ", and ", device.str(), " is ", here);
  const std::shared_ptr<Cubins> cubins(new Cubins(device, driver));
  void*& context = cubins->context_;
  INTERLACE_TRY(driver.Check(driver.cuDevicePrimaryCtxRetain(&context, ordinal), "cuDevicePrimaryCtxRetain"));
  INTERLACE_TRY(driver.Check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent"));
  for (CubinRegion& region : regions) {
    if (const Status loaded = cubins->LoadRegion(region); !loaded.ok()) region.refused = loaded.error().message;
  }
  cubins->regions_ = std::move(regions);
  return std::shared_ptr<const Cubins>(cubins);
}

Status Cubins::LoadRegion(CubinRegion& region) const {
  for (CubinKernel& kernel : region.kernels) {
    void *module = nullptr, *function = nullptr;
    const auto check = [&](int code, const char* call) -> Status {
      const Status status = driver_.Check(code, call);
      return status.ok() ? Status(Ok{}) : MakeError("kernel ", kernel.name, ": ", status.error().message);
    };
    for (const auto& [pointer, value] : kernel.parameters) {
      if (pointer >= region.pointers()) return MakeError("kernel ", kernel.name, ": there is no pointer ", pointer);
    }
    INTERLACE_TRY(check(driver_.cuModuleLoadData(&module, kernel.image.data()), "cuModuleLoadData"));
    INTERLACE_TRY(check(driver_.cuModuleGetFunction(&function, module, kernel.name.c_str()), "cuModuleGetFunction"));
    if (kernel.shared_bytes > kPlainSharedBytes) {
      const int wanted = static_cast<int>(kernel.shared_bytes);
      INTERLACE_TRY(check(driver_.cuFuncSetAttribute(function, CudaDriver::kMaxDynamicSharedBytes, wanted),
                          "cuFuncSetAttribute of its shared memory"));
    }
    region.functions.push_back(function);
    kernel.image = {};  // the driver has it
  }
  return Ok{};
}

const CubinRegion* Cubins::Find(std::string_view key) const {
  const auto found =
      std::find_if(regions_.begin(), regions_.end(), [&](const CubinRegion& region) { return region.key == key; });
  return found == regions_.end() || !found->refused.empty() ? nullptr : &*found;
}

std::map<std::string, std::string> Cubins::Refused() const {
  std::map<std::string, std::string> out;
  for (const CubinRegion& region : regions_) {
    if (!region.refused.empty()) out[region.key] = region.refused;
  }
  return out;
}

bool Cubins::Aligned(const std::vector<void*>& pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kAlignment == 0; });
}

Result<void*> Cubins::CurrentStream() const {
  try {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    return HandleOf(guard, guard.getStream(device_));
  } catch (const std::exception& error) {
    return MakeError(MessageOf(error));
  }
}

Status Cubins::Launch(const CubinRegion& region, const std::vector<void*>& pointers, void* stream) const {
  if (!Aligned(pointers)) return MakeError("an address is no multiple of ", kAlignment, ", as its kernels need it");
  // A thread that has called nothing of CUDA yet has no context, and the caller's may be that of another device.
  void* current = nullptr;
  INTERLACE_TRY(driver_.Check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent"));
  if (current != context_) INTERLACE_TRY(driver_.Check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent"));
  for (size_t i = 0; i < region.functions.size(); ++i) {
    const CubinKernel& kernel = region.kernels[i];
    // The driver reads the first bytes of each, as many as the kernel declares: these machines are little-endian.
    c10::SmallVector<uint64_t, 32> values;
    c10::SmallVector<void*, 32> parameters;
    for (const auto& [pointer, value] : kernel.parameters) {
      const uintptr_t base = pointer < 0 ? 0 : reinterpret_cast<uintptr_t>(pointers[pointer]);
      values.push_back(base + static_cast<uint64_t>(value));
    }
    for (uint64_t& value : values) parameters.push_back(&value);
    const int code = driver_.cuLaunchKernel(region.functions[i], kernel.blocks[0], kernel.blocks[1], kernel.blocks[2],
                                            kernel.threads, 1, 1, kernel.shared_bytes, stream, parameters.data(),
                                            /*extra=*/nullptr);
    const Status status = driver_.Check(code, "cuLaunchKernel");
    if (!status.ok()) return MakeError("kernel ", kernel.name, ": ", status.error().message);
  }
  return Ok{};
}

}  // namespace interlace
