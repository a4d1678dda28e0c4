// operation.h — a transfer as data: what goes to whom, what comes from whom, and what is added up when it is there. The
// mesh (mesh.h) carries it out and knows nothing of collectives; collectives.h makes the usual ones.
//
//   all-reduce of three ranks, seen from rank 0; v[i] is the part of the value that rank i adds up:
//     round 0   v[1] -> 1, v[2] -> 2;   buffer <- v[0] of 1 and of 2;   then v[0] = the sum in rank order
//     round 1   v[0] -> 1, v[0] -> 2;   v[1] <- 1, v[2] <- 2
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/sum.h"

namespace interlace {

// A transfer under way; 0 is never a valid ticket.
using Ticket = int64_t;

// When an operation was issued, when its first byte was handed over, when its data had come and gone (before the last
// sums); steady clock, nanoseconds. `bytes`: received by this rank.
struct TransferTimes {
  int64_t queued_ns = 0, begin_ns = 0, end_ns = 0, bytes = 0;
};

// Bytes that go to a peer or come from it. Of sends they are only read.
struct PeerSpan {
  int peer = 0;
  char* data = nullptr;
  size_t bytes = 0;
};

struct Round {
  std::vector<PeerSpan> sends,
      receives;                // those with one peer are one message, in their order; an empty one is sent, too
  std::vector<LocalSum> sums;  // made when the round's data has come and gone, before the next round begins
};

// Its memory must stay until it was waited for or the mesh has failed.
struct Operation {
  std::string label = {};  // what this rank calls it, in messages
  std::string tag = {};    // what both ends of each message call it: ends that differ get an error and not wrong data
  int32_t kind = 0;        // likewise
  bool everyone = true;    // in each round everyone sends to everyone
  std::vector<Round> rounds = {};
  // Written by the mesh, nanoseconds of the steady clock: the first byte was handed over (or came, where not everyone
  // sends); everything has come and gone.
  int64_t begin_ns = 0, end_ns = 0;

  // The mesh's own.
  uint64_t number = 0;         // in the order of this rank's starts
  size_t round = 0;            // that is under way; rounds.size(): none, it is done
  std::vector<int> open = {};  // by round: messages that are not done
};

}  // namespace interlace
