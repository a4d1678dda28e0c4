// frame_sum.h — what stands behind the bytes of every frame, so that the peer notices when they were changed on the
// way.
//
// Without a key CRC-32C: for bits that a network flips. With one POLYVAL of the bytes and their number, and a pad added, a
// tag that nobody makes without the key: for people on the network. Point and pad are for one frame alone, made of the
// connection's key and the frame's number: who changes n bytes is believed with a chance of about n / 2^132.
// Source: Wegman and Carter, New hash functions and their use in authentication and set equality, 1981.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/polyval.h"

namespace interlace {

using FrameTag = std::array<char, 16>;  // of CRC-32C the first four bytes

class FrameSum {
 public:
  FrameSum() = default;
  // `key`: 32 bytes, or empty.
  FrameSum(const std::string& key, uint64_t number);
  // For what goes through this host's memory alone, which is as safe as where it came from: no byte is read.
  static FrameSum None() {
    FrameSum none;
    none.none_ = true;
    return none;
  }
  void Add(const void* data, size_t size);
  FrameTag Finish();
  // For the benchmark of what they cost (bench/frame_sums.py), the only caller: from now on this process reads no bytes
  // for its sums, and understands only ranks that do the same.
  static void LeaveOut(bool out) { left_out_.store(out, std::memory_order_relaxed); }
  static bool left_out() { return left_out_.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<bool> left_out_ = false;
  uint32_t crc_ = 0;
  bool none_ = false, keyed_ = false;
  Polyval sum_;
  Block128 pad_ = {};
  unsigned char rest_[16] = {};  // of a block
  uint64_t size_ = 0;            // bytes of the frame so far
};

}  // namespace interlace
