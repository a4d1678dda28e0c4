// Device memory: blocks belong to the stream that was current when they were taken and are at once reusable on it; a freed
// block is filled with NaN before the op that may reuse it. recordStream delays the return until events there are over.
// Blocks taken while a stream is captured belong to the graph's pool (graph.h) and are reused by its captures alone.
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "engine.h"
#include "graph.h"
#include "memory.h"

namespace soft {

namespace {

constexpr size_t kRound = 512;
constexpr size_t kSystemPage = 4096;
constexpr int kPoison = 0xff;

size_t PlaceOf(const char* at) { return static_cast<size_t>(at - TheSpace().device); }

struct Block {
  char* at;
  size_t bytes;  // rounded
  int stream;
  uint64_t pool;  // 0: of no graph
  std::set<int> used_on;
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device device(c10::kPrivateUse1, 0);
    if (n == 0) return {nullptr, nullptr, &Delete, device};
    const OwnTime own;
    const size_t bytes = (n + kRound - 1) / kRound * kRound;
    std::lock_guard lock(mutex_);
    const int stream = CurrentStream();
    const uint64_t pool = Engine::Get().PoolOf(stream);
    ReturnPending();
    Block* block = TakeFrom(pool, stream, bytes);
    if (block == nullptr) {
      TORCH_CHECK_WITH(OutOfMemoryError, live_bytes_ + bytes <= capacity_, "soft device out of memory. Tried to allocate ",
                       bytes, " bytes; ", live_bytes_, " of ", capacity_, " are allocated");
      block = NewBlock(pool, stream, bytes);
    }
    live_[block->at] = block;
    live_bytes_ += bytes;
    stats_.allocated_bytes[0].increase(static_cast<int64_t>(bytes));
    stats_.allocation[0].increase(1);
    return {block->at, block->at, &Delete, device};
  }

  void Free(void* p) {
    const OwnTime own;
    std::lock_guard lock(mutex_);
    const auto it = live_.find(static_cast<char*>(p));
    if (it == live_.end()) std::abort();
    Block* block = it->second;
    live_.erase(it);
    live_bytes_ -= block->bytes;
    stats_.allocated_bytes[0].decrease(static_cast<int64_t>(block->bytes));
    stats_.allocation[0].decrease(1);
    const uint64_t captured = Engine::Get().PoolOf(block->stream);
    if (block->pool != 0 && (captured != block->pool || !block->used_on.empty())) return retired_.push_back(block);
    if (block->used_on.empty() && captured == block->pool) return Return(block);
    std::vector<EventPtr> events;
    for (int stream : block->used_on) {
      if (Engine::Get().PoolOf(stream) != 0) continue;  // what a graph does with it is its owner's affair
      events.push_back(std::make_shared<Event>());
      Engine::Get().Record(events.back(), stream);
    }
    block->used_on.clear();
    pending_.emplace_back(block, std::move(events));
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (!ptr.get() || ptr.get_deleter() != &Delete) return;
    std::lock_guard lock(mutex_);
    const auto it = live_.find(static_cast<char*>(ptr.get_context()));
    if (it == live_.end()) return;
    if (static_cast<int>(stream.id()) != it->second->stream) it->second->used_on.insert(static_cast<int>(stream.id()));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t n) const override {
    const char *f = static_cast<const char*>(from), *t = static_cast<const char*>(to);
    Engine::Get().Enqueue(CurrentStream(), "copy_data", {{f, f + n, false}, {t, t + n, true}}, [f, t, n] {
      std::memcpy(Real(t), Real(f), n);
      return true;
    });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { ReleaseIdle(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return {capacity_ - std::min(capacity_, live_bytes_), capacity_};
  }
  void SetCapacity(size_t bytes) {
    std::lock_guard lock(mutex_);
    capacity_ = bytes;
  }
  void Trim() {  // the device is idle
    std::lock_guard lock(mutex_);
    ReturnPending();
    Drop(0);
  }
  void Release(uint64_t pool) {  // the device is idle
    std::lock_guard lock(mutex_);
    Drop(pool);
    std::erase_if(retired_, [&](Block* block) {
      if (block->pool != pool) return false;
      GiveBack(block);
      return true;
    });
    for (auto& [at, block] : live_) {
      if (block->pool == pool) block->pool = 0;
    }
  }
  static void Delete(void* p);

 private:
  // What was freed last comes first.
  Block* TakeFrom(uint64_t pool, int stream, size_t bytes) {
    auto& blocks = pools_[{pool, stream, bytes}];
    if (blocks.empty()) return nullptr;
    Block* block = blocks.back();
    blocks.pop_back();
    Engine::Get().FlushBeforeNext(stream);
    return block;
  }
  void Drop(uint64_t pool) {
    std::erase_if(pools_, [&](auto& entry) {
      if (std::get<0>(entry.first) != pool) return false;
      for (Block* block : entry.second) {
        Engine::Get().FlushBeforeNext(block->stream);
        Engine::Get().Synchronize(block->stream);
        GiveBack(block);
      }
      return true;
    });
  }
  void GiveBack(Block* block) {
    Engine::Get().Forget(block->at, block->at + block->bytes);
    // Whole pages alone: its neighbours on the first and last are others', and would be zeros.
    char *const first = Real(block->at) + (kSystemPage - PlaceOf(block->at) % kSystemPage) % kSystemPage;
    char* const last = Real(block->at) + block->bytes - PlaceOf(block->at + block->bytes) % kSystemPage;
    if (first < last) madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED);
    idle_[block->bytes].push_back(block->at);
    delete block;
  }
  Block* NewBlock(uint64_t pool, int stream, size_t bytes) {
    char* at = nullptr;
    if (auto& idle = idle_[bytes]; !idle.empty()) {
      at = idle.back();
      idle.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, top_ + bytes <= kSpace, "soft device: the address space is used up");
      at = TheSpace().device + top_;
      top_ += bytes;
    }
    Engine::Get().EnqueueBeforeNext(stream, "poison of a new block", {at, at + bytes, true}, [at, bytes] {
      std::memset(Real(at), kPoison, bytes);
      return true;
    });
    Engine::Get().FlushBeforeNext(stream);  // now: another stream may be its first user
    return new Block{at, bytes, stream, pool, {}};
  }
  void Return(Block* block) {
    char* at = block->at;
    const size_t bytes = block->bytes;
    Engine::Get().EnqueueBeforeNext(block->stream, "the free of a block", {at, at + bytes, true}, [at, bytes] {
      std::memset(Real(at), kPoison, bytes);
      return true;
    });
    pools_[{block->pool, block->stream, bytes}].push_back(block);
  }
  void ReturnPending() {
    std::erase_if(pending_, [this](auto& entry) {
      auto& [block, events] = entry;
      if (Engine::Get().PoolOf(block->stream) != 0) return false;  // its poison is not the graph's
      for (const EventPtr& e : events) {
        if (!Engine::Get().Query(e, /*teach=*/false)) return false;
      }
      Engine::Get().Forget(block->at, block->at + block->bytes);
      Return(block);
      return true;
    });
  }

  std::mutex mutex_;
  size_t top_ = 0, live_bytes_ = 0, capacity_ = kSpace;
  std::map<std::tuple<uint64_t, int, size_t>, std::vector<Block*>> pools_;  // by graphs' pool, stream and bytes
  std::map<size_t, std::vector<char*>> idle_;                    // addresses that nobody has, by bytes
  std::map<char*, Block*> live_;
  std::vector<std::pair<Block*, std::vector<EventPtr>>> pending_;
  std::vector<Block*> retired_;  // of graphs' pools: freed where no later op of the capture may take them
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

DeviceMemory& TheMemory() {
  static DeviceMemory* memory = new DeviceMemory;
  return *memory;
}
void DeviceMemory::Delete(void* p) {
  if (p) TheMemory().Free(p);
}

struct RegisteredMemory {
  RegisteredMemory() { c10::SetAllocator(c10::kPrivateUse1, &TheMemory()); }
} registered_memory;

}  // namespace

c10::Allocator* AskedAllocator() {
  struct Direct final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override { return TheMemory().DeviceMemory::allocate(bytes); }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      TheMemory().DeviceMemory::copy_data(to, from, bytes);
    }
  };
  static Direct direct;
  const char* hook = std::getenv("SOFT_HOOK");
  static const bool own = hook != nullptr && hook[0] == '0';
  return own ? static_cast<c10::Allocator*>(&direct) : &TheMemory();
}
void ReleasePool(uint64_t pool) { TheMemory().Release(pool); }
void SetCapacity(size_t bytes) { TheMemory().SetCapacity(bytes); }
void ReleaseIdle() {
  Engine::Get().SynchronizeAll();
  TheMemory().Trim();
}

}  // namespace soft
