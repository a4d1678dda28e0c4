// runtime_trace.cc — what the executor recorded of a step, as a trace and as the raw times that profiles are made of.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/suggest.h"
#include "bindings/runtime.h"
#include "cost/cluster.h"
#include "cost/collective_model.h"
#include "cost/cost_model.h"
#include "cost/signature.h"
#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "runtime/recorder.h"
#include "trace/chrome_trace.h"

namespace py = pybind11;

namespace interlace {

namespace {

// Here what is wrong is what was given: a ValueError.
template <typename T>
T Checked(Result<T> result) {
  return Unwrap<std::invalid_argument>(std::move(result));
}

TraceMode ModeOf(const std::string& name) {
  if (name == "off") return TraceMode::kOff;
  if (name == "on") return TraceMode::kOn;
  if (name == "serial") return TraceMode::kSerial;
  throw std::invalid_argument("unknown trace mode \"" + name + "\"" + DidYouMean(name, {"off", "on", "serial"}));
}

// Bytes as the cost model counts them: of a gather its results, of every other collective what goes in.
int64_t CollectiveBytes(const Program& program, const Op& op) {
  int64_t bytes = 0;
  const auto add = [&](ValueId id) {
    bytes += id == kNone ? 0 : Checked(program.StorageBytes(program.value(id).type));
  };
  if (TraitsOf(op).exchange == Exchange::kGather) {
    for (ValueId id : op.results) add(id);
  } else {
    ForEachOperand(op, add);
  }
  return bytes;
}

// Bytes of the storages that the op begins.
int64_t ResultBytes(const Program& program, const Op& op) {
  int64_t bytes = 0;
  for (ValueId id : op.results) {
    if (id != kNone && program.value(id).root == id) bytes += Checked(program.StorageBytes(program.value(id).type));
  }
  return bytes;
}

Timeline LastStep(const Executor& self, int32_t rank, int64_t world_size, int64_t origin_ns) {
  const StepRecord& record = self.record();
  if (record.mode == TraceMode::kOff)
    throw std::invalid_argument("no step was recorded: call set_trace(\"on\") before step()");
  return TimelineOf(self.program(), record, rank, world_size, origin_ns == 0 ? record.begin_ns : origin_ns);
}

// A timeline as values that ranks can send one another: backend, world size, events, flows, samples of live bytes.
using EventValues = std::tuple<int32_t, int32_t, std::string, bool, int64_t, int64_t, std::string, std::string,
                               std::string, std::string, int64_t, int64_t, int64_t, std::string, int64_t>;
using TimelineValues =
    std::tuple<std::string, int64_t, std::vector<EventValues>, std::vector<std::pair<int32_t, int32_t>>,
               std::vector<std::tuple<int32_t, int64_t, double>>>;

TimelineValues ValuesOf(const Timeline& timeline) {
  TimelineValues out;
  auto& [backend, world_size, events, flows, live] = out;
  backend = timeline.backend, world_size = timeline.world_size;
  for (const TraceEvent& e : timeline.events) {
    events.emplace_back(e.rank, static_cast<int32_t>(e.lane), e.axis, e.wait, e.start_ns, e.duration_ns, e.op, e.detail,
                        e.module, e.part, e.bytes, e.in_elements, e.out_elements, e.dtype, e.group_size);
  }
  for (const TraceFlow& flow : timeline.flows) flows.emplace_back(flow.from, flow.to);
  for (const TraceCounter& c : timeline.counters[0].samples) live.emplace_back(c.rank, c.time_ns, c.value);
  return out;
}

// All ranks' memory is one track: a reader tells them apart by the process.
std::string MergedTrace(const std::vector<TimelineValues>& ranks) {
  Timeline out;
  out.producer = "measured";
  TraceCounterTrack& memory = out.counters.emplace_back();
  memory.name = kLiveBytes;
  for (const auto& [backend, world_size, events, flows, live] : ranks) {
    out.backend = backend, out.world_size = world_size;
    const auto base = static_cast<int32_t>(out.events.size()), count = static_cast<int32_t>(events.size());
    for (const auto& [rank, lane, axis, wait, start, duration, op, detail, module, part, bytes, in, to, dtype, group] :
         events) {
      if (lane < 0 || lane >= kTraceLanes) throw std::invalid_argument("no lane " + std::to_string(lane));
      out.events.push_back({rank, static_cast<TraceLane>(lane), axis, wait, start, duration, op, detail, module, part,
                            "", bytes, in, to, dtype, group});
    }
    for (const auto& [from, to] : flows) {
      if (std::min(from, to) < 0 || std::max(from, to) >= count)
        throw std::invalid_argument("a flow points at no event");
      out.flows.push_back({base + from, base + to});
    }
    for (const auto& [rank, time, value] : live) memory.samples.push_back({rank, time, value});
  }
  return WriteChromeTrace(out);
}

// What profiles know of an op: its key ("" for what costs nothing or moves data), its name (of a collective that of its
// kind: all_gather is a gather), the bytes of its results, and of a collective its bytes and units; of what goes to or
// comes from the tier, where its bytes are copied: "moves".
py::dict FactsOf(const Program& program, const Op& op) {
  const bool starts = IsStart(op), moves = MoveOf(op) != nullptr;
  std::string key;
  if (!starts && !TakesNoTime(op)) {
    const Status status = AppendProfileKey(program, op, key);
    if (!status.ok()) throw std::invalid_argument(status.error().ToString());
  }
  const Exchange kind = starts ? TraitsOf(op).exchange : Exchange::kNone;
  const std::string name = kind != Exchange::kNone ? std::string(ExchangeName(kind)) + ".start" : op.name;
  const auto [axes, replicas] = RanksOf(program, op);
  return py::dict(py::arg("key") = key, py::arg("name") = name, py::arg("lane") = std::string(LaneName(LaneOf(op))),
                  py::arg("result_bytes") = ResultBytes(program, op),
                  py::arg("bytes") = starts && !moves ? CollectiveBytes(program, op) : 0,
                  py::arg("moves") = starts && moves && !IsClean(op) && !IsFresh(op), py::arg("axis") = axes,
                  py::arg("replicas") = replicas, py::arg("ranks") = RanksWord(program.mesh, axes, replicas),
                  py::arg("units") = std::max<int64_t>(static_cast<int64_t>(op.results.size()), 1),
                  py::arg("text") = PrintOp(program, op));
}

// The facts of every op of a program, by op id.
py::dict PlanDict(const std::string& text) {
  Program program = Checked(Parse(text));
  program = Checked(Bind(program, FirstRank(program.mesh)));
  py::dict ops;
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) ops[py::int_(id)] = FactsOf(program, program.op(id));
  }
  return ops;
}

// The cost model's microseconds for the ops of a program whose keys a profile lacks, on a preset or a cluster file.
py::dict Estimates(const std::string& text, const std::string& profile, const std::string& cluster) {
  const Program program = Checked(Parse(text));
  const ProfileTable table = Checked(ParseProfile(profile, "profile"));
  CostModel model = Checked(CostModel::Create(program, Checked(LoadCluster(cluster, cluster)), &table));
  py::dict found;
  ForEachOp(program, [&](const Op& op) {
    const OpCost cost = Checked(model.Cost(op));
    if (cost.source != OpCost::Source::kEstimated || cost.resource != Resource::kCompute) return;
    std::string key;
    if (AppendProfileKey(program, op, key).ok()) found[py::str(key)] = static_cast<double>(cost.work_ps) / 1e6;
  });
  return found;
}

// Per executed op: (op, run, seconds, processor seconds, live bytes before, peak bytes); per op: its profile key, name,
// result bytes; per transfer: (op, run, received bytes, begin to end in seconds).
py::dict RecordDict(const Executor& self) {
  const Program& program = self.program();
  const StepRecord& record = self.record();
  py::list samples, transfers;
  py::dict ops;
  for (const OpSample& s : record.samples) {
    samples.append(py::make_tuple(s.op, s.run, static_cast<double>(s.end_ns - s.begin_ns) / 1e9,
                                  static_cast<double>(s.cpu_ns) / 1e9, s.live_before, s.peak_bytes));
    const py::int_ id(s.op);
    if (ops.contains(id)) continue;
    ops[id] = FactsOf(program, program.op(s.op));
  }
  for (const TransferSample& t : record.transfers) {
    transfers.append(
        py::make_tuple(t.op, t.run, t.times.bytes, static_cast<double>(t.times.end_ns - t.times.begin_ns) / 1e9));
  }
  return py::dict(py::arg("samples") = samples, py::arg("ops") = ops, py::arg("transfers") = transfers,
                  py::arg("seconds") = static_cast<double>(record.end_ns - record.begin_ns) / 1e9,
                  py::arg("begin_ns") = record.begin_ns, py::arg("persistent_bytes") = record.persistent_bytes);
}

// (run, op, begin, end) of every op of the last recorded step, and of every transfer; nanoseconds from `origin_ns` on
// the clock.
py::tuple TimesOf(const Executor& self, int64_t origin_ns) {
  const StepRecord& record = self.record();
  if (record.mode == TraceMode::kOff)
    throw std::invalid_argument("no step was recorded: call set_trace(\"on\") before step()");
  const auto since = [origin_ns](int64_t ns) { return std::max<int64_t>(ns - origin_ns, 0); };
  py::list ops, transfers;
  for (const OpSample& s : record.samples) ops.append(py::make_tuple(s.run, s.op, since(s.begin_ns), since(s.end_ns)));
  for (const TransferSample& t : record.transfers)
    transfers.append(py::make_tuple(t.run, t.op, since(t.times.begin_ns), since(t.times.end_ns)));
  return py::make_tuple(ops, transfers);
}

}  // namespace

// Called by the module's own initialization (runtime.cc).
void BindTrace(py::module_& module, py::class_<Executor>& executor) {
  executor
      .def(
          "set_trace", [](Executor& self, const std::string& mode) { self.SetTrace(ModeOf(mode)); }, py::arg("mode"),
          "on: every later step is recorded; serial: and collectives are completed one by one, for profiles; off.")
      .def(
          "trace", [](const Executor& self) { return WriteChromeTrace(LastStep(self, 0, 1, 0)); },
          "The last recorded step as a Chrome trace.")
      .def(
          "timeline",
          [](const Executor& self, int32_t rank, int64_t world_size, int64_t origin_ns) {
            return ValuesOf(LastStep(self, rank, world_size, origin_ns));
          },
          py::arg("rank"), py::arg("world_size"), py::arg("origin_ns"),
          "The last recorded step, for merge_traces. origin_ns: the clock's reading that becomes zero.")
      .def("times", &TimesOf, py::arg("origin_ns"), "Begins and ends of the last recorded step, for _core.Measured.")
      .def("record", &RecordDict, "The raw times of the last recorded step, for profiles.");
  module.def("merge_traces", &MergedTrace, py::arg("timelines"), "One Chrome trace from the timelines of all ranks.");
  module.def("profile_plan", &PlanDict, py::arg("text"), "What `record` says of ops, for every op of a program text.");
  module.def("estimate_ops", &Estimates, py::arg("text"), py::arg("profile"), py::arg("cluster"),
             "Microseconds by profile key of the ops that a profile lacks.");
  module.def(
      "clock_ns", [] { return NanosOf(CLOCK_MONOTONIC); }, "The clock of recorded steps.");
}

}  // namespace interlace
