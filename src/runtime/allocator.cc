#include "runtime/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace interlace {

namespace {

struct ThreadCount {
  bool on = false;
  int32_t op = -1, peak_op = -1;
  int64_t peak = 0, recent_peak = 0;
};
thread_local ThreadCount tls;
std::atomic<int64_t> live{0};
c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_delete = nullptr;

int64_t BlockBytes(void* pointer) {
  return static_cast<int64_t>(malloc_usable_size(pointer));
}

void CountedDelete(void* pointer) {
  if (pointer == nullptr) return;
  live.fetch_sub(BlockBytes(pointer), std::memory_order_relaxed);
  base_delete(pointer);
}

// For raw_deallocate: the block may be counted or not.
void RawDelete(void* pointer) {
  tls.on ? CountedDelete(pointer) : base_delete(pointer);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = base->allocate(bytes);
    if (!tls.on || data.get() == nullptr || data.get_deleter() != base_delete) return data;
    void* pointer = data.release_context();
    const int64_t now = live.fetch_add(BlockBytes(pointer), std::memory_order_relaxed) + BlockBytes(pointer);
    if (now > tls.recent_peak) tls.recent_peak = now;
    if (now > tls.peak) {
      tls.peak = now;
      tls.peak_op = tls.op;
    }
    return {pointer, pointer, &CountedDelete, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &RawDelete; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void InstallCountingAllocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    base = c10::GetCPUAllocator();
    base_delete = base->raw_deleter();
    if (base_delete == nullptr) return;  // an allocator whose blocks cannot be recognized is left alone
    static CountingAllocator counting;
    c10::SetCPUAllocator(&counting, /*priority=*/100);
  });
}

MemoryScope::MemoryScope() : was_on_(tls.on) {
  if (was_on_) return;
  const int64_t now = live.load(std::memory_order_relaxed);
  tls = {.on = true, .op = -1, .peak_op = -1, .peak = now, .recent_peak = now};
}

MemoryScope::~MemoryScope() {
  if (!was_on_) tls.on = false;
}

void MemoryScope::SetCurrentOp(int32_t op) {
  tls.op = op;
}

int64_t MemoryScope::TakePeak() {
  return std::exchange(tls.recent_peak, live.load(std::memory_order_relaxed));
}

MemoryUse MemoryScope::Use() {
  return {live.load(std::memory_order_relaxed), tls.peak, tls.peak_op};
}

}  // namespace interlace
