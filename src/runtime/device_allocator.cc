// The hook of an arena (allocator.h) in front of a device's allocator. What it serves is the arena's own; everything else
// is the framework's, and passes unchanged, so that its blocks are still known to it by their deleter. Only while a step
// learns do blocks have a deleter of ours, which notes when they go.
//
// Factories of tensors call the allocator of their backend, not the one that c10 knows for the device (CUDA's do), so
// another cannot take its place: instead the object gets a table of virtual functions of which three are ours. The rest
// are its own, whatever the version of torch has of them. Source: Itanium C++ ABI, 2.5 (tables) and 2.3 (pointers to
// members), which all compilers of Linux follow.
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/allocator.h"
#include "runtime/arena_memory.h"

namespace interlace {

namespace {

using AllocateFn = c10::DataPtr (*)(c10::Allocator*, size_t);
using RecordStreamFn = void (*)(c10::DeviceAllocator*, const c10::DataPtr&, c10::Stream);

// A process has one kind of accelerator.
AllocateFn framework_allocate = nullptr;
RecordStreamFn framework_record_stream = nullptr;
c10::DeleterFnPtr framework_delete = nullptr;
c10::DeviceType framework_type = c10::kCPU;
thread_local bool asked = false;

void ServedDelete(void* pointer) {
  ArenaHook::Returned(pointer);
}

void WatchedDelete(void* pointer) {
  ArenaHook::Returned(pointer);
  framework_delete(pointer);
}

// For raw_deallocate.
void AnyDelete(void* pointer) {
  ArenaMemory::Holds(pointer) ? ServedDelete(pointer) : WatchedDelete(pointer);
}

c10::DataPtr Allocate(c10::Allocator* framework, size_t bytes) {
  asked = true;
  if (bytes == 0 || !ArenaHook::Watches(framework_type)) return framework_allocate(framework, bytes);
  const auto size = static_cast<int64_t>(bytes);
  if (char* place = ArenaHook::Serve(size); place != nullptr)
    return {place, place, &ServedDelete, c10::impl::VirtualGuardImpl(framework_type).getDevice()};
  c10::DataPtr data = framework_allocate(framework, bytes);
  if (!ArenaHook::Logs() || data.get() == nullptr || data.get_deleter() != framework_delete) return data;
  const c10::Device device = data.device();
  void* const pointer = data.release_context();
  ArenaHook::Asked(size, pointer);
  return {pointer, pointer, &WatchedDelete, device};
}

void RecordStream(c10::DeviceAllocator* framework, const c10::DataPtr& data, c10::Stream stream) {
  if (ArenaMemory::Holds(data.get())) return;  // it stays until the step is over, and steps follow one another
  if (data.get_deleter() != &WatchedDelete) return framework_record_stream(framework, data, stream);
  c10::DataPtr plain(data.get(), data.get_context(), framework_delete, data.device());
  framework_record_stream(framework, plain, stream);
  plain.release_context();
}

c10::DeleterFnPtr RawDeleter(const c10::Allocator*) {
  return &AnyDelete;
}

// Where a virtual function is in its table.
template <typename Member>
size_t SlotOf(Member member) {
  ptrdiff_t words[2];
  static_assert(sizeof words == sizeof member);
  std::memcpy(words, &member, sizeof words);
#if defined(__aarch64__) || defined(__arm__)
  return static_cast<size_t>(words[0]) / sizeof(void*);
#else
  return static_cast<size_t>(words[0] - 1) / sizeof(void*);
#endif
}

using Range = std::pair<uintptr_t, uintptr_t>;

std::vector<Range> Code() {
  std::vector<Range> found;
  const auto each = [](dl_phdr_info* library, size_t, void* out) {
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& segment = library->dlpi_phdr[i];
      const uintptr_t begin = library->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_LOAD && (segment.p_flags & PF_X) != 0)
        static_cast<std::vector<Range>*>(out)->emplace_back(begin, begin + segment.p_memsz);
    }
    return 0;
  };
  dl_iterate_phdr(each, &found);
  return found;
}

// A table of an object's virtual functions; it begins with two words about its type. What follows a table is no code.
struct Table {
  static constexpr size_t kHead = 2;
  explicit Table(void** of) : words(of - kHead, of) {
    const std::vector<Range> code = Code();
    const auto is_code = [&](void* word) {
      const auto at = reinterpret_cast<uintptr_t>(word);
      return std::any_of(code.begin(), code.end(), [&](const Range& r) { return at >= r.first && at < r.second; });
    };
    for (; is_code(*of); ++of) words.push_back(*of);
  }
  bool Has(size_t slot) const { return kHead + slot < words.size(); }
  // The function that was there.
  template <typename Function>
  Function Put(size_t slot, Function ours) {
    return reinterpret_cast<Function>(std::exchange(words[kHead + slot], reinterpret_cast<void*>(ours)));
  }
  std::vector<void*> words;
};

bool StandsBefore(c10::DeviceAllocator* framework) {
  if (framework == nullptr || framework->raw_deleter() == nullptr) return false;  // its blocks could not be recognized
  if (dynamic_cast<void*>(framework) != framework) return false;
  void**& functions = *reinterpret_cast<void***>(framework);
  static Table& table = *new Table(functions);  // for good: tensors may be freed when the process ends
  const size_t allocate = SlotOf(&c10::Allocator::allocate), deleter = SlotOf(&c10::Allocator::raw_deleter);
  const size_t record_stream = SlotOf(&c10::DeviceAllocator::recordStream);
  if (!table.Has(std::max({allocate, deleter, record_stream}))) return false;
  framework_delete = framework->raw_deleter();
  framework_allocate = table.Put(allocate, &Allocate);
  framework_record_stream = table.Put(record_stream, &RecordStream);
  table.Put(deleter, &RawDeleter);
  void** const plain = std::exchange(functions, table.words.data() + Table::kHead);
  asked = false;
  (void)at::empty({1}, c10::TensorOptions().device(framework_type));
  if (!asked) functions = plain;
  return asked;
}

}  // namespace

bool InstallDeviceHook(c10::Device device) {
  static std::once_flag once;
  static bool serves = false;
  std::call_once(once, [&] {
    framework_type = device.type();
    const c10::OptionalDeviceGuard guard(device);
    serves = StandsBefore(dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type())));
  });
  return serves;
}

}  // namespace interlace
