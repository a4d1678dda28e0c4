#include "trace/testing/check_trace.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trace/testing/read_json.h"

namespace interlace {
namespace {

struct Slice {
  int64_t start = 0, end = 0;
  int64_t latest_end = 0;  // of this slice and those before it in order
};
using Thread = std::pair<int64_t, int64_t>;

// Reads the events of a trace into what the rules are about.
class Checker {
 public:
  Status Run(const Json& root) {
    const Json* events = root.Find("traceEvents");
    if (events == nullptr || !events->is(Json::Kind::kArray)) return MakeError("no array 'traceEvents'");
    for (size_t i = 0; i < events->items.size(); ++i) {
      Status status = Read(events->items[i]);
      if (!status.ok()) return Error{status.error().message, "event " + std::to_string(i)};
    }
    INTERLACE_TRY(Nesting());
    return Flows();
  }

 private:
  struct FlowEnd {
    Thread thread;
    int64_t time = 0;
    std::string kind;
  };

  Status Read(const Json& event) {
    const Json* phase = event.Find("ph");
    if (phase == nullptr || !phase->is(Json::Kind::kString)) return MakeError("no 'ph'");
    const Json* name = event.Find("name");
    if (name == nullptr || !name->is(Json::Kind::kString) || name->text.empty()) return MakeError("no 'name'");
    Thread thread;
    int64_t time = 0;
    INTERLACE_ASSIGN(thread.first, Integer(event, "pid"));
    INTERLACE_ASSIGN(thread.second, Integer(event, "tid"));
    INTERLACE_ASSIGN(time, Nanos(event, "ts"));
    if (phase->text == "X") {
      INTERLACE_ASSIGN(int64_t duration, Nanos(event, "dur"));
      const Json* category = event.Find("cat");
      static const std::set<std::string> kKnown = {"kernel", "gpu_memcpy", "cuda_sync", "cuda_runtime", "cpu_op"};
      if (category == nullptr || !kKnown.contains(category->text))
        return MakeError("a category that Kineto does not have");
      slices_[thread].push_back({time, time + duration, 0});
    } else if (phase->text == "s" || phase->text == "f") {
      INTERLACE_ASSIGN(int64_t id, Integer(event, "id"));
      const Json* category = event.Find("cat");
      FlowEnd end{thread, time, category == nullptr ? "" : category->text};
      auto& ends = phase->text == "s" ? flow_starts_ : flow_ends_;
      if (!ends.emplace(id, end).second) return MakeError("flow ", id, " has two ends of one kind");
    } else if (phase->text == "C") {
      return Counter(event, thread, name->text, time);
    } else if (phase->text != "M") {
      return MakeError("unknown phase '", phase->text, "'");
    }
    return Ok{};
  }

  Status Counter(const Json& event, Thread thread, const std::string& name, int64_t time) {
    const Json* args = event.Find("args");
    if (args == nullptr || args->fields.empty()) return MakeError("the counter '", name, "' has no value");
    for (const auto& [key, value] : args->fields) {
      if (!value.is(Json::Kind::kNumber) || value.number < 0)
        return MakeError("the counter '", name, "' has a bad '", key, "'");
    }
    auto [last, fresh] = counter_time_.emplace(std::pair{thread.first, name}, time);
    if (!fresh && last->second > time) return MakeError("the counter '", name, "' goes back in time");
    last->second = time;
    return Ok{};
  }

  static Result<int64_t> Integer(const Json& event, std::string_view key) {
    const Json* field = event.Find(key);
    if (field == nullptr || !field->is(Json::Kind::kNumber) || field->number != std::floor(field->number) ||
        std::abs(field->number) >= 9e18) {
      return MakeError("'", key, "' is no integer");
    }
    return static_cast<int64_t>(field->number);
  }
  static Result<int64_t> Nanos(const Json& event, std::string_view key) {
    const Json* field = event.Find(key);
    if (field == nullptr || !field->is(Json::Kind::kNumber) || !(field->number >= 0 && field->number < 9e15)) {
      return MakeError("'", key, "' is no time");
    }
    return static_cast<int64_t>(std::llround(field->number * 1000));
  }

  // Sorted by begin, longest first, every slice lies within the innermost open one or after it.
  Status Nesting() {
    for (auto& [thread, list] : slices_) {
      std::sort(list.begin(), list.end(),
                [](const Slice& a, const Slice& b) { return a.start != b.start ? a.start < b.start : a.end > b.end; });
      std::vector<int64_t> open;
      int64_t latest_end = 0;
      for (Slice& slice : list) {
        slice.latest_end = latest_end = std::max(latest_end, slice.end);
        while (!open.empty() && open.back() <= slice.start) open.pop_back();
        if (!open.empty() && slice.end > open.back()) {
          return MakeError("slices overlap on thread ", thread.second, " of process ", thread.first, " at ",
                           slice.start, " ns");
        }
        open.push_back(slice.end);
      }
    }
    return Ok{};
  }

  Status Flows() {
    for (const auto& [id, start] : flow_starts_) {
      auto end = flow_ends_.find(id);
      if (end == flow_ends_.end()) return MakeError("flow ", id, " never ends");
      if (end->second.time < start.time) return MakeError("flow ", id, " goes back in time");
      if (end->second.kind != start.kind) return MakeError("flow ", id, " changes its category");
      if (!Within(start) || !Within(end->second)) return MakeError("flow ", id, " does not touch a slice");
    }
    for (const auto& [id, end] : flow_ends_) {
      if (!flow_starts_.contains(id)) return MakeError("flow ", id, " never starts");
    }
    return Ok{};
  }

  bool Within(const FlowEnd& end) const {
    auto found = slices_.find(end.thread);
    if (found == slices_.end()) return false;
    const std::vector<Slice>& list = found->second;
    auto after =
        std::upper_bound(list.begin(), list.end(), end.time, [](int64_t t, const Slice& s) { return t < s.start; });
    return after != list.begin() && std::prev(after)->latest_end >= end.time;
  }

  std::map<Thread, std::vector<Slice>> slices_;
  std::map<int64_t, FlowEnd> flow_starts_, flow_ends_;
  std::map<std::pair<int64_t, std::string>, int64_t> counter_time_;
};

}  // namespace

Status CheckChromeTrace(std::string_view json) {
  INTERLACE_ASSIGN(Json root, ParseJson(json));
  return Checker().Run(root);
}

namespace {

Result<int64_t> Field(const Json& object, std::string_view key) {
  const Json* field = object.Find(key);
  if (field == nullptr || !field->is(Json::Kind::kNumber)) return MakeError("no number '", key, "'");
  if (!(std::abs(field->number) < 0x1p62)) return MakeError("'", key, "' is no number of bytes or microseconds");
  return static_cast<int64_t>(field->number);
}

// The trace of one device; leaves the blocks alive at its end.
Status CheckDevice(const Json& trace, std::map<int64_t, int64_t>& live) {
  std::map<int64_t, int64_t> ending;
  int64_t last_time = 0;
  for (size_t i = 0; i < trace.items.size(); ++i) {
    const Json& entry = trace.items[i];
    const Json* action = entry.Find("action");
    const Json* frames = entry.Find("frames");
    if (action == nullptr || frames == nullptr || !frames->is(Json::Kind::kArray))
      return MakeError("entry ", i, " has no action or frames");
    INTERLACE_ASSIGN(int64_t address, Field(entry, "addr"));
    INTERLACE_ASSIGN(int64_t size, Field(entry, "size"));
    INTERLACE_ASSIGN(int64_t time, Field(entry, "time_us"));
    if (time < last_time) return MakeError("entry ", i, " goes back in time");
    last_time = time;
    if (action->text == "alloc") {
      auto after = live.lower_bound(address);
      bool overlaps = after != live.end() && after->first < address + size;
      if (after != live.begin() && (--after, after->first + after->second > address)) overlaps = true;
      if (overlaps) return MakeError("entry ", i, " allocates memory that is in use");
      live[address] = size;
    } else if (action->text == "free_requested") {
      auto found = live.find(address);
      if (found == live.end() || found->second != size) return MakeError("entry ", i, " frees what is not allocated");
      ending[address] = size;
    } else if (action->text == "free_completed") {
      if (ending.erase(address) == 0) return MakeError("entry ", i, " completes a free that was not requested");
      live.erase(address);
    } else {
      return MakeError("entry ", i, " has the unknown action '", action->text, "'");
    }
  }
  if (!ending.empty()) return MakeError("a requested free is never completed");
  return Ok{};
}

}  // namespace

Status CheckMemorySnapshot(std::string_view json) {
  INTERLACE_ASSIGN(Json root, ParseJson(json));
  const Json* segments = root.Find("segments");
  const Json* traces = root.Find("device_traces");
  if (segments == nullptr || traces == nullptr) return MakeError("no 'segments' or no 'device_traces'");
  std::vector<std::map<int64_t, int64_t>> live(traces->items.size());
  for (size_t d = 0; d < live.size(); ++d) {
    Status status = CheckDevice(traces->items[d], live[d]);
    if (!status.ok()) return Error{status.error().message, "device " + std::to_string(d)};
  }
  for (const Json& segment : segments->items) {
    INTERLACE_ASSIGN(int64_t device, Field(segment, "device"));
    INTERLACE_ASSIGN(int64_t at, Field(segment, "address"));
    INTERLACE_ASSIGN(int64_t total, Field(segment, "total_size"));
    const Json* blocks = segment.Find("blocks");
    if (device < 0 || device >= static_cast<int64_t>(live.size()) || blocks == nullptr)
      return MakeError("a segment of no device");
    int64_t end = at + total;
    for (const Json& block : blocks->items) {
      INTERLACE_ASSIGN(int64_t address, Field(block, "address"));
      INTERLACE_ASSIGN(int64_t size, Field(block, "size"));
      if (address != at) return MakeError("the blocks of device ", device, " do not fill its segment");
      at += size;
      const Json* state = block.Find("state");
      if (state == nullptr || state->text != "active_allocated") continue;
      auto found = live[device].find(address);
      if (found == live[device].end() || found->second != size)
        return MakeError("a block of device ", device, " is not in its trace");
      live[device].erase(found);
    }
    if (at != end) return MakeError("the blocks of device ", device, " do not fill its segment");
  }
  for (size_t d = 0; d < live.size(); ++d) {
    if (!live[d].empty()) return MakeError("device ", d, " ends with a storage that no block shows");
  }
  return Ok{};
}

}  // namespace interlace
