// page_heap.h — memory of steps that move storages out of a CPU's memory: of the storages that come back, and of what
// such a step computes. One for the process, of large pages; the first gap that is large enough is taken.
//
//   | u0.w | u0.exp_avg | ... | activation | ... | u3.w |      what leaves makes room for whatever comes next
//
// So no page is given back to the system and faulted in again within a step, kernels find what was used last, and their
// addresses need few entries of the TLB. Blocks are whole small pages, so that direct I/O works on them in place. They
// are counted like those of torch's allocator (allocator.h). From any thread.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

#include "ir/memory_plan.h"

namespace interlace {

class PageHeap {
 public:
  static constexpr int64_t kPage = kArenaPage;
  static constexpr int64_t kLeast = kHeapLeast;  // bytes; smaller blocks waste too much of their last page

  // Its bytes are whatever they were. Throws when there is no memory. The context is the memory itself.
  static c10::DataPtr Allocate(int64_t bytes);
  static bool Holds(const void* pointer);  // a block of it begins there
  // Outside of steps the system gets the gap's large pages back.
  static void Delete(void* pointer);
  // From the begin of the heap to the last byte that was ever used, by all executors of the process.
  static int64_t Bytes();

  // While it lives, what this thread asks torch's allocator for comes from the heap.
  class Serving {
   public:
    explicit Serving(bool on);
    ~Serving();
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;

   private:
    bool was_on_;
  };
  static bool Serves(size_t bytes);
};

}  // namespace interlace
