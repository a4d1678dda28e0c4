#include "runtime/stream.h"

#include "ir/op_table.h"
#include "ir/residency.h"

namespace interlace {

namespace {

struct LaneKernel final : KernelData {
  Kernel inner;
  Lane lane;
  LaneUses after;
  std::vector<ValueId> touched, roots;
  std::shared_ptr<LaneStreams> streams;
  void Run(Frame& frame) {
    const c10::Stream own = streams->For(lane), compute = streams->Compute();
    streams->AfterCompute(lane);
    for (const auto& [other, root] : after) streams->After(lane, other, root);
    for (ValueId id : touched) {
      if (frame.slots[id].defined()) streams->Keep(frame.slots[id], own);
    }
    {
      const OnStream here(*streams, lane);
      inner.run(inner.data.get(), frame);
    }
    streams->Given(lane, roots);
    for (ValueId id : touched) {
      if (frame.slots[id].defined()) streams->Keep(frame.slots[id], compute);
    }
  }
};

struct AfterKernel final : KernelData {
  Kernel inner;
  LaneUses after;
  std::shared_ptr<LaneStreams> streams;
  void Run(Frame& frame) {
    for (const auto& [lane, root] : after) streams->After(Lane::kCompute, lane, root);
    inner.run(inner.data.get(), frame);
  }
};

}  // namespace

bool HasOwnStream(const Op& op, c10::Device device) {
  return !device.is_cpu() && IsStart(op) && MoveOf(op) != nullptr && !IsClean(op) && !IsFresh(op);
}

c10::Stream LaneStreams::For(Lane lane) {
  std::optional<c10::Stream>& stream = streams_[static_cast<size_t>(lane)];
  if (!stream) stream = guard_.getStreamFromGlobalPool(device_);
  return *stream;
}

void LaneStreams::AfterCompute(Lane lane) {
  Order(For(lane), Compute());
}

void LaneStreams::After(Lane waiter, Lane on, ValueId root) {
  if (root != kNone && touched_.size() <= static_cast<size_t>(root)) return;
  const uint64_t number = root == kNone ? given_[Index(on)] : touched_[root][Index(on)];
  uint64_t& known = known_[Index(waiter)][Index(on)];
  const size_t since = given_[Index(on)] - number;
  std::deque<c10::Event>& over = over_[Index(on)];
  if (known >= number || since >= over.size()) return;  // joined: a lane comes after what compute has waited for
  known = number;
  over[over.size() - 1 - since].block(waiter == Lane::kCompute ? Compute() : For(waiter));
}

void LaneStreams::Given(Lane lane, const std::vector<ValueId>& roots) {
  const uint64_t number = ++given_[Index(lane)];
  over_[Index(lane)].emplace_back(device_.type()).record(For(lane));
  for (ValueId root : roots) {
    if (touched_.size() <= static_cast<size_t>(root)) touched_.resize(root + 1);
    touched_[root][Index(lane)] = number;
  }
}

void LaneStreams::Join() {
  if (const c10::Stream compute = Compute(); compute != compute_) {
    compute_ = compute;  // the caller's, and another one than in the last step
    known_[Index(Lane::kCompute)] = {};
  }
  for (size_t lane = 0; lane < streams_.size(); ++lane) {
    uint64_t& known = known_[Index(Lane::kCompute)][lane];
    if (std::exchange(known, given_[lane]) != given_[lane]) Order(compute_, *streams_[lane]);
    over_[lane].clear();
  }
  touched_.clear();
}

void LaneStreams::Order(c10::Stream waiter, c10::Stream on) {
  c10::Event event(device_.type());
  event.record(on);
  event.block(waiter);
}

Kernel OnLane(Kernel kernel, Lane lane, LaneUses after, std::vector<ValueId> touched, std::vector<ValueId> roots,
              std::shared_ptr<LaneStreams> streams) {
  if (kernel.run == nullptr) return kernel;
  auto data = std::make_unique<LaneKernel>();
  data->inner = std::move(kernel);
  data->lane = lane;
  data->after = std::move(after);
  data->touched = std::move(touched);
  data->roots = std::move(roots);
  data->streams = std::move(streams);
  return MakeKernel(std::move(data));
}

Kernel AfterLanes(Kernel kernel, LaneUses after, std::shared_ptr<LaneStreams> streams) {
  if (kernel.run == nullptr || after.empty()) return kernel;
  auto data = std::make_unique<AfterKernel>();
  data->inner = std::move(kernel);
  data->after = std::move(after);
  data->streams = std::move(streams);
  return MakeKernel(std::move(data));
}

}  // namespace interlace
