// region_driver.h — compiled regions on a CUDA device: cubins loaded and launched through the driver (cuda_driver.h),
// as the manifest beside them says (python/interlace/regions/cuda.py, which reads it).
//
//   regions ──Load──► modules, functions ──Launch(region, pointers, stream)──► its kernels, in their order, on the stream
//
// Which devices have this driver is for the caller to know.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "runtime/cuda_driver.h"

namespace interlace {

struct CubinKernel {
  std::string name, image;           // in the cubin, and its bytes
  std::array<uint32_t, 3> blocks{};  // along x, y, z
  uint32_t threads = 0;              // of a block
  uint32_t shared_bytes = 0;         // dynamic shared memory of a block
  // Of each parameter: the address so many bytes after one of the region's pointers; or -1 and a number.
  std::vector<std::pair<int64_t, int64_t>> parameters;
};

struct CubinRegion {
  std::string key;                    // the first 16 digits of the func's
  int64_t operands = 0, results = 0;  // its pointers: these, and the workspace
  int64_t workspace = 0;              // bytes
  std::vector<CubinKernel> kernels;   // in the order of their launches
  std::vector<void*> functions = {};  // of the kernels, when they are loaded
  std::string refused = {};           // why the driver does not take it; empty: it does
  int64_t pointers() const { return operands + results + 1; }
};

class Cubins {
 public:
  // `target`: "sm_90". Modules stay loaded until the process ends, for a kernel of theirs may still be queued. Error:
  // no driver, another kind of device.
  static Result<std::shared_ptr<const Cubins>> Load(std::string_view target, c10::Device device,
                                                    std::vector<CubinRegion> regions);

  // nullptr: there is no such region, or the driver refuses it.
  const CubinRegion* Find(std::string_view key) const;
  // By key: why the driver does not take them.
  std::map<std::string, std::string> Refused() const;
  // What kernels rely on: every pointer is a multiple of 16.
  static bool Aligned(const std::vector<void*>& pointers);
  // The driver's handle of the device's current stream. Error: a backend that gives none, or an older torch.
  Result<void*> CurrentStream() const;
  // `pointers`: of operands, results and workspace, on the device; `stream`: a CUstream of its. Error: they are not
  // aligned; the driver refuses a kernel. Operands are as they were then, results and workspace are not.
  Status Launch(const CubinRegion& region, const std::vector<void*>& pointers, void* stream) const;

 private:
  explicit Cubins(c10::Device device, const CudaDriver& driver) : device_(device), driver_(driver) {}
  Status LoadRegion(CubinRegion& region) const;

  c10::Device device_;
  CudaDriver driver_;
  void* context_ = nullptr;  // the device's primary one, which torch uses too
  std::vector<CubinRegion> regions_;
};

}  // namespace interlace
