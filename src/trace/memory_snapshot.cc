#include "trace/memory_snapshot.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "trace/json.h"

namespace interlace {
namespace {

constexpr int64_t kBase = int64_t{1} << 32;  // first address of a device, as a driver would give
constexpr int64_t kAlign = 512;              // of PyTorch's caching allocator
constexpr int64_t kArenaAlign = 64;          // of planned addresses
constexpr int64_t kSegment = 2 << 20;        // where the second segment of a device may begin

// Best fit with merging of neighbours over one address range that grows at its end.
class Addresses {
 public:
  explicit Addresses(int64_t base) : base_(base), top_(base) {}
  Result<int64_t> Take(int64_t bytes) {
    auto fit = by_size_.lower_bound({bytes, 0});
    if (fit != by_size_.end()) {
      auto [size, address] = *fit;
      Remove(address);
      if (size > bytes) Insert(address + bytes, size - bytes);
      return address;
    }
    int64_t address = top_;
    if (__builtin_add_overflow(top_, bytes, &top_))
      return MakeError("the storages of one rank do not fit in 64 bits of address");
    return address;
  }
  void Give(int64_t address, int64_t bytes) {
    auto after = free_.lower_bound(address);
    if (after != free_.end() && after->first == address + bytes) {
      bytes += after->second;
      Remove(after->first);
    }
    auto before = free_.lower_bound(address);
    if (before != free_.begin() && (--before, before->first + before->second == address)) {
      address = before->first;
      bytes += before->second;
      Remove(address);
    }
    Insert(address, bytes);
  }
  int64_t base() const { return base_; }
  int64_t top() const { return top_; }

 private:
  void Insert(int64_t address, int64_t bytes) {
    free_[address] = bytes;
    by_size_.insert({bytes, address});
  }
  void Remove(int64_t address) {
    auto found = free_.find(address);
    by_size_.erase({found->second, address});
    free_.erase(found);
  }
  int64_t base_, top_;
  std::map<int64_t, int64_t> free_;                // address → bytes
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (bytes, address)
};

struct Placed {
  int64_t address = 0;
  const MemoryEvent* event = nullptr;
};

int64_t SizeOf(const MemoryEvent& e) {
  const int64_t align = e.address < 0 ? kAlign : kArenaAlign;
  return std::max((e.bytes + align - 1) / align * align, align);
}

// What lives in the arena now, by address: storages there never overlap.
class Arena {
 public:
  Status Take(const MemoryEvent& e) {
    const int64_t end = e.address + SizeOf(e);
    auto after = live_.lower_bound(e.address);
    const bool meets = after != live_.end() && after->first < end;
    if (meets || (after != live_.begin() && std::prev(after)->second > e.address)) {
      return MakeError("'", e.name, "' is at ", e.address, " in the arena, where another storage lives");
    }
    live_[e.address] = end;
    return Ok{};
  }
  void Give(int64_t address) { live_.erase(address); }

 private:
  std::map<int64_t, int64_t> live_;
};

void WriteFrames(JsonWriter& w, const MemoryEvent& e) {
  w.Key("frames").BeginArray();
  const std::string file = e.module.empty() ? "program" : e.module;
  w.BeginObject().Fields("name", e.name, "filename", file, "line", 0).EndObject();
  if (!e.file.empty()) {
    w.BeginObject().Field("name", e.module).Field("filename", e.file).Field("line", e.line).EndObject();
  }
  w.EndArray();
}

void WriteTraceEntry(JsonWriter& w, const char* action, int64_t address, int64_t bytes, const MemoryEvent& e) {
  w.NewLine().BeginObject();
  w.Fields("action", action, "addr", address, "size", bytes, "stream", 0, "time_us", e.time_ns / 1000);
  WriteFrames(w, e);
  w.EndObject();
}

// One segment with the blocks in it that live at the end.
void WriteSegment(JsonWriter& w, int32_t rank, int64_t begin, int64_t end,
                  const std::map<int64_t, const MemoryEvent*>& blocks, const char* name) {
  if (begin == end) return;
  int64_t used = 0;
  for (const auto& [address, event] : blocks) used += SizeOf(*event);
  w.BeginObject().Fields("device", rank, "address", begin, "total_size", end - begin, "allocated_size", used);
  w.Fields("active_size", used, "requested_size", used, "stream", 0, "segment_type", "large");
  w.Key("segment_pool_id").BeginArray().Int(0).Int(0).EndArray().Field("is_expandable", false);
  w.Key("frames").BeginArray();
  w.BeginObject().Fields("name", name, "filename", "program", "line", 0).EndObject().EndArray();
  w.Key("blocks").BeginArray();
  int64_t at = begin;
  auto gap = [&](int64_t until) {
    if (until <= at) return;
    w.NewLine().BeginObject().Field("address", at).Field("size", until - at).Field("requested_size", int64_t{0});
    w.Field("state", "inactive").Key("frames").BeginArray().EndArray().EndObject();
  };
  for (const auto& [address, event] : blocks) {
    gap(address);
    w.NewLine().BeginObject().Fields("address", address, "size", SizeOf(*event), "requested_size", event->bytes);
    w.Field("state", "active_allocated");
    WriteFrames(w, *event);
    w.EndObject();
    at = address + SizeOf(*event);
  }
  gap(end);
  w.EndArray().EndObject();
}

}  // namespace

Result<std::string> WriteMemorySnapshot(const std::vector<MemoryEvent>& events) {
  int32_t ranks = 0;
  for (const MemoryEvent& e : events) {
    if (e.rank < 0 || e.rank > 1 << 20) return MakeError("rank ", e.rank, " of a memory event is out of range");
    if (e.allocate && (e.bytes < 0 || e.bytes > INT64_MAX - kAlign))
      return MakeError("'", e.name, "' allocates ", e.bytes, " bytes");
    if (e.allocate && e.address >= 0 && (e.bytes > INT64_MAX / 4 || e.address > INT64_MAX / 2 - e.bytes)) {
      return MakeError("'", e.name, "' is at ", e.address, ", beyond 64 bits of address");
    }
    ranks = std::max(ranks, e.rank + 1);
  }
  std::vector<int64_t> arena_end(ranks, kBase);
  for (const MemoryEvent& e : events) {
    if (e.allocate && e.address >= 0) arena_end[e.rank] = std::max(arena_end[e.rank], kBase + e.address + SizeOf(e));
  }
  std::vector<Addresses> space;
  for (int64_t end : arena_end) space.emplace_back((end + kSegment - 1) / kSegment * kSegment);
  std::vector<std::unordered_map<int64_t, Placed>> live(ranks);
  JsonWriter traces;
  traces.BeginArray();
  for (int32_t rank = 0; rank < ranks; ++rank) {
    Arena arena;
    traces.BeginArray();
    for (const MemoryEvent& e : events) {
      if (e.rank != rank) continue;
      if (e.allocate) {
        int64_t address = kBase + e.address;
        if (e.address >= 0) {
          INTERLACE_TRY(arena.Take(e));
        } else {
          INTERLACE_ASSIGN(address, space[rank].Take(SizeOf(e)));
        }
        if (!live[rank].emplace(e.storage, Placed{address, &e}).second) {
          return MakeError("storage ", e.storage, " ('", e.name, "') begins twice on rank ", rank);
        }
        WriteTraceEntry(traces, "alloc", address, SizeOf(e), e);
      } else {
        auto found = live[rank].find(e.storage);
        if (found == live[rank].end())
          return MakeError("storage ", e.storage, " ('", e.name, "') ends before it begins on rank ", rank);
        const Placed placed = found->second;
        live[rank].erase(found);
        const int64_t bytes = SizeOf(*placed.event);
        WriteTraceEntry(traces, "free_requested", placed.address, bytes, e);
        WriteTraceEntry(traces, "free_completed", placed.address, bytes, e);
        if (placed.event->address >= 0) {
          arena.Give(placed.event->address);
        } else {
          space[rank].Give(placed.address, bytes);
        }
      }
    }
    traces.EndArray();
  }
  traces.EndArray();

  JsonWriter w;
  w.BeginObject().Key("segments").BeginArray();
  for (int32_t rank = 0; rank < ranks; ++rank) {
    std::map<int64_t, const MemoryEvent*> planned, others;
    for (const auto& [id, placed] : live[rank])
      (placed.event->address >= 0 ? planned : others)[placed.address] = placed.event;
    WriteSegment(w, rank, kBase, arena_end[rank], planned, "arena of a step");
    WriteSegment(w, rank, space[rank].base(), space[rank].top(), others, "outside of the arena");
  }
  w.EndArray();
  std::string out = w.Take();
  out.append(",\"device_traces\":").append(traces.Take());
  out.append(",\"allocator_settings\":{},\"external_annotations\":[]}\n");
  return out;
}

}  // namespace interlace
