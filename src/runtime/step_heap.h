// step_heap.h — the process's page heap (tier/page_heap.h) as torch's memory: blocks are counted like those of torch's
// allocator (allocator.h). From any thread.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

#include "tier/page_heap.h"

namespace interlace {

class StepHeap {
 public:
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
