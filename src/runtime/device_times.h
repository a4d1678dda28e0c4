// device_times.h — when the streams of a device come by, on the host's clock: marks are events with times, read when a
// step is over. Nobody waits while it runs.
//
//   host     | Begin |  Mark Mark Mark Mark        | Read
//   stream           |op   |op      |op  |         all over: mark i was at At(i)
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

namespace interlace {

class DeviceTimes {
 public:
  explicit DeviceTimes(c10::Device device) : device_(device), guard_(device.type()) {}
  // Waits for the device; what comes is counted from here.
  void Begin();
  // The moment at which the current stream has done all that it was given; its number.
  int32_t Mark();
  // The same on a stream of this purpose, which `wait` makes wait for something.
  int32_t MarkAside(const std::function<void()>& wait);
  // On another stream than the current one.
  int32_t MarkOn(c10::Stream stream);
  // Waits for all marks and reads them. Nanoseconds of the host's clock (base/clock.h).
  void Read();
  int64_t At(int32_t mark) const { return at_ns_[static_cast<size_t>(mark)]; }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  std::deque<c10::Event> marks_;  // the first is the beginning
  std::vector<int64_t> at_ns_;
  int64_t begin_ns_ = 0;
  std::optional<c10::Stream> aside_;
};

}  // namespace interlace
