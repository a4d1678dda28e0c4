#include "runtime/timeline_json.h"

#include <algorithm>
#include <utility>

#include "trace/json.h"

namespace interlace {

namespace {

// Reads one rank's part behind what is already there.
class Reader {
 public:
  explicit Reader(Timeline& out) : out_(out), base_(static_cast<int32_t>(out.events.size())) {}

  Status Run(const Json& root) {
    INTERLACE_TRY(Text(root, "producer", out_.producer));
    INTERLACE_TRY(Text(root, "backend", out_.backend));
    INTERLACE_TRY(Number(root, "world_size", out_.world_size));
    INTERLACE_TRY(Text(root, "device_name", out_.device_name));
    INTERLACE_TRY(Number(root, "device_memory_bytes", out_.device_memory_bytes));
    INTERLACE_TRY(Each(root, "events", [&](const Json& json) { return Event(json); }));
    INTERLACE_TRY(Each(root, "flows", [&](const Json& json) -> Status {
      TraceFlow& flow = out_.flows.emplace_back();
      INTERLACE_TRY(Number(json, "from", flow.from));
      INTERLACE_TRY(Number(json, "to", flow.to));
      flow.from += base_, flow.to += base_;
      const auto count = static_cast<int32_t>(out_.events.size());
      if (flow.from < base_ || flow.from >= count || flow.to < base_ || flow.to >= count)
        return MakeError("a flow points at no event");
      return Ok{};
    }));
    return Each(root, "counters", [&](const Json& json) -> Status {
      TraceCounterTrack& track = out_.counters.emplace_back();
      INTERLACE_TRY(Text(json, "name", track.name));
      return Each(json, "samples", [&](const Json& one) -> Status {
        TraceCounter& sample = track.samples.emplace_back();
        INTERLACE_TRY(Number(one, "rank", sample.rank));
        INTERLACE_TRY(Number(one, "time_ns", sample.time_ns));
        return Number(one, "value", sample.value);
      });
    });
  }

 private:
  Status Event(const Json& json) {
    TraceEvent& e = out_.events.emplace_back();
    std::string lane;
    INTERLACE_TRY(Text(json, "lane", lane));
    const auto known = std::find(kTraceLaneNames.begin(), kTraceLaneNames.end(), lane);
    if (known == kTraceLaneNames.end()) return MakeError("no lane '", lane, "'");
    e.lane = static_cast<TraceLane>(known - kTraceLaneNames.begin());
    const Json* wait = json.Find("wait");
    e.wait = wait != nullptr && wait->boolean;
    INTERLACE_TRY(Number(json, "rank", e.rank));
    INTERLACE_TRY(Number(json, "start_ns", e.start_ns));
    INTERLACE_TRY(Number(json, "duration_ns", e.duration_ns));
    INTERLACE_TRY(Text(json, "axis", e.axis));
    INTERLACE_TRY(Text(json, "op", e.op));
    INTERLACE_TRY(Text(json, "detail", e.detail));
    INTERLACE_TRY(Text(json, "module", e.module));
    INTERLACE_TRY(Text(json, "part", e.part));
    INTERLACE_TRY(Number(json, "bytes", e.bytes));
    INTERLACE_TRY(Number(json, "in_elements", e.in_elements));
    INTERLACE_TRY(Number(json, "out_elements", e.out_elements));
    INTERLACE_TRY(Text(json, "dtype", e.dtype));
    return Number(json, "group_size", e.group_size);
  }

  static Status Text(const Json& json, std::string_view key, std::string& to) {
    const Json* found = json.Find(key);
    if (found == nullptr || !found->is(Json::Kind::kString)) return MakeError("no text '", key, "'");
    to = found->text;
    return Ok{};
  }
  template <typename T>
  static Status Number(const Json& json, std::string_view key, T& to) {
    const Json* found = json.Find(key);
    if (found == nullptr || !found->is(Json::Kind::kNumber) || !(std::abs(found->number) < 9e15))
      return MakeError("no number '", key, "'");
    to = static_cast<T>(found->number);
    return Ok{};
  }
  template <typename F>
  static Status Each(const Json& json, std::string_view key, F&& f) {
    const Json* found = json.Find(key);
    if (found == nullptr || !found->is(Json::Kind::kArray)) return MakeError("no list '", key, "'");
    for (const Json& item : found->items) INTERLACE_TRY(f(item));
    return Ok{};
  }

  Timeline& out_;
  const int32_t base_;
};

}  // namespace

std::string WriteTimelineJson(const Timeline& timeline) {
  JsonWriter w;
  w.BeginObject().Field("producer", timeline.producer).Field("backend", timeline.backend);
  w.Field("world_size", timeline.world_size).Field("device_name", timeline.device_name);
  w.Field("device_memory_bytes", timeline.device_memory_bytes).Key("events").BeginArray();
  for (const TraceEvent& e : timeline.events) {
    w.BeginObject().Field("rank", e.rank).Field("lane", kTraceLaneNames[static_cast<size_t>(e.lane)]);
    w.Fields("axis", e.axis, "wait", e.wait, "start_ns", e.start_ns, "duration_ns", e.duration_ns, "op", e.op);
    w.Field("detail", e.detail).Field("module", e.module).Field("part", e.part).Field("bytes", e.bytes);
    w.Field("in_elements", e.in_elements).Field("out_elements", e.out_elements).Field("dtype", e.dtype);
    w.Field("group_size", e.group_size).EndObject();
  }
  w.EndArray().Key("flows").BeginArray();
  for (const TraceFlow& flow : timeline.flows)
    w.BeginObject().Field("from", flow.from).Field("to", flow.to).EndObject();
  w.EndArray().Key("counters").BeginArray();
  for (const TraceCounterTrack& track : timeline.counters) {
    w.BeginObject().Field("name", track.name).Key("samples").BeginArray();
    for (const TraceCounter& sample : track.samples) {
      w.BeginObject().Field("rank", sample.rank).Field("time_ns", sample.time_ns).Field("value", sample.value);
      w.EndObject();
    }
    w.EndArray().EndObject();
  }
  w.EndArray().EndObject();
  return w.Take();
}

Result<Timeline> MergeTimelineJson(const std::vector<std::string>& parts) {
  if (parts.empty()) return MakeError("no timeline to merge");
  Timeline out;
  for (size_t i = 0; i < parts.size(); ++i) {
    INTERLACE_ASSIGN(Json root, ParseJson(parts[i]));
    const Status status = Reader(out).Run(root);
    if (!status.ok()) return Error{status.error().message, "timeline " + std::to_string(i)};
  }
  // All ranks' memory in one track: a reader tells them apart by the process.
  Timeline merged = std::move(out);
  std::vector<TraceCounterTrack> tracks;
  for (TraceCounterTrack& track : merged.counters) {
    const auto same = std::find_if(tracks.begin(), tracks.end(), [&](const auto& t) { return t.name == track.name; });
    if (same == tracks.end()) {
      tracks.push_back(std::move(track));
    } else {
      same->samples.insert(same->samples.end(), track.samples.begin(), track.samples.end());
    }
  }
  merged.counters = std::move(tracks);
  return merged;
}

}  // namespace interlace
