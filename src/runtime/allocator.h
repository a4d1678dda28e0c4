// allocator.h — stands in front of torch's CPU allocator, and of a device's (device_allocator.cc): counts what a step
// takes (CPU), serves kernels from the step's arena, and notes what they ask for.
//
// torch has one CPU allocator per process, so ours is installed once and passes everything to the one before it. It is
// switched on per thread (MemoryScope); elsewhere a call costs one thread-local test. A counted block is marked by its
// deleter, so it is subtracted wherever it is freed; only blocks that a library takes through the raw interface
// (oneDNN's scratch) are subtracted by the thread that frees them. Sizes are what malloc really set aside.
//
// Arena (arena.h): before an op runs, the executor says what it is expected to ask for and where that lies. A request
// of that size gets that place; any other goes to torch's allocator and is counted as unforeseen. Nothing of what was
// served may be alive when the op has ended.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace interlace {

// Puts our allocator in front of torch's. Safe to call many times; never removed.
void InstallCountingAllocator();
// The same for what kernels on this device ask for. False: its allocator cannot be stood before, so that nothing can be
// served.
bool InstallDeviceHook(c10::Device device);

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
  // Counts memory that did not come from the allocator as if it had; whether it was counted, and must be subtracted
  // when it goes.
  static bool Add(int64_t bytes);
  static void Subtract(int64_t bytes);  // from any thread
  // What allocations are attributed to from now on.
  static void SetCurrentOp(int32_t op);
  static int32_t CurrentOp();  // -1: no step runs in this thread
  static MemoryUse Use();
  // The highest live bytes since the last call (or the scope's begin).
  static int64_t TakePeak();

 private:
  bool was_on_;
};

// One request that an op is expected to make.
struct ExpectedBlock {
  int64_t bytes = 0;
  char* place = nullptr;  // nullptr: it is left to torch's allocator, because the kernel keeps it
  bool exact = false;     // a result: nothing smaller goes there
};

// One request that an op made.
struct AskedBlock {
  int64_t bytes = 0;
  const void* block = nullptr;
  int32_t asked = 0, freed = -1;    // position among the op's requests and returns; -1: not returned
  const void* result_of = nullptr;  // the planned place of the result that it turned out to be
};

// A request that no place was planned for.
struct UnforeseenBlock {
  int32_t op = -1;
  int64_t bytes = 0, times = 0;
};

// The arena's side of the hook, of this thread.
class ArenaHook {
 public:
  // Requests for memory of this kind of device are served (within a MemoryScope) until End. `log`: filled with the
  // requests of the current op; may be nullptr.
  static void Begin(std::vector<AskedBlock>* log, c10::DeviceType device);
  static void End();
  // The op that runs from now on and what it is expected to ask for.
  static void Expect(int32_t op, const ExpectedBlock* begin, const ExpectedBlock* end);
  // Blocks that were served and not returned yet. Not 0 when an op has ended: it kept one.
  static int64_t Outstanding();
  // The logged request at `block` is a result whose planned place is `place`.
  static void IsResult(const void* block, const void* place);
  // While there is a log: planned places of results of the current op that were made elsewhere and copied there.
  static const std::vector<const void*>& Copied();
  static const std::vector<UnforeseenBlock>& Unforeseen();
  // While it lives, requests are the caller's own business: nothing is served, noted or held against the op.
  class Outside {
   public:
    Outside();
    ~Outside();
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

   private:
    bool was_serving_;
  };

  // For allocators: whether this thread's requests on such a device are looked at; the place of one, or nullptr, in
  // which case it is Asked for elsewhere; the return of either; whether there is a log.
  static bool Watches(c10::DeviceType device);
  static char* Serve(int64_t bytes);
  static void Asked(int64_t bytes, const void* block);
  static void Returned(const void* block);
  static bool Logs();
};

}  // namespace interlace
