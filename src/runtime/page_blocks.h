// page_blocks.h — memory of storages that leave a CPU's memory and come back: whole pages, so that direct I/O works on
// them in place, and pages that are kept, so that what comes back every step does not fault every page in again.
//
// What is given back stays mapped, but the system may take it whenever it needs memory (MADV_FREE); it is counted as
// given back (allocator.h). The next block of that size is it. From any thread.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

namespace interlace {

class PageBlocks {
 public:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kLeast = 64 * kPage;  // bytes; smaller ones waste too much of their last page

  PageBlocks();
  // Its bytes are whatever they were. Throws when there is no memory.
  c10::DataPtr Allocate(int64_t bytes);

 private:
  struct Pool;
  struct Block;
  std::shared_ptr<Pool> pool_;  // lives as long as its blocks
};

}  // namespace interlace
