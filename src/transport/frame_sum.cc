#include "transport/frame_sum.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/digest.h"

namespace interlace {

FrameSum::FrameSum(const std::string& key, uint64_t number) : keyed_(!key.empty()) {
  if (!keyed_) return;
  const std::string once = Hmac(key, {reinterpret_cast<const char*>(&number), sizeof number});
  Block128 point;
  std::memcpy(point.data(), once.data(), sizeof point);
  std::memcpy(pad_.data(), once.data() + sizeof point, sizeof pad_);
  sum_ = Polyval(point);
}

void FrameSum::Add(const void* data, size_t size) {
  if (none_ || left_out()) return;
  if (!keyed_) {
    crc_ = Crc32c(crc_, data, size);
    return;
  }
  const auto* at = static_cast<const unsigned char*>(data);
  const size_t had = size_ % sizeof rest_;
  size_ += size;
  if (had > 0) {
    const size_t taken = std::min(size, sizeof rest_ - had);
    std::memcpy(rest_ + had, at, taken);
    at += taken, size -= taken;
    if (had + taken < sizeof rest_) return;
    sum_.Add(rest_, 1);
  }
  sum_.Add(at, size / sizeof rest_);
  std::memcpy(rest_, at + (size - size % sizeof rest_), size % sizeof rest_);
}

FrameTag FrameSum::Finish() {
  FrameTag tag = {};
  if (!keyed_) {
    std::memcpy(tag.data(), &crc_, sizeof crc_);
    return tag;
  }
  const Block128 length = {size_, 0};  // or zeros at the end could be added and taken away
  if (const size_t had = size_ % sizeof rest_; had > 0) {
    std::fill(rest_ + had, rest_ + sizeof rest_, static_cast<unsigned char>(0));
    sum_.Add(rest_, 1);
  }
  sum_.Add(length.data(), 1);
  const Block128 words = {sum_.value()[0] ^ pad_[0], sum_.value()[1] ^ pad_[1]};
  std::memcpy(tag.data(), words.data(), sizeof tag);
  return tag;
}

}  // namespace interlace
