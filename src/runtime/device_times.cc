#include "runtime/device_times.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "runtime/allocator.h"
#include "runtime/phase_graphs.h"

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

namespace {

constexpr int kOps = 32;

// Work for measuring: short ops, and long ones that keep the device busy.
struct Work {
  explicit Work(c10::Device device) : options(at::TensorOptions().device(device).dtype(at::kFloat)) {}
  void Multiply() { at::mm_out(product, factor, factor); }
  void Add() { small.add_(1); }
  at::TensorOptions options;
  at::Tensor factor = at::ones({1024, 1024}, options), small = at::zeros({1024}, options);
  at::Tensor product = at::empty_like(factor);
};

std::mutex measuring;

}  // namespace

MarkCost DeviceTimes::CostOfMarks() {
  static std::unordered_map<c10::Device, MarkCost> known;
  const std::lock_guard lock(measuring);
  const auto found = known.find(device_);
  if (found != known.end()) return found->second;
  constexpr int64_t kAheadNs = 4'000'000, kMostProducts = 200;
  const ArenaHook::Outside own;
  Work work(device_);
  MarkCost out;
  Begin();
  work.Multiply();  // the first finds its kernel
  const int32_t second = Mark();
  work.Multiply();
  Mark();
  Read();
  const int64_t product_ns = std::max<int64_t>(1, At(second + 1) - At(second));
  out.ahead = std::clamp<int64_t>(kAheadNs / product_ns, 1, kMostProducts);
  // Nanoseconds of an op: between marks, and without.
  const auto measure = [&](const auto& op) {
    Begin();
    for (int64_t i = 0; i < out.ahead; ++i) work.Multiply();
    const int32_t first = Mark();
    for (int i = 0; i < kOps; ++i) op();
    const int32_t last = Mark();
    std::vector<int32_t> begun;
    for (int i = 0; i < kOps; ++i) {
      begun.push_back(Mark());
      op();
      Mark();
    }
    Read();
    std::vector<int64_t> between;
    for (const int32_t begin : begun) between.push_back(At(begin + 1) - At(begin));
    std::nth_element(between.begin(), between.begin() + kOps / 2, between.end());
    return std::pair(between[kOps / 2], (At(last) - At(first)) / kOps);
  };
  const auto difference = [](int64_t marked, int64_t plain) {
    return std::clamp<int64_t>(marked - plain, 0, std::min(std::max<int64_t>(marked, 0), MarkCost::kMostNs));
  };
  std::tie(out.short_ns, out.plain_ns) = measure([&] { work.Add(); });
  out.of_short_ns = difference(out.short_ns, out.plain_ns);
  int64_t plain_ns = 0;
  std::tie(out.long_ns, plain_ns) = measure([&] { work.Multiply(); });
  out.of_long_ns = difference(out.long_ns, plain_ns);
  return known[device_] = out;
}

int64_t DeviceTimes::SavedByGraphs(const std::function<std::unique_ptr<DeviceGraph>()>& make) {
  static std::unordered_map<c10::Device, int64_t> known;
  const MarkCost cost = CostOfMarks();
  const std::lock_guard lock(measuring);
  const auto found = known.find(device_);
  if (found != known.end()) return found->second;
  const ArenaHook::Outside own;
  Work work(device_);
  const std::unique_ptr<DeviceGraph> graph = make();
  {
    const c10::Stream outer = guard_.exchangeStream(guard_.getStreamFromGlobalPool(device_));
    graph->Begin({0, 0});
    for (int i = 0; i < kOps; ++i) work.Add();
    graph->End();
    guard_.exchangeStream(outer);
  }
  Begin();
  for (int64_t i = 0; i < cost.ahead; ++i) work.Multiply();
  const int32_t first = Mark();
  graph->Replay();
  const int32_t last = Mark();
  Read();
  return known[device_] =
             std::clamp<int64_t>(cost.plain_ns - (At(last) - At(first)) / kOps, 0, MarkCost::kMostNs);
}

int64_t MarkCost::Of(int64_t ns) const {
  if (ns <= short_ns) return std::min(ns, of_short_ns);
  if (ns >= long_ns) return of_long_ns;
  return of_short_ns + (of_long_ns - of_short_ns) * (ns - short_ns) / (long_ns - short_ns);
}

}  // namespace interlace
