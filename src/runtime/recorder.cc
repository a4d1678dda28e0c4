#include "runtime/recorder.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "ir/op_table.h"
#include "runtime/debug.h"

namespace interlace {

namespace {

constexpr int64_t kShortestNs = 1000;  // of an op of ours that computes nothing

void Describe(const Program& program, const Op& op, TraceEvent& event) {
  event.op = op.name;
  event.part = kPartNames[static_cast<size_t>(op.part)];
  event.module = ModuleOf(program, op);
  for (UnitId unit : op.units) event.detail += (event.detail.empty() ? "u" : " u") + std::to_string(unit);
}

int64_t ElementsOf(const Program& program, ValueId id) {
  const Type& type = program.value(id).type;
  const Result<int64_t> bytes = program.StorageBytes(type);
  return bytes.ok() ? *bytes / DTypeBytes(type.dtype) : 0;
}

bool IsBookkeeping(const Op& op) {
  return TakesNoTime(op) && !IsWait(op);
}

// A transfer as its lane shows it: it begins when it was posted and the one before it on that lane has ended.
TraceEvent EventOf(const Program& program, const TransferSample& sample, int32_t rank, int64_t origin_ns,
                   std::array<int64_t, kTraceLanes>& lane_end) {
  const Op& op = program.op(sample.op);
  TraceEvent event;
  event.rank = rank;
  event.lane = static_cast<TraceLane>(LaneOf(op));
  event.axis = std::string(ActivationAxisOf(program, op));
  int64_t& end = lane_end[static_cast<size_t>(event.lane)];
  if (event.lane == TraceLane::kP2P) end = 0;  // messages of two directions, and to two ranks, are independent
  event.start_ns = std::max(sample.times.begin_ns - origin_ns, end);
  end = std::max(sample.times.end_ns - origin_ns, event.start_ns);
  event.duration_ns = end - event.start_ns;
  event.bytes = sample.times.bytes;
  Describe(program, op, event);
  ForEachOperand(op, [&](ValueId id) {
    event.in_elements += ElementsOf(program, id);
    event.dtype = std::string(DTypeName(program.value(id).type.dtype));
  });
  for (ValueId id : op.results) {
    if (id != kNone) event.out_elements += ElementsOf(program, id);
  }
  event.group_size = program.AxisSize(AxisOf(program, op));
  return event;
}

}  // namespace

Timeline TimelineOf(const Program& program, const StepRecord& record, int32_t rank, int64_t world_size,
                    int64_t origin_ns) {
  Timeline out;
  out.producer = "measured";
  out.backend = "tcp";
  for (const TransferSample& sample : record.transfers) {
    if (sample.comm != nullptr) out.backend = sample.comm->spec().backend;
  }
  out.world_size = world_size;
  std::array<int64_t, kTraceLanes> lane_end{};
  std::map<std::pair<int32_t, OpId>, int32_t> event_of;  // run and op of a start → its event
  for (const TransferSample& sample : record.transfers) {
    event_of[{sample.run, sample.op}] = static_cast<int32_t>(out.events.size());
    out.events.push_back(EventOf(program, sample, rank, origin_ns, lane_end));
  }
  TraceCounterTrack& memory = out.counters.emplace_back();
  memory.name = kLiveBytes;
  std::map<ValueId, int32_t> in_flight;  // value → event of the transfer that makes it
  int32_t run = 0;
  double last_bytes = -1;
  for (const OpSample& sample : record.samples) {
    if (sample.run != run) {
      // What the phase before gave is what this one takes.
      const Phase &ended = *record.phases[run], &next = *record.phases[sample.run];
      std::map<ValueId, int32_t> taken;
      for (size_t i = 0; i < next.takes.size() && i < ended.gives.size(); ++i) {
        if (const auto found = in_flight.find(ended.gives[i]); found != in_flight.end())
          taken[next.takes[i]] = found->second;
      }
      in_flight = std::move(taken);
      run = sample.run;
    }
    const Op& op = program.op(sample.op);
    const double bytes = static_cast<double>(record.persistent_bytes + sample.peak_bytes);
    if (bytes != last_bytes) memory.samples.push_back({rank, sample.begin_ns - origin_ns, bytes});
    last_bytes = bytes;
    if (const auto found = event_of.find({sample.run, sample.op}); found != event_of.end()) {
      for (ValueId id : op.results) {
        if (id != kNone) in_flight[id] = found->second;
      }
    }
    if (IsBookkeeping(op) && sample.end_ns - sample.begin_ns < kShortestNs) continue;
    const auto index = static_cast<int32_t>(out.events.size());
    TraceEvent& event = out.events.emplace_back();
    event.rank = rank;
    event.start_ns = sample.begin_ns - origin_ns;
    event.duration_ns = sample.end_ns - sample.begin_ns;
    event.wait = IsWait(op);
    Describe(program, op, event);
    if (IsStart(op)) event.op = "issue " + op.name;  // the transfer itself is on its own lane
    if (!event.wait) continue;
    std::vector<int32_t> arrows;
    ForEachOperand(op, [&](ValueId id) {
      if (const auto found = in_flight.find(id); found != in_flight.end()) arrows.push_back(found->second);
    });
    std::sort(arrows.begin(), arrows.end());
    arrows.erase(std::unique(arrows.begin(), arrows.end()), arrows.end());
    for (int32_t transfer : arrows) {
      // An arrow needs its two ends in order; the stamps come from two threads.
      TraceEvent &from = out.events[transfer], &to = out.events[index];
      if (from.start_ns <= to.start_ns + to.duration_ns) out.flows.push_back({transfer, index});
    }
  }
  return out;
}

}  // namespace interlace
