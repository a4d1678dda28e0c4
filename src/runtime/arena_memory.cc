#include "runtime/arena_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace interlace {

namespace {

constexpr int64_t kLargePage = int64_t{2} << 20;

std::shared_mutex mutex;
std::vector<const ArenaMemory*> all;

}  // namespace

Result<std::unique_ptr<ArenaMemory>> ArenaMemory::Create(int64_t bytes) {
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
  return std::unique_ptr<ArenaMemory>(new ArenaMemory(begin + skip, rounded));
}

ArenaMemory::ArenaMemory(char* data, int64_t bytes) : data_(data), bytes_(bytes) {
  std::unique_lock lock(mutex);
  all.push_back(this);
}

ArenaMemory::~ArenaMemory() {
  {
    std::unique_lock lock(mutex);
    std::erase(all, this);
  }
  munmap(data_, bytes_);
}

void ArenaMemory::GiveBack() {
  madvise(data_, bytes_, MADV_DONTNEED);
}

int64_t ArenaMemory::ResidentBytes() const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages(bytes_ / page);
  if (mincore(data_, bytes_, pages.data()) != 0) return 0;
  return page * std::count_if(pages.begin(), pages.end(), [](unsigned char in) { return (in & 1) != 0; });
}

bool ArenaMemory::Holds(const void* pointer) {
  std::shared_lock lock(mutex);
  const char* at = static_cast<const char*>(pointer);
  return std::any_of(all.begin(), all.end(),
                     [&](const ArenaMemory* a) { return at >= a->data_ && at < a->data_ + a->bytes_; });
}

}  // namespace interlace
