// What stands in for CUDA's driver in tests: the calls of it that src/runtime/region_driver.cc makes. No kernel of a cubin
// runs here. A test says what the manifest has of every kernel (soft_kernel, as Python reads it) and which function of a
// library for CPUs computes the same region (soft_region). Each launch is compared with the former and written down; the
// last one of a region puts the latter onto the stream of the software accelerator, on the addresses that all launches of
// the region were given, so that a wrong parameter is a wrong number. Without an accelerator (soft_attach) nothing runs.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "order.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using soft::Access;
using Pointers = void* const*;

enum Code { kOk = 0, kInvalidValue = 1, kInvalidContext = 201, kNoBinary = 209, kNotFound = 500, kNoResources = 701 };
const std::map<int, const char*> kNames = {
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},  {100, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"}, {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND"},          {kNoResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}};
constexpr unsigned kPlainShared = 48 << 10;

struct Region {
  void (*run)(Pointers) = nullptr;  // operands, results, workspace
  int64_t workspace = 0;            // bytes of that function's
  int64_t operands = 0;
  std::vector<int64_t> bytes;  // by pointer, the kernels' own workspace last
  size_t kernels = 0;
};
struct Kernel {
  std::string key, name, image;
  size_t index = 0;  // in its region
  std::vector<unsigned> launch;  // blocks along x, y, z, threads, shared bytes
  std::vector<int64_t> takes;    // of each parameter: pointer or -1, what is added to it or the number, bytes
  int loaded = 0;                // how often
  unsigned shared_allowed = kPlainShared;
};
struct Module {
  Kernel* kernel;
};
// A region's launches so far, on one stream.
struct Going {
  size_t next = 0;
  std::vector<char*> pointers;
};
struct Job {
  void (*run)(Pointers);
  std::vector<void*> pointers;
  std::vector<char> scratch;
  std::vector<std::vector<char>> unread;
};

std::mutex mutex;
std::map<std::string, Region> regions;
std::vector<std::unique_ptr<Kernel>> kernels;
std::vector<std::unique_ptr<Module>> modules;
std::map<std::pair<void*, std::string>, Going> going;
std::map<std::pair<std::string, std::string>, int> failing;  // by call and region ("" all of them)
std::string launches, faults;                                // a line each
int capability = 90;
thread_local void* context = nullptr;
void (*enqueue)(int, const char*, const Access*, size_t, void (*)(void*), void (*)(void*), void*) = nullptr;
void* (*real)(const void*) = nullptr;

int Planted(const char* call, const std::string& key = "") {
  for (const std::string& of : {std::string(), key}) {
    if (const auto found = failing.find({call, of}); found != failing.end()) return found->second;
  }
  return kOk;
}

int Fault(const Kernel& kernel, const std::string& text) {
  faults += kernel.key + " " + kernel.name + ": " + text + "\n";
  return kInvalidValue;
}

void RunJob(void* data) {
  auto* const job = static_cast<Job*>(data);
  job->run(job->pointers.data());
}
void DropJob(void* data) { delete static_cast<Job*>(data); }

// All of the region's launches are there: what it computes becomes an op of the stream.
int Compute(const Kernel& last, const Region& region, const Going& state, void* stream) {
  if (region.run == nullptr) return Fault(last, "no function computes its region");
  auto job = std::make_unique<Job>();
  job->run = region.run;
  job->scratch.resize(static_cast<size_t>(region.workspace) + 64);
  std::vector<Access> touched;
  for (size_t i = 0; i < region.bytes.size(); ++i) {
    char* const at = state.pointers[i];
    const bool operand = static_cast<int64_t>(i) < region.operands, workspace = i + 1 == region.bytes.size();
    if (at != nullptr && region.bytes[i] > 0) touched.push_back({at, at + region.bytes[i], !operand});
    if (workspace) break;
    // Of an operand that no kernel takes nothing can count: the function gets other bytes.
    if (at == nullptr && operand) job->unread.emplace_back(static_cast<size_t>(region.bytes[i]) + 64, '\xff');
    job->pointers.push_back(at == nullptr && operand ? job->unread.back().data() : real(at));
    if (job->pointers.back() == nullptr) return Fault(last, "no kernel takes the device's pointer " + std::to_string(i));
  }
  job->pointers.push_back(job->scratch.data() + 64 - reinterpret_cast<uintptr_t>(job->scratch.data()) % 64);
  enqueue(static_cast<int>(reinterpret_cast<intptr_t>(stream)), "a compiled region", touched.data(), touched.size(),
          &RunJob, &DropJob, job.release());
  return kOk;
}

}  // namespace

// ---- what tests say and ask ----

EXPORT void soft_attach(decltype(enqueue) give, decltype(real) where) { enqueue = give, real = where; }
EXPORT void soft_region(const char* key, void (*run)(Pointers), int64_t workspace, int64_t operands, size_t pointers,
                        const int64_t* bytes) {
  const std::lock_guard lock(mutex);
  Region& region = regions[key];
  region.run = run, region.workspace = workspace, region.operands = operands;
  region.bytes.assign(bytes, bytes + pointers);
}
EXPORT void soft_kernel(const char* key, size_t index, size_t count, const char* name, const char* image, size_t size,
                        const unsigned* launch, const int64_t* takes, size_t parameters) {
  const std::lock_guard lock(mutex);
  regions[key].kernels = count;
  auto kernel = std::make_unique<Kernel>();
  kernel->key = key, kernel->name = name, kernel->image.assign(image, size), kernel->index = index;
  kernel->launch.assign(launch, launch + 5);
  kernel->takes.assign(takes, takes + 3 * parameters);
  kernels.push_back(std::move(kernel));
}
// From now on `call` gives this number, for kernels of a region or ("") always; 0: it works again.
EXPORT void soft_fail(const char* call, const char* key, int code) {
  const std::lock_guard lock(mutex);
  failing.erase({call, key});
  if (code != kOk) failing[{call, key}] = code;
}
EXPORT void soft_capability(int is) { capability = is; }
// Lines since the last call: launches, and what was wrong with any. The text is valid until the next call.
EXPORT const char* soft_launches() {
  const std::lock_guard lock(mutex);
  static std::string text;
  text = std::exchange(launches, {});
  return text.c_str();
}
EXPORT const char* soft_faults() {
  const std::lock_guard lock(mutex);
  static std::string text;
  text = std::exchange(faults, {});
  return text.c_str();
}

// ---- the driver ----

EXPORT int cuInit(unsigned) { return Planted("cuInit"); }
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kOk;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return kOk;
}
EXPORT int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + device));
  return kOk;
}
EXPORT int cuCtxGetCurrent(void** out) {
  *out = context;
  return kOk;
}
EXPORT int cuCtxSetCurrent(void* to) {
  context = to;
  return kOk;
}
EXPORT int cuGetErrorName(int code, const char** name) {
  const auto found = kNames.find(code);
  *name = found == kNames.end() ? nullptr : found->second;
  return found == kNames.end() ? kInvalidValue : kOk;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  const std::lock_guard lock(mutex);
  if (context == nullptr) return kInvalidContext;
  if (reinterpret_cast<uintptr_t>(image) % 8 != 0) return kInvalidValue;
  // Regions may have the same kernel: they are loaded in the order of the manifest, each as often as the others.
  Kernel* found = nullptr;
  for (const auto& kernel : kernels) {
    const bool same = std::memcmp(image, kernel->image.data(), kernel->image.size()) == 0;
    if (same && (found == nullptr || kernel->loaded < found->loaded)) found = kernel.get();
  }
  if (found == nullptr) return kNoBinary;
  ++found->loaded;
  if (const int code = Planted("cuModuleLoadData", found->key); code != kOk) return code;
  modules.push_back(std::make_unique<Module>(Module{found}));
  *module = modules.back().get();
  return kOk;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  const std::lock_guard lock(mutex);
  Kernel* const kernel = static_cast<Module*>(module)->kernel;
  if (kernel->name != name) return kNotFound;
  *function = kernel;
  return Planted("cuModuleGetFunction", kernel->key);
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  const std::lock_guard lock(mutex);
  auto& kernel = *static_cast<Kernel*>(function);
  if (attribute != 8) return kInvalidValue;
  kernel.shared_allowed = static_cast<unsigned>(value);
  return Planted("cuFuncSetAttribute", kernel.key);
}
EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
  const std::lock_guard lock(mutex);
  const auto& kernel = *static_cast<const Kernel*>(function);
  const Region& region = regions[kernel.key];
  if (const int code = Planted("cuLaunchKernel", kernel.key); code != kOk) return code;
  if (context == nullptr) return kInvalidContext;
  if (extra != nullptr || shared > kernel.shared_allowed) return Fault(kernel, "it cannot be launched so");
  if (std::vector<unsigned>{gx, gy, gz, bx, shared} != kernel.launch || by != 1 || bz != 1)
    return Fault(kernel, "other blocks, threads or shared memory than the manifest's");
  launches += kernel.key + " " + kernel.name;
  for (const uint64_t n : {uint64_t{gx}, uint64_t{gy}, uint64_t{gz}, uint64_t{bx}, uint64_t{by}, uint64_t{bz},
                           uint64_t{shared}, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(stream))})
    launches += " " + std::to_string(n);
  Going& state = going[{stream, kernel.key}];
  if (kernel.index == 0) state = {};
  if (state.next++ != kernel.index) return Fault(kernel, "kernels of its region were left out");
  state.pointers.resize(region.bytes.size());
  for (size_t i = 0; 3 * i < kernel.takes.size(); ++i) {
    const int64_t pointer = kernel.takes[3 * i], added = kernel.takes[3 * i + 1];
    uint64_t value = 0;
    std::memcpy(&value, parameters[i], static_cast<size_t>(kernel.takes[3 * i + 2]));
    launches += " " + std::to_string(value);
    if (pointer < 0) {
      if (value != static_cast<uint64_t>(added)) return Fault(kernel, "parameter " + std::to_string(i) + " is another number");
      continue;
    }
    char* const at = reinterpret_cast<char*>(value) - added;
    char*& known = state.pointers.at(static_cast<size_t>(pointer));
    if (known != nullptr && known != at) return Fault(kernel, "pointer " + std::to_string(pointer) + " differs between parameters");
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) return Fault(kernel, "an address that is not aligned");
    known = at;
  }
  launches += "\n";
  if (enqueue == nullptr || state.next != region.kernels) return kOk;
  return Compute(kernel, region, std::exchange(state, {}), stream);
}
