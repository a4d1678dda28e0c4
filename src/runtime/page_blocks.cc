#include "runtime/page_blocks.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/allocator.h"

namespace interlace {

struct PageBlocks::Pool {
  std::mutex mutex;
  std::unordered_map<size_t, std::vector<void*>> idle;  // by bytes
  ~Pool() {
    for (const auto& [bytes, blocks] : idle) {
      for (void* memory : blocks) munmap(memory, bytes);
    }
  }
};

struct PageBlocks::Block {
  std::shared_ptr<Pool> pool;
  void* memory = nullptr;
  size_t bytes = 0;
  bool counted = false;

  static void GiveBack(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    if (block->counted) MemoryScope::Subtract(static_cast<int64_t>(block->bytes));
    madvise(block->memory, block->bytes, MADV_FREE);
    const std::lock_guard lock(block->pool->mutex);
    block->pool->idle[block->bytes].push_back(block->memory);
  }
};

PageBlocks::PageBlocks() : pool_(std::make_shared<Pool>()) {}

c10::DataPtr PageBlocks::Allocate(int64_t bytes) {
  auto block = std::make_unique<Block>();
  block->pool = pool_;
  block->bytes = static_cast<size_t>((bytes + kPage - 1) / kPage * kPage);
  {
    const std::lock_guard lock(pool_->mutex);
    std::vector<void*>& idle = pool_->idle[block->bytes];
    if (!idle.empty()) {
      block->memory = idle.back();
      idle.pop_back();
    }
  }
  if (block->memory == nullptr) {
    block->memory = mmap(nullptr, block->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(block->memory != MAP_FAILED, "no memory for a storage of ", bytes,
                " bytes that comes back: ", std::strerror(errno));
  }
  block->counted = MemoryScope::Add(static_cast<int64_t>(block->bytes));
  void* const memory = block->memory;
  return {memory, block.release(), &Block::GiveBack, c10::Device(c10::kCPU)};
}

}  // namespace interlace
