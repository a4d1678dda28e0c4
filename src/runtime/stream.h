// stream.h — streams of the lanes of an accelerator, through c10's device-generic interface. The compute lane is the
// device's current stream; the copy lanes have a stream each. Collectives need none: their back end orders itself
// against the current stream.
//
//   compute ──op──op──┬───────────────op(uses the copy)──
//                     │ event              ▲ event
//   h2d     ──────────┴──copy──────────────┘
//
// Whoever uses a storage waits for the last kernel of each other lane that touched it in this step, and for none that
// the lane was given later. At the end of a step the compute stream waits for every lane, so that the next one, of
// whatever program, and whoever reads or frees between steps need no stream but the current one.
//
// On CPUs there are no streams and nothing of this is used.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/op_kernel.h"

namespace interlace {

// Whether an op runs on a stream of its lane on this device: a copy. What copies nothing, waits among it, stays on the
// compute stream: on a lane it would stand behind other copies, and its users with it.
bool HasOwnStream(const Op& op, c10::Device device);

class LaneStreams {
 public:
  explicit LaneStreams(c10::Device device) : device_(device), guard_(device.type()), compute_(Compute()) {}
  c10::Stream For(Lane lane);
  c10::Stream Compute() const { return guard_.getStream(device_); }
  // Makes a lane's stream wait for all that the compute stream has been given so far, ...
  void AfterCompute(Lane lane);
  // ... `waiter`, a lane's or kCompute, for what the lane `on` has done in the step with the storage of this root, or
  // (kNone) with any.
  void After(Lane waiter, Lane on, ValueId root);
  // The lane was given a kernel that touches these storages.
  void Given(Lane lane, const std::vector<ValueId>& roots);
  // The compute stream waits for every lane; a step ends.
  void Join();
  // Tells the allocator that `tensor`'s memory is also used on `stream`.
  void Keep(const at::Tensor& tensor, c10::Stream stream) {
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  const c10::impl::VirtualGuardImpl& guard() const { return guard_; }

 private:
  static size_t Index(Lane lane) { return static_cast<size_t>(lane); }
  void Order(c10::Stream waiter, c10::Stream on);
  using ByLane = std::array<uint64_t, kLaneCount>;

  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream compute_;
  std::array<std::optional<c10::Stream>, kLaneCount> streams_;        // by lane
  ByLane given_{};                                                    // by lane: how many kernels
  std::array<std::deque<c10::Event>, kLaneCount> over_;               // of the last of them: those of this step
  std::array<ByLane, kLaneCount> known_{};                            // by waiter and lane: those it has waited for
  std::vector<ByLane> touched_;                                       // by root: the last that did, in this step
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

// A lane, and the root of a storage that it may have touched.
using LaneUses = std::vector<std::pair<Lane, ValueId>>;
// Runs `kernel` on its lane's stream after everything the compute stream was given, and what other lanes did with the
// storages of `after`; `touched` are the values it reads and writes, `roots` theirs.
Kernel OnLane(Kernel kernel, Lane lane, LaneUses after, std::vector<ValueId> touched, std::vector<ValueId> roots,
              std::shared_ptr<LaneStreams> streams);
// Runs `kernel` on the compute stream after what lanes did with these storages.
Kernel AfterLanes(Kernel kernel, LaneUses after, std::shared_ptr<LaneStreams> streams);

}  // namespace interlace
