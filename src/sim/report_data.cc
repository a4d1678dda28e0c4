#include "sim/report_data.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "ir/op_table.h"
#include "sim/memory_kinds.h"
#include "trace/json.h"

namespace interlace {
namespace {

constexpr size_t kMostSamples = 3000;  // more than a screen has pixels across
constexpr size_t kMostPieces = 5000;

struct Sample {
  int64_t time_ps;
  BytesByKind bytes;
  int64_t total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }
};

// Changes of the curve in order of time; too many are thinned to the highest of each stretch, which keeps the peak.
std::vector<Sample> Samples(const Simulation& s, const MemoryKinds& kinds, const RankRecord& rank) {
  const Lowered& lowered = *s.lowered;
  std::vector<Sample> all;
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    const std::vector<BytesByKind>& at_op = kinds.at_op[lowered.run[run]];
    for (size_t i = 0; i < at_op.size(); ++i) {
      BytesByKind bytes = at_op[i];
      if (!s.memory.through.empty()) bytes[static_cast<size_t>(MemoryKind::kActivations)] += s.memory.through[run];
      if (all.empty() || all.back().bytes != bytes) all.push_back({rank.start_ps[lowered.first[run] + i], bytes});
    }
  }
  if (all.size() <= kMostSamples) return all;
  std::vector<Sample> out;
  size_t stretch = (all.size() + kMostSamples - 1) / kMostSamples;
  for (size_t i = 0; i < all.size(); i += stretch) {
    auto end = all.begin() + static_cast<int64_t>(std::min(i + stretch, all.size()));
    out.push_back(*std::max_element(all.begin() + static_cast<int64_t>(i), end,
                                    [](const Sample& a, const Sample& b) { return a.total() < b.total(); }));
  }
  return out;
}

void WritePhases(JsonWriter& w, const Simulation& s, const RankRecord& rank) {
  const Lowered& lowered = *s.lowered;
  w.Key("phases").BeginArray();
  for (size_t run = 0; run < lowered.run.size(); ++run) {
    int64_t first = lowered.first[run], end = lowered.first[run + 1];
    if (first == end) continue;
    w.BeginObject()
        .Field("name", lowered.phases[lowered.run[run]]->name)
        .Field("start_us", Microseconds(rank.start_ps[first]));
    w.Field("end_us", Microseconds(rank.end_ps[end - 1])).EndObject();
  }
  w.EndArray();
}

void WriteMemory(JsonWriter& w, const Simulation& s, const MemoryKinds& kinds, const RankRecord& rank) {
  std::vector<Sample> samples = Samples(s, kinds, rank);
  w.Key("memory").BeginObject().Key("kinds").BeginArray();
  for (std::string_view name : kMemoryKindNames) w.String(name);
  w.EndArray().Key("time_us").BeginArray();
  for (const Sample& sample : samples) w.Number(Microseconds(sample.time_ps));
  w.EndArray().Key("bytes").BeginArray();
  for (const Sample& sample : samples) {
    w.BeginArray();
    for (int64_t bytes : sample.bytes) w.Int(bytes);
    w.EndArray();
  }
  w.EndArray();
  if (s.memory.peak.place >= 0) {
    w.Field("peak_us", Microseconds(rank.start_ps[s.lowered->first[s.memory.peak.run_index] + s.memory.peak.place]));
  }
  w.Key("at_peak").BeginArray();
  for (const KindHolder& holder : kinds.at_peak) {
    w.BeginObject().Field("kind", kMemoryKindNames[static_cast<size_t>(holder.kind)]).Field("module", holder.module);
    w.Field("bytes", holder.bytes).Field("storages", holder.storages).EndObject();
  }
  w.EndArray().EndObject();
}

// The pieces with the largest areas in the picture, in their order.
void WriteArena(JsonWriter& w, const Simulation& s, const RankRecord& rank) {
  w.Key("arena");
  Result<ArenaPicture> arena = PictureOf(s, rank);
  if (!arena.ok()) {
    w.Null();
    return;
  }
  std::vector<ArenaPiece>& pieces = arena->pieces;
  const size_t all = pieces.size();
  if (all > kMostPieces) {
    const auto area = [](const ArenaPiece& p) {
      return static_cast<double>(p.bytes) * static_cast<double>(p.end_ps - p.start_ps + 1);
    };
    std::vector<double> areas;
    for (const ArenaPiece& piece : pieces) areas.push_back(area(piece));
    std::nth_element(areas.begin(), areas.begin() + kMostPieces - 1, areas.end(), std::greater<>());
    const double least = areas[kMostPieces - 1];
    std::erase_if(pieces, [&](const ArenaPiece& p) { return area(p) < least; });
    if (pieces.size() > kMostPieces) pieces.resize(kMostPieces);  // many alike
  }
  std::vector<std::string_view> names;
  std::unordered_map<std::string_view, int64_t> place;
  const auto number = [&](std::string_view name) {
    const auto [found, fresh] = place.try_emplace(name, static_cast<int64_t>(names.size()));
    if (fresh) names.push_back(name);
    return found->second;
  };
  w.BeginObject().Field("top_bytes", arena->top_bytes).Field("reserved_bytes", arena->top_bytes);
  w.Field("live_bytes", arena->live_bytes).Field("fragmentation", arena->fragmentation);
  w.Field("left_out", static_cast<int64_t>(all - pieces.size())).Key("pieces").BeginArray();
  for (const ArenaPiece& p : pieces) {
    w.BeginArray().Int(p.offset).Int(p.bytes).Number(Microseconds(p.start_ps)).Number(Microseconds(p.end_ps));
    w.Int(static_cast<int64_t>(p.kind)).Int(number(p.name)).Int(number(p.module)).EndArray();
  }
  w.EndArray().Key("names").BeginArray();
  for (std::string_view name : names) w.String(name);
  w.EndArray().EndObject();
}

// Neighbours on one lane are one piece.
void WritePath(JsonWriter& w, const Simulation& s) {
  w.Key("path").BeginArray();
  const auto lane_of = [&](const PathPiece& piece) {
    if (piece.kind == PathPiece::Kind::kLaunch) return std::string("launch");
    const Program& program = *s.input.programs[piece.rank]->program;
    const bool transfer = piece.kind == PathPiece::Kind::kTransfer;
    return ShownLane(piece.lane, transfer ? ActivationAxisOf(program, program.op(piece.op)) : std::string_view());
  };
  for (size_t i = 0; i < s.path.size();) {
    const PathPiece& first = s.path[i];
    const std::string lane = lane_of(first);
    size_t end = i;
    while (end < s.path.size() && s.path[end].rank == first.rank && lane_of(s.path[end]) == lane) ++end;
    w.BeginObject()
        .Field("start_us", Microseconds(first.start_ps))
        .Field("end_us", Microseconds(s.path[end - 1].end_ps));
    w.Field("lane", lane).Field("rank", first.rank).EndObject();
    i = end;
  }
  w.EndArray();
}

}  // namespace

Result<std::string> ReportData(const Simulation& s) {
  INTERLACE_ASSIGN(MemoryKinds kinds, ComputeMemoryKinds(*s.lowered, s.memory));
  size_t last = 0;
  for (size_t r = 1; r < s.use.size(); ++r) {
    if (s.use[r].end_ps > s.use[last].end_ps) last = r;
  }
  const RankRecord& rank = s.output.ranks[last];
  JsonWriter w;
  w.BeginObject().Field("rank", static_cast<int64_t>(last));
  WritePhases(w, s, rank);
  WriteMemory(w, s, kinds, rank);
  WritePath(w, s);
  WriteArena(w, s, rank);
  w.EndObject();
  return w.Take();
}

}  // namespace interlace
