#include "runtime/arena_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "runtime/step_scope.h"

namespace interlace {

namespace {

constexpr int64_t kLargePage = int64_t{2} << 20;

std::shared_mutex mutex;
std::vector<const ArenaMemory*> all;

Result<c10::DataPtr> BlockOf(int64_t bytes, c10::Device device) {
  const c10::OptionalDeviceGuard guard(device);
  try {
    return c10::GetAllocator(device.type())->allocate(static_cast<size_t>(bytes));
  } catch (const std::exception& error) {
    return MakeError("no room for an arena of ", bytes, " bytes on ", device.str(), ": ", MessageOf(error));
  }
}

}  // namespace

Result<std::unique_ptr<ArenaMemory>> ArenaMemory::Create(int64_t bytes, c10::Device device) {
  if (!device.is_cpu()) {
    bytes = std::max<int64_t>(bytes, 1);
    INTERLACE_ASSIGN(c10::DataPtr block, BlockOf(bytes, device));
    char* const data = static_cast<char*>(block.get());
    return std::unique_ptr<ArenaMemory>(new ArenaMemory(data, bytes, std::move(block), device));
  }
  const int64_t rounded = std::max<int64_t>((bytes + kLargePage - 1) / kLargePage, 1) * kLargePage;
  // One large page more, so that the arena can begin at a multiple of it.
  void* raw =
      mmap(nullptr, rounded + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return MakeError("no room for an arena of ", bytes, " bytes: ", std::strerror(errno));
  char* const begin = static_cast<char*>(raw);
  const int64_t skip = (kLargePage - reinterpret_cast<intptr_t>(begin) % kLargePage) % kLargePage;
  if (skip > 0) munmap(begin, skip);
  if (skip < kLargePage) munmap(begin + skip + rounded, kLargePage - skip);
  madvise(begin + skip, rounded, MADV_HUGEPAGE);  // only advice
  return std::unique_ptr<ArenaMemory>(new ArenaMemory(begin + skip, rounded, {}, device));
}

ArenaMemory::ArenaMemory(char* data, int64_t bytes, c10::DataPtr block, c10::Device device)
    : device_(device), block_(std::move(block)), data_(data), bytes_(bytes) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  std::unique_lock lock(mutex);
  all.push_back(this);
}

ArenaMemory::~ArenaMemory() {
  {
    std::unique_lock lock(mutex);
    std::erase(all, this);
  }
  if (device_.is_cpu()) munmap(data_, bytes_);
}

void ArenaMemory::GiveBack() {
  if (device_.is_cpu()) {
    madvise(data_, bytes_, MADV_DONTNEED);
    return;
  }
  c10::DataPtr gone;
  std::unique_lock lock(mutex);
  std::swap(gone, block_);
}

Result<bool> ArenaMemory::TakeBack() {
  if (device_.is_cpu() || block_) return true;
  INTERLACE_ASSIGN(c10::DataPtr block, BlockOf(bytes_, device_));
  stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  std::unique_lock lock(mutex);
  block_ = std::move(block);
  return std::exchange(data_, static_cast<char*>(block_.get())) == block_.get();
}

void ArenaMemory::UseHere() {
  if (device_.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::Stream now = guard.getStream(device_);
  if (stream_ == now) return;
  guard.recordDataPtrOnStream(block_, now);
  stream_ = now;
}

int64_t ArenaMemory::ResidentBytes() const {
  if (!device_.is_cpu()) return block_ ? bytes_ : 0;
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages(bytes_ / page);
  if (mincore(data_, bytes_, pages.data()) != 0) return 0;
  return page * std::count_if(pages.begin(), pages.end(), [](unsigned char in) { return (in & 1) != 0; });
}

bool ArenaMemory::Holds(const void* pointer) {
  std::shared_lock lock(mutex);
  const char* at = static_cast<const char*>(pointer);
  return std::any_of(all.begin(), all.end(),
                     [&](const ArenaMemory* a) {
                       const bool here = a->device_.is_cpu() || a->block_;
                       return here && at >= a->data_ && at < a->data_ + a->bytes_;
                     });
}

}  // namespace interlace
