#include "runtime/step_recorder.h"

#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <utility>

#include "ir/carried_places.h"
#include "ir/liveness.h"
#include "ir/op_table.h"
#include "runtime/allocator.h"
#include "runtime/phase_graphs.h"

namespace interlace {

namespace {

// Bytes of tensors now, and the most since the last time that they were taken.
struct DeviceUse {
  int64_t live = 0, peak = 0;
};
DeviceUse UseOf(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}
DeviceUse TakeDeviceUse(c10::Device device) {
  const DeviceUse use = UseOf(device);
  c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  return use;
}

}  // namespace

int64_t StepRecorder::DeviceBytes() const {
  return UseOf(device_).live;
}

int64_t StepRecorder::DevicePeak() const {
  return device_peak_bytes_ > 0 ? device_peak_bytes_ : UseOf(device_).live;
}

void StepRecorder::BeginOnDevice() {
  if (!device_.is_cpu()) peak_before_ = UseOf(device_).peak;
}

void StepRecorder::EndOnDevice() {
  if (device_.is_cpu()) return;
  const int64_t peak = UseOf(device_).peak;
  if (on() || peak > peak_before_) device_peak_bytes_ = std::max(device_peak_bytes_, peak);
}

int64_t StepRecorder::TakeDeviceBytes() {
  device_peak_bytes_ = 0;
  return TakeDeviceUse(device_).live;
}

void StepRecorder::SetDevice(c10::Device device, std::shared_ptr<LaneStreams> lanes, const PhaseGraphs* graphs) {
  device_ = device;
  graphs_ = graphs;
  lanes_ = std::move(lanes);
  if (!device.is_cpu()) times_.emplace(device);
}

void StepRecorder::Begin(TraceMode mode, size_t instructions, int64_t persistent_bytes, int64_t live_before) {
  record_.mode = mode;
  if (mode == TraceMode::kOff) return;
  record_.phases.clear();
  record_.samples.clear();
  record_.transfers.clear();
  record_.samples.reserve(instructions);
  record_.persistent_bytes = persistent_bytes;
  live_before_ = live_before;
  through_.clear();
  if (arena_.on()) {
    if (Result<std::vector<int64_t>> through = BytesThroughRuns(program_); through.ok()) through_ = std::move(*through);
  }
  for (const auto& [axis, comm] : comms_) comm->SetRecording(true);
  if (times_) {
    FindMarkCost();
    marks_.clear();
    live_before_ = TakeDeviceUse(device_).live;
    times_->Begin();
    for (const auto& [axis, comm] : comms_) comm->Watch(&*times_);
  }
  record_.begin_ns = NanosNow();
}

void StepRecorder::End() {
  if (!on()) return;
  if (times_) ReadTimes();
  record_.end_ns = NanosNow();
  for (TransferSample& sample : record_.transfers) {
    if (sample.comm != nullptr) sample.times = sample.comm->TakeTimes(sample.ticket);
  }
  std::erase_if(record_.transfers, [](const TransferSample& sample) { return sample.times.end_ns == 0; });
  for (const auto& [axis, comm] : comms_) {
    comm->SetRecording(false);
    comm->Watch(nullptr);
  }
}

// An op's time is what it takes in the steps that are not recorded. Where that cannot be found, it is what was measured.
void StepRecorder::FindMarkCost() {
  mark_cost_ = MarkCost();
  saved_by_graphs_ns_ = 0;
  if (record_.mode != TraceMode::kSerial) return;
  try {
    mark_cost_ = times_->CostOfMarks();
  } catch (const std::exception&) {
    return;
  }
  const Result<int64_t> saved = graphs_ == nullptr ? Result<int64_t>(0) : graphs_->SavedNs(*times_);
  if (saved.ok()) saved_by_graphs_ns_ = *saved;
}

void StepRecorder::ReadTimes() {
  times_->Read();
  for (size_t i = 0; i < marks_.size(); ++i) {
    OpSample& sample = record_.samples[i];
    sample.begin_ns = times_->At(marks_[i].begin);
    const int64_t ns = std::max<int64_t>(0, times_->At(marks_[i].end) - sample.begin_ns);
    const bool in_graph = record_.phases[static_cast<size_t>(sample.run)]->kind == PhaseKind::kMicroBatch;
    sample.end_ns = sample.begin_ns + std::max<int64_t>(0, ns - mark_cost_.Of(ns) - (in_graph ? saved_by_graphs_ns_ : 0));
  }
  for (size_t first = 0; first < marks_.size(); ++first) {
    size_t last = first;
    while (marks_[last].with_next && last + 1 < marks_.size()) ++last;
    if (last > first) ShareTimes(first, last);
    first = last;
  }
}

// Ops that the device was given as one: each has the part of their time that it has of their elements.
void StepRecorder::ShareTimes(size_t first, size_t last) {
  std::vector<double> upto = {0};
  for (size_t i = first; i <= last; ++i) {
    const Op& op = program_.op(record_.samples[i].op);
    upto.push_back(upto.back() + static_cast<double>(program_.units[op.units.front()].numel));
  }
  const int64_t begin = record_.samples[first].begin_ns;
  const auto time = static_cast<double>(record_.samples[last].end_ns - begin);
  for (size_t i = first; i <= last; ++i) {
    record_.samples[i].begin_ns = begin + static_cast<int64_t>(time * upto[i - first] / upto.back());
    record_.samples[i].end_ns = begin + static_cast<int64_t>(time * upto[i - first + 1] / upto.back());
  }
}

void StepRecorder::BeginPhase(const Plan& plan, const PlanVariant* variant, size_t micro_batch) {
  if (arena_.on()) arena_.BeginPhase(plan, variant, micro_batch);
  run_ = static_cast<int32_t>(record_.phases.size());
  record_.phases.push_back(plan.phase);
  FindLiveBytes(*plan.phase);
  MemoryScope::TakePeak();
  now_ = NanosNow();
}

void StepRecorder::FindLiveBytes(const Phase& phase) {
  live_.clear();
  if (!arena_.on()) return;
  const Result<PhaseLiveness> liveness = ComputeLiveness(program_, phase);
  if (!liveness.ok()) return;
  for (size_t i = 0; i < phase.ops.size(); ++i) live_.emplace_back(liveness->live_before[i], liveness->live_before[i]);
  for (const StorageLife& life : liveness->storages) {
    if (life.first >= 0) live_[life.first].second += life.bytes;
  }
  const int64_t through = through_.empty() ? 0 : through_[run_];
  for (size_t i = 0; i < live_.size(); ++i) {
    live_[i].first += through;
    live_[i].second += through + arena_.WorkspaceOf(&phase, i);
  }
}

Status StepRecorder::Before(const Instruction& at) {
  OpSample& sample = record_.samples.emplace_back();
  sample.op = at.op;
  sample.run = run_;
  sample.begin_ns = now_;
  sample.live_before =
      times_ ? TakeDeviceUse(device_).live - live_before_ : MemoryScope::Use().live_bytes - live_before_;
  return Ok{};
}

void StepRecorder::Run(const Instruction& at, Frame& frame) {
  OpSample& sample = record_.samples.back();
  if (times_) return RunOnDevice(at, frame, sample);
  const bool serial = record_.mode == TraceMode::kSerial;
  const Op& op = program_.op(at.op);
  if (serial && IsStart(op) && !IsAlongStages(std::string(AxisOf(program_, op)))) return RunAlone(at, frame, sample);
  const size_t transfers = frame.transfers.size();
  const int64_t cpu = serial ? NanosOf(CLOCK_THREAD_CPUTIME_ID) : 0;
  at.run(at.data, frame);
  if (serial) sample.cpu_ns = NanosOf(CLOCK_THREAD_CPUTIME_ID) - cpu;
  RememberTransfers(at, frame, transfers);
}

bool StepRecorder::After(const Plan& plan, const Instruction& at, const Frame& frame) {
  if (arena_.learning()) arena_.After(plan, at, frame);
  OpSample& sample = record_.samples.back();
  const int64_t peak = times_ ? TakeDeviceUse(device_).peak : MemoryScope::TakePeak();
  if (times_) device_peak_bytes_ = std::max(device_peak_bytes_, peak);
  sample.peak_bytes = peak - live_before_;
  if (!live_.empty()) {
    sample.live_before += live_[at.index].first;
    sample.peak_bytes += live_[at.index].second;
  }
  return true;
}

Status StepRecorder::Ended(const Instruction&) {
  record_.samples.back().end_ns = now_ = NanosNow();
  return Ok{};
}

// A lane's op begins, at the earliest, when the compute stream had come to it.
void StepRecorder::RunOnDevice(const Instruction& at, Frame& frame, OpSample& sample) {
  const bool serial = record_.mode == TraceMode::kSerial;
  const Op& op = program_.op(at.op);
  const size_t first = frame.transfers.size();
  const bool alone = serial && IsStart(op) && TraitsOf(op).exchange != Exchange::kNone &&
                     !IsAlongStages(std::string(AxisOf(program_, op)));
  if (alone) MeetPeers(op, frame);
  Marks marks;
  marks.with_next = at.with_next;
  marks.begin = times_->Mark();
  const int64_t cpu = NanosOf(CLOCK_THREAD_CPUTIME_ID);
  at.run(at.data, frame);
  RememberTransfers(at, frame, first);
  for (size_t i = first; alone && i < frame.transfers.size(); ++i) FinishTransfer(frame.transfers[i]);
  sample.cpu_ns = NanosOf(CLOCK_THREAD_CPUTIME_ID) - cpu;
  if (serial) lanes_->Join();
  const bool aside = !serial && HasOwnStream(op, device_);
  marks.end = aside ? times_->MarkOn(lanes_->For(LaneOf(op))) : times_->Mark();
  marks_.push_back(marks);
}

// The transfers that an op has just started: those of the frame from `first` on.
void StepRecorder::RememberTransfers(const Instruction& at, const Frame& frame, size_t first) {
  for (size_t i = first; i < frame.transfers.size(); ++i) {
    TransferSample& sample = record_.transfers.emplace_back();
    sample.op = at.op;
    sample.run = run_;
    sample.comm = frame.transfers[i].comm;
    sample.ticket = frame.transfers[i].ticket;
  }
}

void StepRecorder::MeetPeers(const Op& op, const Frame& frame) {
  for (const auto& [axis, comm] : comms_) {
    if (comm->spec().channel >= 0 || IsAlongStages(axis)) continue;
    const at::Tensor meeting = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(frame.device));
    const Result<Ticket> ticket = comm->StartAllReduce(meeting, "meeting before " + op.name);
    if (!ticket.ok()) TORCH_CHECK(false, ticket.error().ToString());
    const Status status = comm->Wait(*ticket);
    if (!status.ok()) TORCH_CHECK(false, status.error().ToString());
  }
}

void StepRecorder::FinishTransfer(Transfer& transfer) {
  const Status status = transfer.comm->Wait(std::exchange(transfer.ticket, 0));
  if (!status.ok()) TORCH_CHECK(false, status.error().ToString());
  if (transfer.landed) std::exchange(transfer.landed, {})();
}

void StepRecorder::RunAlone(const Instruction& at, Frame& frame, OpSample& sample) {
  MeetPeers(program_.op(at.op), frame);
  const size_t first = frame.transfers.size();
  sample.begin_ns = NanosNow();
  const int64_t cpu = NanosOf(CLOCK_PROCESS_CPUTIME_ID);
  at.run(at.data, frame);
  RememberTransfers(at, frame, first);
  for (size_t i = first; i < frame.transfers.size(); ++i) FinishTransfer(frame.transfers[i]);
  sample.cpu_ns = NanosOf(CLOCK_PROCESS_CPUTIME_ID) - cpu;
}

}  // namespace interlace
