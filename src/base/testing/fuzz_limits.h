// fuzz_limits.h — what an input of a fuzz target may take: 2 s of the processor, and at once 64 MiB and 16 times its size.
// What never ends, libFuzzer's -timeout ends.
#pragma once

#include <sanitizer/allocator_interface.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace interlace {

class FuzzLimits {
 public:
  explicit FuzzLimits(size_t input_bytes) : begin_(std::clock()) {
    [[maybe_unused]] static const int installed = __sanitizer_install_malloc_and_free_hooks(Took, Gave);
    held_ = 0;
    limit_ = (size_t{64} << 20) + 16 * input_bytes;
  }
  ~FuzzLimits() {
    limit_ = kNone;
    if (std::clock() - begin_ > 2 * CLOCKS_PER_SEC) {
      std::fprintf(stderr, "an input took more than 2 s of the processor\n");
      std::abort();
    }
  }

 private:
  static constexpr size_t kNone = ~size_t{0} >> 1;
  static void Took(const volatile void*, size_t bytes) {
    const ptrdiff_t held = held_ += static_cast<ptrdiff_t>(bytes);
    if (held > 0 && static_cast<size_t>(held) > limit_) {
      std::fprintf(stderr, "an input took %td bytes, %zu are allowed\n", held, limit_.exchange(kNone));
      std::abort();
    }
  }
  static void Gave(const volatile void* memory) {
    if (memory != nullptr) held_ -= static_cast<ptrdiff_t>(__sanitizer_get_allocated_size(const_cast<void*>(memory)));
  }
  static inline std::atomic<size_t> limit_ = kNone;
  static inline std::atomic<ptrdiff_t> held_ = 0;
  const std::clock_t begin_;
};

}  // namespace interlace
