// page_heap.h — memory of steps that move storages out of a CPU's memory: of the storages that come back, and of what
// such a step computes. It is made of large pages; the first gap that is large enough is taken.
//
//   | u0.w | u0.exp_avg | ... | activation | ... | u3.w |      what leaves makes room for whatever comes next
//
// So no page is given back to the system and faulted in again within a step, kernels find what was used last, and their
// addresses need few entries of the TLB. Blocks are whole small pages, so that direct I/O works on them in place. From
// any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ir/memory_plan.h"

namespace interlace {

class PageHeap {
 public:
  static constexpr int64_t kPage = kArenaPage;
  static constexpr int64_t kLeast = kHeapLeast;  // bytes; smaller blocks waste too much of their last page

  PageHeap() = default;
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  // Bytes that a block takes.
  static size_t Rounded(int64_t bytes) { return (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage; }
  // Its bytes are whatever they were. nullptr: the system has none (errno says why).
  char* Take(int64_t bytes);
  // With `release` the system gets the large pages of the gap back. Gives the bytes that the block took.
  size_t Give(void* block, bool release);
  bool Holds(const void* pointer);  // a block of it begins there
  // From the begin of the heap to the last byte that was ever used.
  int64_t Bytes();

 private:
  struct Region {
    char* raw = nullptr;  // as mapped
    size_t mapped = 0;
    char* begin = nullptr;
    size_t bytes = 0, used = 0;  // used: to the end of the last block that it ever had
  };
  bool Grow(size_t least);
  std::pair<char*, size_t> AddGap(char* begin, size_t bytes);

  std::mutex mutex_;
  std::map<char*, size_t> gaps_;  // no two of them touch
  std::unordered_map<const void*, size_t> blocks_;
  std::vector<Region> regions_;
};

}  // namespace interlace
