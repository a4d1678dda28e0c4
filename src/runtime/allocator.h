// allocator.h — counts the bytes that CPU tensors of a step take, live and at the peak, and remembers which op made the
// peak.
//
// torch has one CPU allocator per process, so the counting one is installed once and passes everything to the one
// before it. Counting is switched on per thread (MemoryScope); elsewhere a call costs one thread-local test. A counted
// block is marked by its deleter, so it is subtracted wherever it is freed; only blocks that a library takes through
// the raw interface (oneDNN's scratch) are subtracted by the thread that frees them. Sizes are what malloc really set
// aside.
#pragma once

#include <cstdint>

namespace interlace {

// Puts the counting allocator in front of torch's. Safe to call many times; never removed.
void InstallCountingAllocator();

struct MemoryUse {
  int64_t live_bytes = 0;  // counted and not freed
  int64_t peak_bytes = 0;  // highest live since the scope began
  int32_t peak_op = -1;    // as set by SetCurrentOp when the peak was reached
};

// Counts allocations of this thread while it lives. Scopes nest; the inner one's use is part of the outer's.
class MemoryScope {
 public:
  MemoryScope();
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  // What allocations are attributed to from now on.
  static void SetCurrentOp(int32_t op);
  static MemoryUse Use();
  // The highest live bytes since the last call (or the scope's begin).
  static int64_t TakePeak();

 private:
  bool was_on_;
};

}  // namespace interlace
