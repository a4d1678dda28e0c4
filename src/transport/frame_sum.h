// frame_sum.h — what stands behind the bytes of every frame, so that the peer notices when they were changed on the
// way.
//
// Without a key CRC-32C: for bits that a network flips. With one Poly1305, a tag that nobody makes without the key: for
// people on the network. Its key is for one frame alone, made of the connection's key and the frame's number.
// Source: RFC 8439, section 2.5.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace interlace {

using FrameTag = std::array<char, 16>;  // of CRC-32C the first four bytes

class FrameSum {
 public:
  FrameSum() = default;
  // `key`: 32 bytes, or empty.
  FrameSum(const std::string& key, uint64_t number);
  void Add(const void* data, size_t size);
  FrameTag Finish();
  // For the benchmark of what they cost (bench/frame_sums.py), the only caller: from now on this process reads no bytes
  // for its sums, and understands only ranks that do the same.
  static void LeaveOut(bool out) { left_out_.store(out, std::memory_order_relaxed); }

 private:
  void Blocks(const unsigned char* at, size_t size, uint64_t high);

  static inline std::atomic<bool> left_out_ = false;
  uint32_t crc_ = 0;
  bool keyed_ = false;
  uint64_t r_[3] = {}, h_[3] = {}, pad_[2] = {};  // limbs of 44, 44 and 42 bits
  unsigned char rest_[16] = {};                   // of a block
  size_t rest_size_ = 0;
};

}  // namespace interlace
