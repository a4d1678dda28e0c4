#include "tier/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace interlace {

namespace {

constexpr size_t kHeapLargePage = size_t{2} << 20;
constexpr size_t kHeapRegion = size_t{1} << 30;  // addresses taken at a time; pages that are not used take no memory

size_t RoundUpToLarge(size_t bytes) {
  return (bytes + kHeapLargePage - 1) / kHeapLargePage * kHeapLargePage;
}

char* HeapAligned(char* pointer) {
  return pointer + (kHeapLargePage - reinterpret_cast<uintptr_t>(pointer) % kHeapLargePage) % kHeapLargePage;
}

}  // namespace

PageHeap::~PageHeap() {
  for (const Region& region : regions_) munmap(region.raw, region.mapped);
}

char* PageHeap::Take(int64_t wanted) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = Rounded(wanted);
  const auto fits = [&](const auto& gap) { return gap.second >= bytes; };
  auto gap = std::find_if(gaps_.begin(), gaps_.end(), fits);
  if (gap == gaps_.end()) {
    if (!Grow(bytes)) return nullptr;
    gap = std::find_if(gaps_.begin(), gaps_.end(), fits);
  }
  char* const begin = gap->first;
  const size_t rest = gap->second - bytes;
  gaps_.erase(gap);
  if (rest > 0) gaps_.emplace(begin + bytes, rest);
  for (Region& region : regions_) {
    if (region.begin <= begin && begin < region.begin + region.bytes)
      region.used = std::max(region.used, static_cast<size_t>(begin - region.begin) + bytes);
  }
  blocks_[begin] = bytes;
  return begin;
}

size_t PageHeap::Give(void* block, bool release) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  CHECK(found != blocks_.end()) << "no block of the page heap begins there";
  const size_t bytes = found->second;
  blocks_.erase(found);
  const auto [gap, room] = AddGap(static_cast<char*>(block), bytes);
  if (release) {
    char *const begin = HeapAligned(gap), *const end = gap + room;
    if (end >= begin + kHeapLargePage) madvise(begin, (end - begin) / kHeapLargePage * kHeapLargePage, MADV_DONTNEED);
  }
  return bytes;
}

// The gap that it is now part of.
std::pair<char*, size_t> PageHeap::AddGap(char* begin, size_t bytes) {
  auto next = gaps_.lower_bound(begin);
  if (next != gaps_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return *before;
    }
  }
  return *gaps_.emplace(begin, bytes).first;
}

bool PageHeap::Grow(size_t least) {
  for (const size_t bytes : {std::max(kHeapRegion, RoundUpToLarge(least)), RoundUpToLarge(least)}) {
    // One large page more, so that the region can begin at a multiple of it.
    const size_t mapped = bytes + kHeapLargePage;
    void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) continue;
    char* const begin = HeapAligned(static_cast<char*>(raw));
    madvise(begin, bytes, MADV_HUGEPAGE);  // only advice
    regions_.push_back({static_cast<char*>(raw), mapped, begin, bytes, 0});
    AddGap(begin, bytes);
    return true;
  }
  return false;
}

bool PageHeap::Holds(const void* pointer) {
  const std::lock_guard lock(mutex_);
  return blocks_.contains(pointer);
}

int64_t PageHeap::Bytes() {
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const Region& region : regions_) bytes += region.used;
  return static_cast<int64_t>(bytes);
}

}  // namespace interlace
