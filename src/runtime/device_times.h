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
#include <memory>
#include <optional>
#include <vector>

namespace interlace {

class DeviceGraph;

// Nanoseconds by which an op between two marks seems longer than it is where ops follow one another without marks: of a
// short op and of a long one, by lines between. On an H100 2.0 us of an add that seems to take 4.1, 0.7 us of one of 49.
struct MarkCost {
  static constexpr int64_t kMostNs = 5'000;
  int64_t short_ns = 0, of_short_ns = 0, long_ns = 0, of_long_ns = 0;
  int64_t plain_ns = 0;  // of a short op among others without marks
  int64_t ahead = 1;     // products that keep the device busy until what follows has come
  // Of an op with so many nanoseconds between its marks.
  int64_t Of(int64_t ns) const;
};

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
  // Measured at a device's first call in this process, before Begin, with ops that the device has waiting.
  MarkCost CostOfMarks();
  // By how many nanoseconds an op of a graph is shorter than one that is given by itself; `make` makes an empty graph.
  // Measured as the cost of marks is. 1.1 us on an H100.
  int64_t SavedByGraphs(const std::function<std::unique_ptr<DeviceGraph>()>& make);

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  std::deque<c10::Event> marks_;  // the first is the beginning
  std::vector<int64_t> at_ns_;
  int64_t begin_ns_ = 0;
  std::optional<c10::Stream> aside_;
};

}  // namespace interlace
