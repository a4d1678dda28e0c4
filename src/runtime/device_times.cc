#include "runtime/device_times.h"

#include <cmath>

#include "base/clock.h"

namespace interlace {

void DeviceTimes::Begin() {
  marks_.clear();
  Mark();
  marks_.back().synchronize();
  begin_ns_ = NanosNow();
}

int32_t DeviceTimes::Mark() {
  return MarkOn(guard_.getStream(device_));
}

int32_t DeviceTimes::MarkOn(c10::Stream stream) {
  marks_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  marks_.back().record(stream);
  return static_cast<int32_t>(marks_.size()) - 1;
}

int32_t DeviceTimes::MarkAside(const std::function<void()>& wait) {
  if (!aside_) aside_ = guard_.getStreamFromGlobalPool(device_);
  const c10::Stream outer = guard_.exchangeStream(*aside_);
  wait();
  guard_.exchangeStream(outer);
  return MarkOn(*aside_);
}

void DeviceTimes::Read() {
  at_ns_.clear();
  for (c10::Event& mark : marks_) {
    mark.synchronize();
    const double ms = at_ns_.empty() ? 0 : marks_.front().elapsedTime(mark);
    at_ns_.push_back(begin_ns_ + static_cast<int64_t>(std::llround(ms * 1e6)));
  }
}

}  // namespace interlace
