// stream.h — streams of the lanes of an accelerator, through c10's device-generic interface. The compute lane is the
// device's current stream; the copy lanes have a stream each. Collectives need none: their back end orders itself
// against the current stream.
//
//   compute ──op──op──┬───────────────op(uses the copy)──
//                     │ event              ▲ event
//   h2d     ──────────┴──copy──────────────┘
//
// On CPUs there are no streams and nothing of this is used.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/op_kernel.h"

namespace interlace {

// Whether ops of this lane run on a stream of their own on this device.
bool HasOwnStream(Lane lane, c10::Device device);

class LaneStreams {
 public:
  explicit LaneStreams(c10::Device device) : device_(device), guard_(device.type()) {}
  c10::Stream For(Lane lane);
  c10::Stream Compute() const { return guard_.getStream(device_); }
  // Makes `waiter` wait for all that `on` has been given so far.
  void Order(c10::Stream waiter, c10::Stream on);
  // Tells the allocator that `tensor`'s memory is also used on `stream`.
  void Keep(const at::Tensor& tensor, c10::Stream stream) {
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  const c10::impl::VirtualGuardImpl& guard() const { return guard_; }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  std::array<std::optional<c10::Stream>, kLaneCount> streams_;  // by lane
};

// Runs `kernel` on its lane's stream after everything the compute stream and the lanes `after` were given; `touched`
// are the values it reads and writes.
Kernel OnLane(Kernel kernel, Lane lane, std::vector<Lane> after, std::vector<ValueId> touched,
              std::shared_ptr<LaneStreams> streams);
// Runs `kernel` on the compute stream after everything these lanes were given.
Kernel AfterLanes(Kernel kernel, std::vector<Lane> lanes, std::shared_ptr<LaneStreams> streams);

}  // namespace interlace
