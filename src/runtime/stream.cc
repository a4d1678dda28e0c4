#include "runtime/stream.h"

namespace interlace {

namespace {

struct LaneKernel final : KernelData {
  Kernel inner;
  Lane lane;
  std::vector<Lane> after;
  std::vector<ValueId> touched;
  std::shared_ptr<LaneStreams> streams;
  void Run(Frame& frame) {
    const c10::Stream own = streams->For(lane), compute = streams->Compute();
    streams->AfterCompute(lane);
    for (Lane other : after) streams->After(lane, other);
    streams->Give(lane);
    for (ValueId id : touched) {
      if (frame.slots[id].defined()) streams->Keep(frame.slots[id], own);
    }
    {
      const OnStream here(*streams, lane);
      inner.run(inner.data.get(), frame);
    }
    for (ValueId id : touched) {
      if (frame.slots[id].defined()) streams->Keep(frame.slots[id], compute);
    }
  }
};

struct AfterKernel final : KernelData {
  Kernel inner;
  std::vector<Lane> lanes;
  std::shared_ptr<LaneStreams> streams;
  void Run(Frame& frame) {
    for (Lane lane : lanes) streams->After(Lane::kCompute, lane);
    inner.run(inner.data.get(), frame);
  }
};

}  // namespace

bool HasOwnStream(Lane lane, c10::Device device) {
  return !device.is_cpu() && (lane == Lane::kH2D || lane == Lane::kD2H || lane == Lane::kFile);
}

c10::Stream LaneStreams::For(Lane lane) {
  std::optional<c10::Stream>& stream = streams_[static_cast<size_t>(lane)];
  if (!stream) stream = guard_.getStreamFromGlobalPool(device_);
  return *stream;
}

void LaneStreams::AfterCompute(Lane lane) {
  Order(For(lane), Compute());
}

void LaneStreams::After(Lane waiter, Lane on) {
  if (const c10::Stream compute = Compute(); waiter == Lane::kCompute && compute != compute_) {
    compute_ = compute;  // the caller's, and another one than in the last step
    known_[Index(waiter)] = {};
  }
  uint64_t& known = known_[Index(waiter)][Index(on)];
  if (known == given_[Index(on)]) return;
  known = given_[Index(on)];
  Order(waiter == Lane::kCompute ? Compute() : For(waiter), For(on));
}

void LaneStreams::Join() {
  for (size_t lane = 0; lane < streams_.size(); ++lane) {
    if (streams_[lane]) After(Lane::kCompute, static_cast<Lane>(lane));
  }
}

void LaneStreams::Order(c10::Stream waiter, c10::Stream on) {
  c10::Event event(device_.type());
  event.record(on);
  event.block(waiter);
}

Kernel OnLane(Kernel kernel, Lane lane, std::vector<Lane> after, std::vector<ValueId> touched,
              std::shared_ptr<LaneStreams> streams) {
  if (kernel.run == nullptr) return kernel;
  auto data = std::make_unique<LaneKernel>();
  data->inner = std::move(kernel);
  data->lane = lane;
  data->after = std::move(after);
  data->touched = std::move(touched);
  data->streams = std::move(streams);
  return MakeKernel(std::move(data));
}

Kernel AfterLanes(Kernel kernel, std::vector<Lane> lanes, std::shared_ptr<LaneStreams> streams) {
  if (kernel.run == nullptr || lanes.empty()) return kernel;
  auto data = std::make_unique<AfterKernel>();
  data->inner = std::move(kernel);
  data->lanes = std::move(lanes);
  data->streams = std::move(streams);
  return MakeKernel(std::move(data));
}

}  // namespace interlace
