// graph.h — what a capture has noted, in the host's order, to be given again by a replay: ops, records of events and
// waits for them. The semantics are CUDA's:
//
//   The stream where it began is captured, and every stream that waits for an event of a captured one; all of them must
//   have been waited for in the end. Whoever waits on the host for what is captured, copies between host and device, or
//   draws random numbers (their keys are the host's) makes the capture fail.
//   A replay gives the ops of the first stream to the current one, and those of the others to streams of the graph's
//   own: between them and what other streams do there are only those waits that were captured.
//   Memory taken while a stream is captured belongs to the pool of the graph, and stays there until the graph goes.
#pragma once
#include <string>
#include <vector>

#include "engine.h"

namespace soft {

struct Capture {
  struct Node {
    int index = 0;  // of its stream
    const char* name = "";
    std::vector<Access> touched;
    Make make;           // an op; without it a record, or
    int64_t waits = -1;  // a wait for the record that is this node
    Clock clock;         // what its stream knew then: nodes of each stream, by index
  };
  uint64_t id = 0, pool = 0;
  std::vector<Node> nodes;
  std::vector<int> streams;   // as captured; the first is where it began
  std::vector<Clock> clocks;  // of each
  std::vector<int> own;       // those of a replay; the first has none
  std::string failed;         // why
};

// The blocks of a pool that no graph has any more are anybody's (device_memory.cc). The device is idle.
void ReleasePool(uint64_t pool);

}  // namespace soft
