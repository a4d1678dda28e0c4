// polyval.h — POLYVAL: blocks of 16 bytes as coefficients of a polynomial over GF(2^128), evaluated at a key. Two
// messages of n blocks agree at no more than n of the 2^128 keys, so that with a key used once it is the sum of a message
// authentication code. By carry-less multiplication where the processor has it, 16 blocks at once with one reduction.
// Source: RFC 8452, section 3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace interlace {

using Block128 = std::array<uint64_t, 2>;  // 16 bytes as they lie, low half first

class Polyval {
 public:
  Polyval() = default;
  explicit Polyval(const Block128& key);
  void Add(const void* data, size_t blocks);
  const Block128& value() const { return value_; }
  // For tests: with the instructions of old processors, or with none.
  enum class By { kAny, kNarrow, kNone };
  static void Use(By by);

 private:
  static constexpr size_t kAtOnce = 16;
  void Prepare();

  alignas(32) std::array<Block128, kAtOnce> powers_ = {};  // the last is the key itself, those before it higher ones
  Block128 value_ = {};
  bool prepared_ = false;  // powers above the first are there
};

}  // namespace interlace
