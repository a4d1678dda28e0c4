// cuda_driver.h — what is called of CUDA's driver, libcuda.so.1: opened where it is wanted, so that nothing is linked
// and no header of a vendor is needed. Results are CUDA's numbers, 0 is success; contexts, modules, functions and
// streams are opaque pointers, devices are numbers. A test compares this with cuda.h where there is one.
#pragma once

#include "base/result.h"

namespace interlace {

struct CudaDriver {
  int (*cuInit)(unsigned flags) = nullptr;
  int (*cuDeviceGet)(int* device, int ordinal) = nullptr;
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(void** context, int device) = nullptr;
  int (*cuCtxGetCurrent)(void** context) = nullptr;
  int (*cuCtxSetCurrent)(void* context) = nullptr;
  int (*cuModuleLoadData)(void** module, const void* image) = nullptr;
  int (*cuModuleGetFunction)(void** function, void* module, const char* name) = nullptr;
  int (*cuFuncSetAttribute)(void* function, int attribute, int value) = nullptr;
  int (*cuLaunchKernel)(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                        unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters,
                        void** extra) = nullptr;
  int (*cuGetErrorName)(int code, const char** name) = nullptr;

  // Numbers of attributes.
  static constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;  // of a device
  static constexpr int kMaxDynamicSharedBytes = 8;                                  // of a function

  // Opened and initialized. Error: there is none, or it has no device.
  static Result<CudaDriver> Open();
  // "cuLaunchKernel failed with CUDA error 701 (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"; ok for 0.
  Status Check(int code, const char* call) const;
};

}  // namespace interlace
