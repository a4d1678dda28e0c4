// Pinned host memory (memory.h). A freed block is reusable when the streams that copied from or to it have done so.
#include <ATen/core/CachingHostAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <list>
#include <map>

#include "engine.h"
#include "memory.h"

namespace soft {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPinned = size_t{16} << 30;

struct Views {
  char* host = nullptr;
  char* workers = nullptr;
};
const Views& TheViews() {
  static const Views views = [] {
    const int fd = memfd_create("soft-pinned", 0);
    if (fd < 0 || ftruncate(fd, kPinned) != 0) std::abort();
    const auto map = [fd] {
      void* p = mmap(nullptr, kPinned, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
      if (p == MAP_FAILED) std::abort();
      return static_cast<char*>(p);
    };
    return Views{map(), map()};
  }();
  return views;
}

// Whole pages of the host's view that are closed until the host has waited for op `seq` of `stream`.
class Guards {
 public:
  void Add(char* begin, char* end, bool written, int stream, uint64_t seq) {
    std::lock_guard lock(mutex_);
    list_.push_back({begin, end, written, stream, seq});
    Close(list_.back());
  }
  // Those that `over` holds for.
  template <typename Over>
  void Open(const Over& over) {
    std::lock_guard lock(mutex_);
    bool opened = false;
    for (auto it = list_.begin(); it != list_.end();) {
      if (!over(*it)) {
        ++it;
        continue;
      }
      mprotect(it->begin, static_cast<size_t>(it->end - it->begin), PROT_READ | PROT_WRITE);
      it = list_.erase(it);
      opened = true;
    }
    if (!opened) return;
    for (const bool written : {false, true}) {
      for (const Guard& g : list_) {
        if (g.written == written) Close(g);
      }
    }
  }
  struct Guard {
    char *begin, *end;
    bool written;
    int stream;
    uint64_t seq;
  };

 private:
  static void Close(const Guard& g) {
    mprotect(g.begin, static_cast<size_t>(g.end - g.begin), g.written ? PROT_NONE : PROT_READ);
  }
  std::mutex mutex_;
  std::list<Guard> list_;
};
Guards& TheGuards() {
  static Guards* guards = new Guards;
  return *guards;
}

std::atomic<int64_t> touches{0};
struct sigaction before;

void OnFault(int, siginfo_t* info, void*) {
  char* const p = static_cast<char*>(info->si_addr);
  const Views& views = TheViews();
  if (p >= views.host && p < views.host + kPinned) {
    touches.fetch_add(1);
    mprotect(p - reinterpret_cast<uintptr_t>(p) % kPage, kPage, PROT_READ | PROT_WRITE);
    return;
  }
  if (OnDevice(p)) {
    constexpr char text[] = "soft device: the host touched device memory\n";
    (void)!write(2, text, sizeof text - 1);
  }
  sigaction(SIGSEGV, &before, nullptr);  // the access comes again, and is theirs
}

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &Delete, c10::kCPU};
    std::lock_guard lock(mutex_);
    if (top_ == 0) Begin();
    const size_t whole = (n + kPage - 1) / kPage * kPage;
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second.whole != whole || !Over(it->second)) continue;
      char* at = it->first;
      free_.erase(it);
      TheGuards().Open([&](const Guards::Guard& g) { return g.begin >= at && g.end <= at + whole; });
      Engine::Get().Forget(at, at + whole);
      return Fresh(at, n, whole);
    }
    TORCH_CHECK(top_ + whole <= kPinned, "soft device: no more pinned memory");
    char* at = TheViews().host + top_;
    top_ += whole;
    return Fresh(at, n, whole);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void* p, void*, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    if (Pinned* block = Find(p)) block->uses[static_cast<int>(stream.id())] = Engine::Get().Issued(static_cast<int>(stream.id()));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  PinnedBlock BlockOf(const void* p) {
    std::lock_guard lock(mutex_);
    const Pinned* block = Find(p);
    return block ? PinnedBlock{block->at, block->bytes} : PinnedBlock{};
  }
  void Use(const PinnedBlock& block, int stream, uint64_t seq) {
    std::lock_guard lock(mutex_);
    blocks_[block.at].uses[stream] = seq;
  }
  static void Delete(void* p);

 private:
  struct Pinned {
    char* at = nullptr;
    size_t bytes = 0, whole = 0;
    std::map<int, uint64_t> uses;  // by stream, the last op
  };
  void Begin() {
    struct sigaction action = {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    Engine::Get().OnLearned([](const Clock& host) {
      TheGuards().Open([&](const Guards::Guard& g) { return host[g.stream] >= g.seq; });
    });
  }
  c10::DataPtr Fresh(char* at, size_t n, size_t whole) {
    blocks_[at] = {at, n, whole, {}};
    std::memset(Mirror(at), 0xff, whole);
    return {at, at, &Delete, c10::kCPU};
  }
  Pinned* Find(const void* p) {
    auto it = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == blocks_.begin()) return nullptr;
    --it;
    return p < it->first + it->second.whole ? &it->second : nullptr;
  }
  static bool Over(const Pinned& block) {
    for (const auto& [stream, seq] : block.uses) {
      if (!Engine::Get().Finished(stream, seq)) return false;
    }
    return true;
  }
  std::mutex mutex_;
  size_t top_ = 0;
  std::map<char*, Pinned> blocks_, free_;
};

PinnedMemory& ThePinned() {
  static PinnedMemory* pinned = new PinnedMemory;
  return *pinned;
}
void PinnedMemory::Delete(void* p) {
  if (!p) return;
  auto& self = ThePinned();
  std::lock_guard lock(self.mutex_);
  self.free_.insert(self.blocks_.extract(static_cast<char*>(p)));
}

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &ThePinned())

}  // namespace

PinnedBlock PinnedBlockOf(const void* p) { return ThePinned().BlockOf(p); }
char* Mirror(const void* p) { return TheViews().workers + (static_cast<const char*>(p) - TheViews().host); }
int64_t HostTouches() { return touches.load(); }

void UsePinned(const PinnedBlock& block, const char* begin, const char* end, bool written, int stream) {
  const uint64_t seq = Engine::Get().Issued(stream);
  ThePinned().Use(block, stream, seq);
  const auto up = [](uintptr_t p) { return (p + kPage - 1) / kPage * kPage; };
  const uintptr_t first = up(reinterpret_cast<uintptr_t>(begin)), last = reinterpret_cast<uintptr_t>(end);
  const uintptr_t stop = end >= block.at + block.bytes ? up(last) : last / kPage * kPage;
  if (first < stop) TheGuards().Add(reinterpret_cast<char*>(first), reinterpret_cast<char*>(stop), written, stream, seq);
}

}  // namespace soft
