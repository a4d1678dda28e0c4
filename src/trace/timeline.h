// timeline.h — what ran where and when, and what memory it took: filled by the simulator and by the runtime alike,
// written in the formats of others (chrome_trace.h, memory_snapshot.h), so that a prediction and a measurement open
// side by side.
//
// Times are nanoseconds from the start of the step. Lanes are those of the program (docs/ir.md), and the host thread
// that issues ops to a device.
//
//   host     |launch mm|launch mm|launch gather|...
//   compute  ....|== mm ==||== mm ==|   (wait)  |== mm ==|
//   gather   .....................|==== gather u1 ====|
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace interlace {

enum class TraceLane : uint8_t { kCompute, kGather, kReduce, kH2D, kD2H, kFile, kP2P, kHost };
inline constexpr int kTraceLanes = 8;
inline constexpr std::array<std::string_view, kTraceLanes> kTraceLaneNames = {"compute", "gather", "reduce", "h2d",
                                                                              "d2h",     "file",   "p2p",    "host"};

struct TraceEvent {
  int32_t rank = 0;
  TraceLane lane = TraceLane::kCompute;
  std::string
      axis;  // of activations that travel along an axis of their own: "tp"; they are shown as a lane "gather tp"
  bool wait = false;  // the compute lane stands still until a transfer has ended
  int64_t start_ns = 0;
  int64_t duration_ns = 0;
  std::string op;           // as in the program: "aten.mm", "gather.start"
  std::string detail;       // "u0 u1", "%12"; may be empty
  std::string module;       // path of the module; may be empty
  std::string part;         // "fwd", "bwd", "upd" or ""
  std::string source;       // "model.py:12"; may be empty
  int64_t bytes = 0;        // moved by a transfer, per rank
  int64_t in_elements = 0;  // of a collective's operands and results
  int64_t out_elements = 0;
  std::string dtype;       // of a collective, as in the program: "f32"
  int64_t group_size = 0;  // ranks of a collective
};

// An arrow between two events (indices into Timeline::events): from a transfer to the wait for it.
struct TraceFlow {
  int32_t from = 0, to = 0;
};

struct TraceCounter {
  int32_t rank = 0;
  int64_t time_ns = 0;
  double value = 0;
};
inline constexpr std::string_view kLiveBytes = "memory: live bytes";
struct TraceCounterTrack {
  std::string name;
  std::vector<TraceCounter> samples;
};

struct Timeline {
  std::string producer;  // "simulated on h100-80gb-32", "measured"
  std::string backend;   // "nccl", "tcp"
  int64_t world_size = 1;
  std::string device_name;
  int64_t device_memory_bytes = 0;
  std::vector<std::string> rank_names;  // "stage 3"; may be shorter: "rank 3" then
  std::vector<TraceEvent> events;
  std::vector<TraceFlow> flows;
  std::vector<TraceCounterTrack> counters;
};

// One storage begins or ends.
struct MemoryEvent {
  int32_t rank = 0;
  int64_t time_ns = 0;
  bool allocate = true;
  int64_t storage = 0;  // joins an allocation with its end; free for reuse afterwards
  int64_t bytes = 0;
  int64_t address = -1;  // from the start of the arena; -1: wherever there is room outside of it
  std::string name;      // of the op that does it, or what the storage holds ("u0.exp_avg")
  std::string module;
  std::string file;  // source of the op, "model.py", and its line
  int64_t line = 0;
};

}  // namespace interlace
