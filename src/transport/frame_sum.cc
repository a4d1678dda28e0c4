#include "transport/frame_sum.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/digest.h"

namespace interlace {

namespace {

__extension__ using Wide = unsigned __int128;

constexpr uint64_t kLimb = (uint64_t{1} << 44) - 1, kTop = (uint64_t{1} << 42) - 1;

uint64_t Low(const void* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

}  // namespace

FrameSum::FrameSum(const std::string& key, uint64_t number) : keyed_(!key.empty()) {
  if (!keyed_) return;
  const std::string once = Hmac(key, {reinterpret_cast<const char*>(&number), sizeof number});
  const uint64_t low = Low(once.data()), high = Low(once.data() + 8);
  r_[0] = low & 0xffc0fffffff;
  r_[1] = (low >> 44 | high << 20) & 0xfffffc0ffff;
  r_[2] = high >> 24 & 0x00ffffffc0f;
  pad_[0] = Low(once.data() + 16);
  pad_[1] = Low(once.data() + 24);
}

// h = (h + block) * r modulo 2^130 - 5, for each block of 16 bytes.
void FrameSum::Blocks(const unsigned char* at, size_t size, uint64_t high) {
  const uint64_t r0 = r_[0], r1 = r_[1], r2 = r_[2], s1 = r1 * 20, s2 = r2 * 20;
  uint64_t h0 = h_[0], h1 = h_[1], h2 = h_[2];
  for (; size >= 16; size -= 16, at += 16) {
    const uint64_t t0 = Low(at), t1 = Low(at + 8);
    h0 += t0 & kLimb;
    h1 += (t0 >> 44 | t1 << 20) & kLimb;
    h2 += (t1 >> 24 & kTop) | high;
    const Wide d0 = Wide{h0} * r0 + Wide{h1} * s2 + Wide{h2} * s1;
    Wide d1 = Wide{h0} * r1 + Wide{h1} * r0 + Wide{h2} * s2;
    Wide d2 = Wide{h0} * r2 + Wide{h1} * r1 + Wide{h2} * r0;
    h0 = static_cast<uint64_t>(d0) & kLimb;
    d1 += static_cast<uint64_t>(d0 >> 44);
    h1 = static_cast<uint64_t>(d1) & kLimb;
    d2 += static_cast<uint64_t>(d1 >> 44);
    h2 = static_cast<uint64_t>(d2) & kTop;
    h0 += static_cast<uint64_t>(d2 >> 42) * 5;
    h1 += h0 >> 44;
    h0 &= kLimb;
  }
  h_[0] = h0, h_[1] = h1, h_[2] = h2;
}

void FrameSum::Add(const void* data, size_t size) {
  if (left_out_.load(std::memory_order_relaxed)) return;
  if (!keyed_) {
    crc_ = Crc32c(crc_, data, size);
    return;
  }
  const auto* at = static_cast<const unsigned char*>(data);
  constexpr uint64_t kFull = uint64_t{1} << 40;  // the bit above a block of 16 bytes
  if (rest_size_ > 0) {
    const size_t taken = std::min(size, sizeof rest_ - rest_size_);
    std::memcpy(rest_ + rest_size_, at, taken);
    rest_size_ += taken, at += taken, size -= taken;
    if (rest_size_ < sizeof rest_) return;
    Blocks(rest_, sizeof rest_, kFull);
    rest_size_ = 0;
  }
  Blocks(at, size, kFull);
  rest_size_ = size % 16;
  std::memcpy(rest_, at + (size - rest_size_), rest_size_);
}

FrameTag FrameSum::Finish() {
  FrameTag tag = {};
  if (!keyed_) {
    std::memcpy(tag.data(), &crc_, sizeof crc_);
    return tag;
  }
  if (rest_size_ > 0) {
    rest_[rest_size_] = 1;
    std::fill(rest_ + rest_size_ + 1, rest_ + sizeof rest_, static_cast<unsigned char>(0));
    Blocks(rest_, sizeof rest_, 0);
  }
  uint64_t h0 = h_[0], h1 = h_[1], h2 = h_[2];
  for (int pass = 0; pass < 2; ++pass) {  // carries, all the way round
    h1 += h0 >> 44, h0 &= kLimb;
    h2 += h1 >> 44, h1 &= kLimb;
    h0 += (h2 >> 42) * 5, h2 &= kTop;
  }
  h1 += h0 >> 44, h0 &= kLimb;
  // Less 2^130 - 5 when it is not smaller.
  uint64_t g0 = h0 + 5, g1 = h1 + (g0 >> 44);
  g0 &= kLimb;
  const uint64_t g2 = h2 + (g1 >> 44) - (uint64_t{1} << 42);
  g1 &= kLimb;
  const uint64_t smaller = uint64_t{0} - (g2 >> 63);
  h0 = (h0 & smaller) | (g0 & ~smaller);
  h1 = (h1 & smaller) | (g1 & ~smaller);
  h2 = (h2 & smaller) | (g2 & ~smaller);
  const Wide low = Wide{h0 | h1 << 44} + pad_[0];
  const uint64_t words[2] = {static_cast<uint64_t>(low),
                             (h1 >> 20 | h2 << 24) + pad_[1] + static_cast<uint64_t>(low >> 64)};
  std::memcpy(tag.data(), words, sizeof words);
  return tag;
}

}  // namespace interlace
