// stream.h — streams of the lanes of an accelerator, through c10's device-generic interface. The compute lane is the
// device's current stream; the copy lanes have a stream each. Collectives need none: their back end orders itself
// against the current stream.
//
//   compute ──op──op──┬───────────────op(uses the copy)──
//                     │ event              ▲ event
//   h2d     ──────────┴──copy──────────────┘
//
// All programs of a trainer share one set of streams: a copy that one phase, step or program started is known to the
// next. At the end of a step the compute stream waits for every lane, so that whoever reads or frees between steps
// needs no stream but the current one. A wait for a lane that was given nothing since the last one is left out.
//
// On CPUs there are no streams and nothing of this is used.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/op_kernel.h"

namespace interlace {

// Whether ops of this lane run on a stream of their own on this device.
bool HasOwnStream(Lane lane, c10::Device device);

class LaneStreams {
 public:
  explicit LaneStreams(c10::Device device) : device_(device), guard_(device.type()), compute_(Compute()) {}
  c10::Stream For(Lane lane);
  c10::Stream Compute() const { return guard_.getStream(device_); }
  // Makes a lane's stream wait for all that the compute stream has been given so far, ...
  void AfterCompute(Lane lane);
  // ... `waiter`, a lane's or kCompute, for all that the lane `on` has been given.
  void After(Lane waiter, Lane on);
  // The lane is given something.
  void Give(Lane lane) { ++given_[Index(lane)]; }
  // The compute stream waits for every lane.
  void Join();
  // Tells the allocator that `tensor`'s memory is also used on `stream`.
  void Keep(const at::Tensor& tensor, c10::Stream stream) {
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  const c10::impl::VirtualGuardImpl& guard() const { return guard_; }

 private:
  static size_t Index(Lane lane) { return static_cast<size_t>(lane); }
  void Order(c10::Stream waiter, c10::Stream on);

  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream compute_;
  std::array<std::optional<c10::Stream>, kLaneCount> streams_;        // by lane
  std::array<uint64_t, kLaneCount> given_{};                          // by lane: how many kernels
  std::array<std::array<uint64_t, kLaneCount>, kLaneCount> known_{};  // by waiter and lane: those it has waited for
};

// While it lives, a lane's stream is the current one.
class OnStream {
 public:
  OnStream(LaneStreams& streams, Lane lane)
      : guard_(streams.guard()), outer_(guard_.exchangeStream(streams.For(lane))) {}
  ~OnStream() { guard_.exchangeStream(outer_); }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const c10::impl::VirtualGuardImpl& guard_;
  c10::Stream outer_;
};

// Runs `kernel` on its lane's stream after everything the compute stream and the lanes `after` were given; `touched`
// are the values it reads and writes.
Kernel OnLane(Kernel kernel, Lane lane, std::vector<Lane> after, std::vector<ValueId> touched,
              std::shared_ptr<LaneStreams> streams);
// Runs `kernel` on the compute stream after everything these lanes were given.
Kernel AfterLanes(Kernel kernel, std::vector<Lane> lanes, std::shared_ptr<LaneStreams> streams);

}  // namespace interlace
