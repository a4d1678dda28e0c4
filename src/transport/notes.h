// notes.h — who is to blame. A rank that meets a lost or silent peer stops, and its own end closes its
// connections; to the ranks that wait for *it*, it would look like the culprit. So a rank that gives up sends a note to
// all others, on connections that carry nothing else. A note says that its sender is alive and for whom it waited; the
// culprits are the ranks that somebody waited for and that sent no note. A rank that closes without a note was lost.
//
//   rank 2 is killed:   0 <- (closed) - 2      0: "rank 2 was lost", sends a note to 1
//                       1 waits for 0 ......   0 exits; 1 has read the note: "rank 2 was lost, reported by rank 0"
//   rank 2 hangs:       0 waits for 1, which waits for 2: at the first deadline 0 sends a note, and 1, which hears it,
//                       answers with its own; both name 2
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/group.h"

namespace interlace {

// What one rank tells the others, as bytes.
struct Note {
  enum Kind : int32_t { kLost, kTimedOut, kMismatch, kDamaged };
  int32_t kind = kLost;
  int32_t count = 0;
  int32_t ranks[29] = {};
  float seconds = 0;
  char label[64] = {};
  uint32_t sum = 0;  // of what is before it, when it goes over the network

  Note() = default;
  Note(Kind kind, const std::vector<int>& ranks, const std::string& label, double seconds);
  void Add(int rank);
  bool Has(int rank) const;
  uint32_t Sum() const;
  // After it came from another process: its numbers and its text are within their arrays.
  void Sanitize();
};

// Text from another process, up to its end or `size`; what cannot be printed is '?'.
std::string Printable(const char* text, size_t size);

// What a rank knows of a peer when it judges.
struct Witness {
  std::optional<Note> note;  // that it has given up; without any rank: why was damaged on the way
  bool closed = false;  // its connection for notes has ended
  bool broken = false;  // its connection for data has ended while something was expected
};

struct Verdict {
  Note note;
  int reporter = -1;  // the rank whose note it is; -1: seen by this rank
};

// The verdict by all that is known; `own` is for whom this rank waited, and whether in vain for too long.
Verdict Judge(int rank, const Note& own, const std::vector<Witness>& peers);

// The verdict as a sentence.
std::string Explain(const Verdict& verdict, const RankGroup& group, const std::string& label);

}  // namespace interlace
