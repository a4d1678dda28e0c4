// memory.h — what the two allocators offer beside c10's interfaces.
//
// Pinned memory has two views: the host's, and that of the device's workers. While a copy is under way of which the host
// has not waited for the end, the host's view of whole pages is closed (to writes only, where the copy reads): a host
// access is caught by its fault, noted, and goes on with what lies there.
#pragma once
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace soft {

struct PinnedBlock {
  char* at = nullptr;  // nullptr: pageable memory
  size_t bytes = 0;    // as asked for
};
PinnedBlock PinnedBlockOf(const void* p);
// The same byte in the workers' view.
char* Mirror(const void* p);
// A copy was just given to `stream` that reads, or writes, these bytes.
void UsePinned(const PinnedBlock& block, const char* begin, const char* end, bool written, int stream);
int64_t HostTouches();  // accesses of the host that were caught

// What factories of tensors ask: this one itself, whatever c10 knows for the device, as CUDA's do; with SOFT_HOOK=0 by
// calls that no table of virtual functions decides.
c10::Allocator* AskedAllocator();
void SetCapacity(size_t bytes);  // of device memory: more is out of memory
void ReleaseIdle();              // gives idle blocks back to the system; waits for the device

}  // namespace soft
