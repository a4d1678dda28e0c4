#include "trace/chrome_trace.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "trace/json.h"

namespace interlace {
namespace {

constexpr int kStreams[kTraceLanes] = {7, 16, 17, 18, 19, 20, 21, 1};  // by lane; the host is a thread, not a stream
constexpr int kMemoryThread = 0;
constexpr int kAxisStreams = 64;  // from an axis' streams to the next one's

struct CollectiveName {
  std::string_view op, kernel, record;
};
// The op of a program, the kernel's name on a device, the name PyTorch records for the call.
constexpr CollectiveName kCollectives[] = {
    {"gather.start", "ncclDevKernel_AllGather_RING", "_allgather_base"},
    {"reduce.start", "ncclDevKernel_ReduceScatter_Sum", "_reduce_scatter_base"},
    {"all_gather.start", "ncclDevKernel_AllGather_RING", "_allgather_base"},
    {"reduce_scatter.start", "ncclDevKernel_ReduceScatter_Sum", "_reduce_scatter_base"},
    {"all_reduce.start", "ncclDevKernel_AllReduce_Sum", "allreduce"},
    {"broadcast.start", "ncclDevKernel_Broadcast_RING", "broadcast"},
    {"all_to_all.start", "ncclDevKernel_SendRecv(all_to_all)", "all_to_allv"},
    {"send.start", "ncclDevKernel_SendRecv(send)", "send"},
    {"recv.start", "ncclDevKernel_SendRecv(recv)", "recv"},
};

const CollectiveName* FindCollective(std::string_view op) {
  for (const CollectiveName& c : kCollectives) {
    if (c.op == op) return &c;
  }
  return nullptr;
}

std::string_view TorchDType(std::string_view dtype) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"f64", "Double"}, {"f32", "Float"}, {"f16", "Half"}, {"bf16", "BFloat16"},
      {"i64", "Long"},   {"i32", "Int"},   {"u8", "Byte"}};
  for (auto [ours, theirs] : kNames) {
    if (ours == dtype) return theirs;
  }
  return dtype;
}

// "aten.mm.out" → "aten::mm".
std::string OperatorName(std::string_view op) {
  std::string out(op.substr(0, op.find('.', op.find('.') + 1)));
  size_t dot = out.find('.');
  if (dot != std::string::npos && op.starts_with("aten.")) out.replace(dot, 1, "::");
  return out;
}

std::string_view Category(const TraceEvent& event) {
  if (event.wait) return "cuda_sync";
  switch (event.lane) {
    case TraceLane::kHost:
      return event.op.starts_with("update.") ? "cpu_op" : "cuda_runtime";
    case TraceLane::kH2D:
    case TraceLane::kD2H:
    case TraceLane::kFile:
      return "gpu_memcpy";
    default:
      return "kernel";
  }
}

std::string EventName(const TraceEvent& event) {
  if (event.wait) return "Stream Wait Event";
  switch (event.lane) {
    case TraceLane::kHost:
      return event.op.starts_with("update.") ? OperatorName(event.op) : "cudaLaunchKernel";
    case TraceLane::kH2D:
      return "Memcpy HtoD (Pinned -> Device)";
    case TraceLane::kD2H:
      return "Memcpy DtoH (Device -> Pinned)";
    case TraceLane::kFile:
      return "Memcpy HtoH (File)";
    default:
      break;
  }
  if (const CollectiveName* c = FindCollective(event.op)) return std::string(c->kernel);
  return OperatorName(event.op);
}

void WriteMetadata(JsonWriter& w, std::string_view what, int32_t pid, int tid, std::string_view key,
                   std::string_view text) {
  w.NewLine().BeginObject().Field("ph", "M").Field("name", what).Field("pid", pid).Field("tid", tid).Field("ts", 0);
  w.Key("args").BeginObject().Field(key, text).EndObject().EndObject();
}

// By event: its stream. Messages to several ranks go at once, where transfers of other lanes follow one another: they
// have as many streams, from the lane's own on, as there are at the same time.
std::vector<int> StreamsOf(const Timeline& timeline) {
  std::vector<int> out(timeline.events.size());
  std::map<std::string_view, int> axes;              // that have lanes of their own, counted from 1
  std::vector<std::pair<int64_t, size_t>> messages;  // by their starts
  for (size_t i = 0; i < out.size(); ++i) {
    const std::string& axis = timeline.events[i].axis;
    const int place = axis.empty() ? 0 : axes.emplace(axis, static_cast<int>(axes.size()) + 1).first->second;
    out[i] = StreamOf(timeline.events[i].lane) + kAxisStreams * place;
    if (timeline.events[i].lane == TraceLane::kP2P) messages.emplace_back(timeline.events[i].start_ns, i);
  }
  std::sort(messages.begin(), messages.end());
  std::map<int32_t, std::vector<int64_t>> ends;  // by rank and stream: of the last message there
  for (const auto& [start, i] : messages) {
    const TraceEvent& e = timeline.events[i];
    std::vector<int64_t>& of_rank = ends[e.rank];
    auto free = std::find_if(of_rank.begin(), of_rank.end(), [&](int64_t end) { return end <= e.start_ns; });
    if (free == of_rank.end()) free = of_rank.insert(free, 0);
    *free = e.start_ns + e.duration_ns;
    out[i] += static_cast<int>(free - of_rank.begin());
  }
  return out;
}

void WriteEvent(JsonWriter& w, const TraceEvent& e, int stream, int64_t correlation) {
  w.NewLine().BeginObject().Field("ph", "X").Field("cat", Category(e)).Field("name", EventName(e));
  w.Field("pid", e.rank).Field("tid", stream).Key("ts").Micros(e.start_ns).Key("dur").Micros(e.duration_ns);
  w.Key("args").BeginObject().Field("correlation", correlation).Field("External id", correlation);
  if (e.lane != TraceLane::kHost) w.Field("device", e.rank).Field("stream", stream);
  w.Field("op", e.op);
  if (!e.detail.empty()) w.Field("detail", e.detail);
  if (!e.module.empty()) w.Field("module", e.module);
  if (!e.part.empty()) w.Field("part", e.part);
  if (!e.source.empty()) w.Field("source", e.source);
  const CollectiveName* collective = e.wait || e.lane == TraceLane::kHost ? nullptr : FindCollective(e.op);
  if (collective != nullptr) {
    w.Fields("Collective name", collective->record, "In msg nelems", e.in_elements, "Out msg nelems", e.out_elements);
    w.Fields("Group size", e.group_size, "dtype", TorchDType(e.dtype), "Process Group Name", "default_pg");
  }
  if (e.bytes > 0) {
    w.Field("bytes", e.bytes);
    if (e.duration_ns > 0 && collective == nullptr) {
      w.Field("memory bandwidth (GB/s)", static_cast<double>(e.bytes) / static_cast<double>(e.duration_ns));
    }
  }
  w.EndObject().EndObject();
}

void WriteFlowEnd(JsonWriter& w, const char* phase, std::string_view category, int64_t id, const TraceEvent& at,
                  int stream, int64_t time_ns) {
  w.NewLine().BeginObject().Field("ph", phase).Field("id", id).Field("cat", category).Field("name", category);
  w.Field("pid", at.rank).Field("tid", stream).Key("ts").Micros(time_ns);
  if (phase[0] == 'f') w.Field("bp", "e");
  w.EndObject();
}

}  // namespace

int StreamOf(TraceLane lane) {
  return kStreams[static_cast<int>(lane)];
}

std::string WriteChromeTrace(const Timeline& timeline, int32_t rank) {
  auto shown = [&](int32_t r) { return rank < 0 || r == rank; };
  JsonWriter w;
  w.BeginObject().Field("schemaVersion", 1).Field("displayTimeUnit", "ms").Field("producer", timeline.producer);
  w.Key("distributedInfo").BeginObject().Field("backend", timeline.backend).Field("rank", std::max(rank, 0));
  w.Field("world_size", timeline.world_size).EndObject();
  const std::vector<int> streams = StreamsOf(timeline);
  std::map<std::tuple<int32_t, TraceLane, int>, std::string_view> lanes;  // by rank, lane and stream: the axis
  std::set<int32_t> ranks;
  for (size_t i = 0; i < streams.size(); ++i) {
    const TraceEvent& e = timeline.events[i];
    if (!shown(e.rank)) continue;
    lanes.emplace(std::tuple{e.rank, e.lane, streams[i]}, e.axis);
    ranks.insert(e.rank);
  }
  w.Key("deviceProperties").BeginArray();
  for (int32_t r : ranks) {
    w.BeginObject().Fields("id", r, "name", timeline.device_name, "totalGlobalMem", timeline.device_memory_bytes);
    w.EndObject();
  }
  w.EndArray().Key("traceEvents").BeginArray();
  for (int32_t r : ranks) {
    const bool named = static_cast<size_t>(r) < timeline.rank_names.size();
    WriteMetadata(w, "process_name", r, 0, "name",
                  named ? timeline.rank_names[static_cast<size_t>(r)] : "rank " + std::to_string(r));
    WriteMetadata(w, "process_labels", r, 0, "labels", timeline.producer);
  }
  for (const auto& [key, axis] : lanes) {
    const auto [r, lane, stream] = key;
    std::string name = lane == TraceLane::kHost ? "host thread" : "stream " + std::to_string(stream) + " ";
    if (lane != TraceLane::kHost) name.append(kTraceLaneNames[static_cast<int>(lane)]);
    if (!axis.empty()) name.append(" ").append(axis);
    WriteMetadata(w, "thread_name", r, stream, "name", name);
  }
  // A device event shares the correlation id of its launch.
  std::vector<int64_t> correlation(timeline.events.size());
  for (size_t i = 0; i < correlation.size(); ++i) correlation[i] = static_cast<int64_t>(i) + 1;
  for (const TraceFlow& flow : timeline.flows) {
    if (timeline.events[flow.from].lane == TraceLane::kHost) correlation[flow.to] = correlation[flow.from];
  }
  for (size_t i = 0; i < timeline.events.size(); ++i) {
    if (shown(timeline.events[i].rank)) WriteEvent(w, timeline.events[i], streams[i], correlation[i]);
  }
  for (size_t i = 0; i < timeline.flows.size(); ++i) {
    const TraceFlow& flow = timeline.flows[i];
    const TraceEvent &from = timeline.events[flow.from], &to = timeline.events[flow.to];
    if (!shown(from.rank) || !shown(to.rank)) continue;
    bool launch = from.lane == TraceLane::kHost;
    std::string_view category = launch ? "ac2g" : "wait";
    WriteFlowEnd(w, "s", category, static_cast<int64_t>(i) + 1, from, streams[flow.from], from.start_ns);
    WriteFlowEnd(w, "f", category, static_cast<int64_t>(i) + 1, to, streams[flow.to],
                 launch ? to.start_ns : to.start_ns + to.duration_ns);
  }
  for (const TraceCounterTrack& track : timeline.counters) {
    for (const TraceCounter& sample : track.samples) {
      if (!shown(sample.rank)) continue;
      w.NewLine().BeginObject().Fields("ph", "C", "name", track.name, "pid", sample.rank, "tid", kMemoryThread);
      w.Key("ts").Micros(sample.time_ns).Key("args").BeginObject().Field("value", sample.value).EndObject().EndObject();
    }
  }
  w.EndArray().EndObject();
  std::string out = w.Take();
  out.push_back('\n');
  return out;
}

}  // namespace interlace
