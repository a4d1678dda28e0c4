// The hook of an arena (allocator.h) in front of a device's allocator. What it serves is the arena's own; everything else
// is the framework's, and passes unchanged, so that its blocks are still known to it by their deleter. Only while a step
// learns do blocks have a deleter of ours, which notes when they go.
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <utility>

#include "runtime/allocator.h"
#include "runtime/arena_memory.h"

namespace interlace {

namespace {

// A process has one kind of accelerator.
c10::DeviceAllocator* framework = nullptr;
c10::DeleterFnPtr framework_delete = nullptr;
thread_local bool asked = false;

void ServedDelete(void* pointer) {
  ArenaHook::Returned(pointer);
}

void WatchedDelete(void* pointer) {
  ArenaHook::Returned(pointer);
  framework_delete(pointer);
}

// For raw_deallocate.
void AnyDelete(void* pointer) {
  ArenaMemory::Holds(pointer) ? ServedDelete(pointer) : WatchedDelete(pointer);
}

class HookedAllocator final : public c10::DeviceAllocator {
 public:
  explicit HookedAllocator(c10::DeviceType type) : type_(type) {}

  c10::DataPtr allocate(size_t bytes) override {
    asked = true;
    if (bytes == 0 || !ArenaHook::Watches(type_)) return framework->allocate(bytes);
    const auto size = static_cast<int64_t>(bytes);
    const c10::impl::VirtualGuardImpl guard(type_);
    if (char* place = ArenaHook::Serve(size); place != nullptr)
      return {place, place, &ServedDelete, guard.getDevice()};
    c10::DataPtr data = framework->allocate(bytes);
    if (!ArenaHook::Logs() || data.get() == nullptr || data.get_deleter() != framework_delete) return data;
    const c10::Device device = data.device();
    void* const pointer = data.release_context();
    ArenaHook::Asked(size, pointer);
    return {pointer, pointer, &WatchedDelete, device};
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (ArenaMemory::Holds(data.get())) return;  // it stays until the step is over, and steps follow one another
    if (data.get_deleter() != &WatchedDelete) return framework->recordStream(data, stream);
    c10::DataPtr plain(data.get(), data.get_context(), framework_delete, data.device());
    framework->recordStream(plain, stream);
    plain.release_context();
  }
  c10::DeleterFnPtr raw_deleter() const override { return &AnyDelete; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { framework->copy_data(to, from, bytes); }
  bool initialized() override { return framework->initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { framework->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return framework->getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { framework->resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { framework->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return framework->getMemoryInfo(device); }

 private:
  c10::DeviceType type_;
};

}  // namespace

bool InstallDeviceHook(c10::Device device) {
  static std::once_flag once;
  static bool serves = false;
  std::call_once(once, [&] {
    auto* const known = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (known == nullptr || known->raw_deleter() == nullptr) return;  // its blocks could not be recognized
    framework = known;
    framework_delete = known->raw_deleter();
    static HookedAllocator hooked(device.type());
    c10::SetAllocator(device.type(), &hooked, /*priority=*/100);
    asked = false;
    (void)at::empty({1}, c10::TensorOptions().device(device));
    serves = asked;
    if (!serves) c10::SetAllocator(device.type(), known, /*priority=*/100);
  });
  return serves;
}

}  // namespace interlace
