// faults.h — a run of a few ranks by a seed: how many, what they do together, on what network, and what goes wrong; and
// whether what came of it is allowed. The ranks are the real ones (connect.h, mesh.h, collectives.h), the network and
// the clock are not (network.h).
//
// What must hold, whatever goes wrong:
//   - an operation that ends well has the numbers that a plain loop computes;
//   - each wait ends, at its timeout and what a mesh takes to ask around at the latest;
//   - without a fault, or with one that a network makes up for, no rank has an error;
//   - an error names nobody but those that the fault is of;
//   - who is well learns soon that others have failed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/mesh.h"
#include "transport/testing/network.h"

namespace interlace {

inline constexpr int64_t kMs = 1'000'000;  // in nanoseconds

struct FaultCase {
  enum Kind {
    kNone,
    kStream,    // one of StreamFault's
    kCut,       // connections of two ranks are reset
    kKill,      // a rank ends
    kLeave,     // a rank says that it does not go on (Mesh::Leave)
    kStall,     // a rank stops for longer than anybody waits
    kHiccup,    // a rank stops for less
    kCutOff,    // a rank's host is cut off
    kSeparate,  // nothing passes between two ranks
  };
  struct Op {
    enum Kind { kGather, kReduce, kGridReduce, kAllReduce, kAllToAll, kBroadcast, kSend };
    Kind kind = kGather;
    DType dtype = DType::kI32;
    int64_t elements = 1;                // of a part
    int root = 0, to = 0;                // of a broadcast; a message's two ends
    std::vector<int64_t> compute_ns;     // by rank, before it
  };
  uint64_t seed = 0;
  int size = 2;
  double timeout_s = 1;
  size_t window = 1;  // operations under way
  bool keyed = false;
  int strangers = 0;  // that connect while the ranks meet
  std::vector<Op> ops;
  NetworkOptions network;
  Kind kind = kNone;
  StreamFault fault;
  int culprit = 0, other = 0;
  int64_t when_ns = 0, for_ns = 0;
  int64_t second_ns = 0;  // when the other is killed, too
  bool cuts_data = true, cuts_control = true;
  size_t leaves_at = 0;  // before which operation
  std::optional<StreamFault> note_fault = {};  // on top of it

  std::string Text() const;
};

FaultCase DrawCase(uint64_t seed);

// What came of it on one rank.
struct RankEnd {
  std::string error, wrong, late;
  std::vector<int> named;   // by the error
  bool met = false;         // it had its connections
  int64_t end_ns = 0;       // of its last operation, or of the error
  int64_t waited_from_ns = 0;
};

struct FaultRun {
  std::vector<RankEnd> ranks;
  bool struck = false;  // the fault has met something
  std::vector<std::string> problems;
  std::string trace;
  uint64_t digest = 0;
  int64_t calls = 0;
};

struct RunOptions {
  bool keep_trace = false;
  bool encrypts = false;
  double waits_longer = 1;  // planted: ranks wait so many times as long as they should
  int lost_patience_ms = MeshOptions{}.lost_patience_ms, silent_patience_ms = MeshOptions{}.silent_patience_ms;
};

FaultRun RunCase(const FaultCase& one, const RunOptions& options = {});

}  // namespace interlace
