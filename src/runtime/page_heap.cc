#include "runtime/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/allocator.h"

namespace interlace {

namespace {

constexpr size_t kHeapLargePage = size_t{2} << 20;
constexpr size_t kHeapRegion = size_t{1} << 30;  // addresses taken at a time; pages that are not used take no memory
thread_local bool heap_serves = false;

size_t HeapRoundUp(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

char* HeapAligned(char* pointer) {
  return pointer + (kHeapLargePage - reinterpret_cast<uintptr_t>(pointer) % kHeapLargePage) % kHeapLargePage;
}

struct HeapBlock {
  size_t bytes = 0;
  bool counted = false;
};

struct HeapRegion {
  char* begin = nullptr;
  size_t bytes = 0, used = 0;  // used: to the end of the last block that it ever had
};

struct HeapState {
  std::mutex mutex;
  std::map<char*, size_t> gaps;  // no two of them touch
  std::unordered_map<const void*, HeapBlock> blocks;
  std::vector<HeapRegion> regions;

  char* Take(size_t bytes) {
    auto gap = std::find_if(gaps.begin(), gaps.end(), [&](const auto& g) { return g.second >= bytes; });
    if (gap == gaps.end()) {
      if (!Grow(bytes)) return nullptr;
      gap = std::find_if(gaps.begin(), gaps.end(), [&](const auto& g) { return g.second >= bytes; });
    }
    char* const begin = gap->first;
    const size_t rest = gap->second - bytes;
    gaps.erase(gap);
    if (rest > 0) gaps.emplace(begin + bytes, rest);
    for (HeapRegion& region : regions) {
      if (region.begin <= begin && begin < region.begin + region.bytes)
        region.used = std::max(region.used, static_cast<size_t>(begin - region.begin) + bytes);
    }
    return begin;
  }

  // The gap that it is now part of.
  std::pair<char*, size_t> Give(char* begin, size_t bytes) {
    auto next = gaps.lower_bound(begin);
    if (next != gaps.end() && begin + bytes == next->first) {
      bytes += next->second;
      next = gaps.erase(next);
    }
    if (next != gaps.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        before->second += bytes;
        return *before;
      }
    }
    return *gaps.emplace(begin, bytes).first;
  }

  bool Grow(size_t least) {
    for (const size_t bytes :
         {std::max(kHeapRegion, HeapRoundUp(least, kHeapLargePage)), HeapRoundUp(least, kHeapLargePage)}) {
      // One large page more, so that the region can begin at a multiple of it.
      void* raw = mmap(nullptr, bytes + kHeapLargePage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (raw == MAP_FAILED) continue;
      char* const begin = HeapAligned(static_cast<char*>(raw));
      madvise(begin, bytes, MADV_HUGEPAGE);  // only advice
      regions.push_back({begin, bytes, 0});
      Give(begin, bytes);
      return true;
    }
    return false;
  }
};

// Never destroyed: its blocks may outlive everything else.
HeapState& TheHeap() {
  static HeapState* const heap = new HeapState;
  return *heap;
}

}  // namespace

c10::DataPtr PageHeap::Allocate(int64_t bytes) {
  HeapState& heap = TheHeap();
  const size_t rounded = HeapRoundUp(static_cast<size_t>(bytes), kPage);
  char* memory;
  {
    const std::lock_guard lock(heap.mutex);
    memory = heap.Take(rounded);
    TORCH_CHECK(memory != nullptr, "no memory for ", bytes, " bytes of a step: ", std::strerror(errno));
    heap.blocks[memory] = {rounded, MemoryScope::Add(static_cast<int64_t>(rounded))};
  }
  return {memory, memory, &Delete, c10::Device(c10::kCPU)};
}

bool PageHeap::Holds(const void* pointer) {
  HeapState& heap = TheHeap();
  const std::lock_guard lock(heap.mutex);
  return heap.blocks.contains(pointer);
}

void PageHeap::Delete(void* pointer) {
  if (pointer == nullptr) return;
  HeapState& heap = TheHeap();
  const std::lock_guard lock(heap.mutex);
  const auto found = heap.blocks.find(pointer);
  const HeapBlock block = found->second;
  heap.blocks.erase(found);
  const auto [gap, bytes] = heap.Give(static_cast<char*>(pointer), block.bytes);
  if (!heap_serves) {
    char *const begin = HeapAligned(gap), *const end = gap + bytes;
    if (end >= begin + kHeapLargePage) madvise(begin, (end - begin) / kHeapLargePage * kHeapLargePage, MADV_DONTNEED);
  }
  if (block.counted) MemoryScope::Subtract(static_cast<int64_t>(block.bytes));
}

int64_t PageHeap::Bytes() {
  HeapState& heap = TheHeap();
  const std::lock_guard lock(heap.mutex);
  size_t bytes = 0;
  for (const HeapRegion& region : heap.regions) bytes += region.used;
  return static_cast<int64_t>(bytes);
}

PageHeap::Serving::Serving(bool on) : was_on_(std::exchange(heap_serves, on)) {}

PageHeap::Serving::~Serving() {
  heap_serves = was_on_;
}

bool PageHeap::Serves(size_t bytes) {
  return heap_serves && bytes >= static_cast<size_t>(kLeast);
}

}  // namespace interlace
