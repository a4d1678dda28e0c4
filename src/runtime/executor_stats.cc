// What an executor tells of its steps so far.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <map>
#include <set>

#include "ir/text.h"
#include "runtime/executor.h"
#include "runtime/step_heap.h"

namespace interlace {

namespace {

std::string PeakOpOf(const Program& program, const MemoryPlan& plan) {
  for (const PlanVariant& v : plan.variants) {
    const int64_t place = int64_t{plan.packing.live_at} - v.axis - 1;
    if (place >= 0 && place < static_cast<int64_t>(v.phase->ops.size()))
      return PrintOp(program, program.op(v.phase->ops[place]));
  }
  return "";
}

std::string Mib(int64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

// Allocators do not say what a device has before torch 2.10.
template <class Allocator>
std::string MemoryOf(Allocator* allocator, c10::Device device) {
  if constexpr (requires { allocator->getMemoryInfo(device.index()); }) {
    return device.str() + " has " + Mib(static_cast<int64_t>(allocator->getMemoryInfo(device.index()).second)) + "; ";
  } else {
    return "";
  }
}

}  // namespace

Error Executor::WithMemory(Error error) const {
  if (device_.is_cpu()) return error;
  auto* const allocator = c10::getDeviceAllocator(device_.type());
  const auto stats = allocator->getDeviceStats(device_.index());
  const auto total = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const int64_t states = store_.bytes() + const_bytes_, arena = std::max(arena_.top(), arena_.wanted_bytes());
  const int64_t taken = arena_.Taken() ? arena : 0, used = stats.allocated_bytes[total].current;
  error.message += "\n  memory: " + MemoryOf(allocator, device_) + "parameters and states take " + Mib(states) +
                   ", the step as planned " + Mib(arena) + ", others of this process " +
                   Mib(std::max<int64_t>(used - states - taken, 0)) + " in " +
                   Mib(std::max<int64_t>(stats.reserved_bytes[total].current, used)) +
                   " that the framework holds; give a memory_limit (the search then recomputes or offloads), a smaller "
                   "micro-batch with more accumulation, or more ranks";
  return error;
}

ExecutorStats Executor::stats() const {
  ExecutorStats stats;
  const Counters& counters = runner_.frame.counters;
  stats.counters = counters;
  stats.persistent_bytes = (counters.steps > 0 ? use_.settled_bytes : store_.bytes()) + const_bytes_;
  if (const auto& tier = moving_.bank()->tier(); tier != nullptr) {
    stats.tier = tier->stats();
    stats.heap_bytes = StepHeap::Bytes();
    stats.tier_note = tier->note();
  }
  if (device_.is_cpu()) {
    stats.live_bytes = stats.persistent_bytes + use_.live_bytes;
    stats.peak_bytes = stats.persistent_bytes + use_.peak_bytes + arena_.top();
    if (arena_.on()) {
      stats.peak_op = PeakOpOf(program_, *arena_.plan());
    } else if (use_.peak_op != kNone) {
      stats.peak_op = PrintOp(program_, program_.op(use_.peak_op));
    }
  } else {
    stats.live_bytes = recorder_.DeviceBytes();
    stats.peak_bytes = recorder_.DevicePeak();
    if (arena_.on()) stats.peak_op = PeakOpOf(program_, *arena_.plan());
  }
  std::map<std::string, int64_t> counts;
  std::set<const Phase*> counted;
  for (size_t i = 0; i < plans_.size(); ++i) {
    const Plan& plan = plans_[i];
    if (plan.phase == nullptr || !counted.insert(plan.phase).second) continue;  // another variant of it
    stats.instructions += static_cast<int64_t>(plan.instructions.size());
    for (const Instruction& instruction : plan.instructions) ++counts[program_.op(instruction.op).name];
  }
  stats.op_counts.assign(counts.begin(), counts.end());
  for (const auto& [name, comm] : comms_) {
    const Comm::Stats one = comm->stats();
    stats.comm.bytes_sent += one.bytes_sent;
    stats.comm.bytes_received += one.bytes_received;
    stats.comm.receive_buffer_peak_bytes =
        std::max(stats.comm.receive_buffer_peak_bytes, one.receive_buffer_peak_bytes);
    stats.comm.calls += one.calls;
  }
  return stats;
}

}  // namespace interlace
