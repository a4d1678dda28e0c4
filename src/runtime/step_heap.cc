#include "runtime/step_heap.h"

#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "runtime/allocator.h"

namespace interlace {

namespace {

thread_local bool heap_serves = false;

struct CountedHeap {
  PageHeap pages;
  std::mutex mutex;
  std::unordered_set<const void*> counted;  // blocks that a scope counted
};

// Never destroyed: its blocks may outlive everything else.
CountedHeap& TheHeap() {
  static auto* const heap = new CountedHeap;
  return *heap;
}

}  // namespace

c10::DataPtr StepHeap::Allocate(int64_t bytes) {
  CountedHeap& heap = TheHeap();
  char* const memory = heap.pages.Take(bytes);
  TORCH_CHECK(memory != nullptr, "no memory for ", bytes, " bytes of a step: ", std::strerror(errno));
  if (MemoryScope::Add(static_cast<int64_t>(PageHeap::Rounded(bytes)))) {
    const std::lock_guard lock(heap.mutex);
    heap.counted.insert(memory);
  }
  return {memory, memory, &Delete, c10::Device(c10::kCPU)};
}

bool StepHeap::Holds(const void* pointer) {
  return TheHeap().pages.Holds(pointer);
}

void StepHeap::Delete(void* pointer) {
  if (pointer == nullptr) return;
  CountedHeap& heap = TheHeap();
  bool counted;
  {
    const std::lock_guard lock(heap.mutex);
    counted = heap.counted.erase(pointer) > 0;
  }
  const size_t bytes = heap.pages.Give(pointer, /*release=*/!heap_serves);
  if (counted) MemoryScope::Subtract(static_cast<int64_t>(bytes));
}

int64_t StepHeap::Bytes() {
  return TheHeap().pages.Bytes();
}

StepHeap::Serving::Serving(bool on) : was_on_(std::exchange(heap_serves, on)) {}

StepHeap::Serving::~Serving() {
  heap_serves = was_on_;
}

bool StepHeap::Serves(size_t bytes) {
  return heap_serves && bytes >= static_cast<size_t>(PageHeap::kLeast);
}

}  // namespace interlace
