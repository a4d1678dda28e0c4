// arena_memory.h — the memory of one arena. On CPUs pages that are reserved at once and given by the system when first
// touched, in large pages where it can. On a device one block of the framework's allocator.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "base/result.h"

namespace interlace {

class ArenaMemory {
 public:
  // Error: there is no such room.
  static Result<std::unique_ptr<ArenaMemory>> Create(int64_t bytes, c10::Device device);
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  c10::Device device() const { return device_; }
  // Gives the memory back. On CPUs the addresses stay, and the next touch makes pages of zeros; on a device nothing may
  // touch it before TakeBack.
  void GiveBack();
  // After GiveBack, before the memory is used again. Whether it lies where it was. Error: there is no room.
  Result<bool> TakeBack();
  // On a device: the current stream is the next to use it. (That it comes after the last one is the caller's affair, as
  // for the states.)
  void UseHere();
  // Bytes of it that are in memory now.
  int64_t ResidentBytes() const;
  // Whether the pointer lies in the arena of any executor.
  static bool Holds(const void* pointer);

 private:
  ArenaMemory(char* data, int64_t bytes, c10::DataPtr block, c10::Device device);
  c10::Device device_;
  c10::DataPtr block_;  // on a device
  char* data_;
  int64_t bytes_;
  std::optional<c10::Stream> stream_;  // on a device: that of the last step
};

}  // namespace interlace
