#include "runtime/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "runtime/arena_memory.h"
#include "runtime/step_heap.h"

namespace interlace {

namespace {

struct ThreadCount {
  bool on = false;
  int32_t op = -1, peak_op = -1;
  int64_t peak = 0, recent_peak = 0;
};
struct ThreadArena {
  bool serving = false;
  c10::DeviceType device = c10::kCPU;
  const ExpectedBlock *next = nullptr, *end = nullptr;
  std::vector<std::pair<const char*, int64_t>> served;  // and not returned
  int32_t clock = 0;                                    // requests and returns of the current op
  std::vector<AskedBlock>* log = nullptr;
  std::vector<const void*> copied;
  std::vector<UnforeseenBlock> unforeseen;
};
thread_local ThreadCount tls;
thread_local ThreadArena arena;
std::atomic<int64_t> live{0};
c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_delete = nullptr;

int64_t BlockBytes(void* pointer) {
  return static_cast<int64_t>(malloc_usable_size(pointer));
}

void Count(int64_t bytes) {
  const int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (now > tls.recent_peak) tls.recent_peak = now;
  if (now > tls.peak) {
    tls.peak = now;
    tls.peak_op = tls.op;
  }
}

void NoteReturn(const void* pointer) {
  if (arena.log == nullptr) return;
  for (auto it = arena.log->rbegin(); it != arena.log->rend(); ++it) {
    if (it->block != pointer || it->freed >= 0) continue;
    it->freed = arena.clock++;
    return;
  }
}

void CountedDelete(void* pointer) {
  if (pointer == nullptr) return;
  NoteReturn(pointer);
  live.fetch_sub(BlockBytes(pointer), std::memory_order_relaxed);
  base_delete(pointer);
}

void ArenaDelete(void* pointer) {
  ArenaHook::Returned(pointer);
}

// For raw_deallocate: the block may be of an arena or the heap, counted, or neither.
void RawDelete(void* pointer) {
  if (ArenaMemory::Holds(pointer)) return ArenaDelete(pointer);
  if (StepHeap::Holds(pointer)) return StepHeap::Delete(pointer);
  tls.on ? CountedDelete(pointer) : base_delete(pointer);
}

// Whether nothing that was served and not returned lies there: places of requests that did not overlap in time are
// shared.
bool Free(const char* place, int64_t bytes) {
  return std::none_of(arena.served.begin(), arena.served.end(), [&](const auto& other) {
    return other.first < place + bytes && place < other.first + other.second;
  });
}

// The place of a request, or nullptr. Requests come in the order that was learned; one that is missing is skipped.
// Sizes that depend on data may be smaller than those that were learned.
char* PlaceOf(int64_t bytes) {
  for (const bool exact : {true, false}) {
    for (const ExpectedBlock* at = arena.next; at != arena.end; ++at) {
      if (exact ? at->bytes != bytes : at->bytes < bytes || at->exact) continue;
      if (at->place != nullptr && !Free(at->place, bytes)) continue;
      arena.next = at + 1;
      return at->place;
    }
  }
  auto& list = arena.unforeseen;
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const UnforeseenBlock& u) { return u.op == tls.op && u.bytes == bytes; });
  if (found != list.end()) {
    ++found->times;
  } else if (list.size() < 256) {
    list.push_back({tls.op, bytes, 1});
  }
  return nullptr;
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const bool watched = bytes != 0 && ArenaHook::Watches(c10::kCPU);
    if (watched) {
      if (char* place = ArenaHook::Serve(static_cast<int64_t>(bytes)); place != nullptr)
        return {place, place, &ArenaDelete, c10::Device(c10::kCPU)};
    }
    if (StepHeap::Serves(bytes)) return StepHeap::Allocate(static_cast<int64_t>(bytes));
    c10::DataPtr data = base->allocate(bytes);
    if (!tls.on || data.get() == nullptr || data.get_deleter() != base_delete) return data;
    void* pointer = data.release_context();
    if (watched) ArenaHook::Asked(static_cast<int64_t>(bytes), pointer);
    Count(BlockBytes(pointer));
    return {pointer, pointer, &CountedDelete, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &RawDelete; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void InstallCountingAllocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    base = c10::GetCPUAllocator();
    base_delete = base->raw_deleter();
    if (base_delete == nullptr) return;  // an allocator whose blocks cannot be recognized is left alone
    static CountingAllocator counting;
    c10::SetCPUAllocator(&counting, /*priority=*/100);
  });
}

MemoryScope::MemoryScope() : was_on_(tls.on) {
  if (was_on_) return;
  const int64_t now = live.load(std::memory_order_relaxed);
  tls = {.on = true, .op = -1, .peak_op = -1, .peak = now, .recent_peak = now};
}

MemoryScope::~MemoryScope() {
  if (!was_on_) tls.on = false;
}

bool MemoryScope::Add(int64_t bytes) {
  if (tls.on) Count(bytes);
  return tls.on;
}

void MemoryScope::Subtract(int64_t bytes) {
  live.fetch_sub(bytes, std::memory_order_relaxed);
}

void MemoryScope::SetCurrentOp(int32_t op) {
  tls.op = op;
}

int32_t MemoryScope::CurrentOp() {
  return tls.on ? tls.op : -1;
}

int64_t MemoryScope::TakePeak() {
  return std::exchange(tls.recent_peak, live.load(std::memory_order_relaxed));
}

MemoryUse MemoryScope::Use() {
  return {live.load(std::memory_order_relaxed), tls.peak, tls.peak_op};
}

void ArenaHook::Begin(std::vector<AskedBlock>* log, c10::DeviceType device) {
  arena.device = device;
  arena.next = arena.end = nullptr;
  arena.served.clear();
  arena.log = log;
  arena.unforeseen.clear();
  arena.serving = true;
}

void ArenaHook::End() {
  arena.serving = false;
  arena.log = nullptr;
}

void ArenaHook::Expect(int32_t op, const ExpectedBlock* begin, const ExpectedBlock* end) {
  tls.op = op;
  arena.next = begin;
  arena.end = end;
  arena.clock = 0;
  if (arena.log == nullptr) return;
  arena.log->clear();
  arena.copied.clear();
}

int64_t ArenaHook::Outstanding() {
  return static_cast<int64_t>(arena.served.size());
}

void ArenaHook::IsResult(const void* block, const void* place) {
  if (arena.log == nullptr) return;
  arena.copied.push_back(place);
  for (AskedBlock& asked : *arena.log) {
    if (asked.block == block && asked.freed < 0) asked.result_of = place;
  }
}

const std::vector<const void*>& ArenaHook::Copied() {
  return arena.copied;
}

bool ArenaHook::Watches(c10::DeviceType device) {
  return arena.serving && arena.device == device;
}

char* ArenaHook::Serve(int64_t bytes) {
  char* const place = PlaceOf(bytes);
  if (place == nullptr) return nullptr;
  arena.served.emplace_back(place, bytes);
  Asked(bytes, place);
  return place;
}

void ArenaHook::Asked(int64_t bytes, const void* block) {
  if (arena.log != nullptr) arena.log->push_back({bytes, block, arena.clock++});
}

void ArenaHook::Returned(const void* block) {
  const auto found =
      std::find_if(arena.served.begin(), arena.served.end(), [&](const auto& s) { return s.first == block; });
  if (found != arena.served.end()) arena.served.erase(found);
  NoteReturn(block);
}

bool ArenaHook::Logs() {
  return arena.log != nullptr;
}

const std::vector<UnforeseenBlock>& ArenaHook::Unforeseen() {
  return arena.unforeseen;
}

ArenaHook::Outside::Outside() : was_serving_(std::exchange(arena.serving, false)) {}

ArenaHook::Outside::~Outside() {
  arena.serving = was_serving_;
}

}  // namespace interlace
