// arena_memory.h — the pages of one arena: reserved at once, given by the system when first touched, in large pages
// where it can.
#pragma once

#include <cstdint>
#include <memory>

#include "base/result.h"

namespace interlace {

class ArenaMemory {
 public:
  // Error: the system has no such room.
  static Result<std::unique_ptr<ArenaMemory>> Create(int64_t bytes);
  ~ArenaMemory();
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Gives the pages back; the addresses stay, the next touch makes pages of zeros.
  void GiveBack();
  // Bytes of it that are in memory now.
  int64_t ResidentBytes() const;
  // Whether the pointer lies in the arena of any executor.
  static bool Holds(const void* pointer);

 private:
  ArenaMemory(char* data, int64_t bytes);
  char* data_;
  int64_t bytes_;
};

}  // namespace interlace
