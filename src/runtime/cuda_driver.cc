#include "runtime/cuda_driver.h"

#include <dlfcn.h>

#include <type_traits>

namespace interlace {

Result<CudaDriver> CudaDriver::Open() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return MakeError("there is no CUDA driver, install NVIDIA's: ", dlerror());
  CudaDriver driver;
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr) missing = symbol;
  };
#define FIND(symbol) find(driver.symbol, #symbol)
  FIND(cuInit);
  FIND(cuDeviceGet);
  FIND(cuDeviceGetAttribute);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuCtxGetCurrent);
  FIND(cuCtxSetCurrent);
  FIND(cuModuleLoadData);
  FIND(cuModuleGetFunction);
  FIND(cuFuncSetAttribute);
  FIND(cuLaunchKernel);
  FIND(cuGetErrorName);
#undef FIND
  if (!missing.empty()) return MakeError("the CUDA driver has no ", missing, ", install a newer one");
  INTERLACE_TRY(driver.Check(driver.cuInit(0), "cuInit"));
  return driver;
}

Status CudaDriver::Check(int code, const char* call) const {
  if (code == 0) return Ok{};
  const char* name = nullptr;
  if (cuGetErrorName(code, &name) != 0 || name == nullptr) name = "unknown";
  return MakeError(call, " failed with CUDA error ", code, " (", name, ")");
}

}  // namespace interlace
