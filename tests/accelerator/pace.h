// pace.h — mode "paced": an op takes the time that a cost model gives it, and computes nothing.
//
// All ranks of a run share one model of their devices, in memory that each of them maps: what every stream was given, what
// runs, and how much of it is left. Whoever issues or waits takes its lock and carries the model on to now, event by event,
// each at the time at which it was due:
//
//   rank 0 | compute |== a ==|== b ==|...............|== d ==|        a collective begins when the last rank's stream has
//          | gather  |       |. . . .|===== c =====|         |        come to it, and ends on all of them at once
//   rank 1 | compute |== a ==|==== b (later) ==|...|== d ==|          where the compute stream waits for it
//          | gather  |       |. . . . . . . . .|
//
// So a thread that wakes up late makes nothing late but itself: what it finds has happened when it should have. What is
// real is the host: its issuing, its order of streams and events, and its waits.
//
// What runs together slows each other down as it does in the simulator that the costs are from (src/sim/engine.h): classes
// of work by a table, transfers by their share of a link's direction, copies by their share of the host's memory.
//
// With virtual time nobody sleeps: the model's clock stands while any rank's host runs, and goes to the next event when all
// of them wait (a host that only polls lets it stand). Steps then take the same time in every run, to the bit, and a host
// takes none.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace soft {

// Of an op of the program that runs: nanoseconds of this run, alone.
struct Cost {
  enum Kind : int32_t { kNone, kCompute, kWithinNode, kBetweenNodes, kToDevice, kToHost };
  Kind kind = kNone;
  bool sends = false, receives = false;  // directions of a link that a transfer fills
  double latency_ns = 0;                 // of a transfer: before it uses anything, and slowed by nothing
  double work_ns = 0;
};

// What slows work down (interlace's Interference: bits of a set are compute, links, copies in, copies out).
struct Slowdown {
  std::array<std::array<double, 4>, 16> factor;  // by set and class
  std::array<double, 2> share = {0, 0};          // of the host's memory, that a copy in, out takes
  int64_t per_node = 1;                          // ranks
  Slowdown() {
    for (auto& row : factor) row.fill(1);
  }
};

// One thing that took time, in nanoseconds of the model's clock.
struct Paced {
  int32_t op, stream;
  double begin_ns, end_ns;
};

struct Model;  // what ranks share

class Pace {
 public:
  static constexpr int kStreams = 33;  // the default one and torch's pool; graphs have more of their own, which are not paced

  // `file`: the same on all ranks, best in memory (/dev/shm); the first makes it. Whoever made the run removes it.
  Pace(const std::string& file, int rank, int ranks, bool virtual_time);
  ~Pace();  // the clock goes on without this rank
  Pace(const Pace&) = delete;
  Pace& operator=(const Pace&) = delete;

  // Costs by the id of the op that `current_op` says is being issued in this thread (-1: none). Of what one op issues the
  // first that its kind of cost is for takes its time, and the rest none. Between steps, on every rank.
  void Program(std::vector<Cost> costs, const Slowdown& slowdown, int32_t (*current_op)());

  // ---- what the host gives a stream; the number of each among what the stream was given ----
  uint64_t Work(int stream);
  uint64_t Mark(int stream);                         // takes no time: an event's record
  uint64_t Wait(int stream, int on, uint64_t upto);  // for another stream of this rank
  // A rendezvous of `size` ranks that come with one key; `form` is what they must agree on.
  uint64_t Meet(int stream, uint64_t key, int size, uint64_t form);

  bool Over(int stream, uint64_t number);
  void Await(int stream, uint64_t number);  // holds the host
  uint64_t Issued(int stream);
  double EndedMs(int stream, uint64_t number);
  double NowNs();                    // the model's clock
  std::vector<Paced> TakePaced();    // of this rank, in the order of their ends; since the last call
  int64_t waits() const { return waits_; }

 private:
  friend struct Model;
  struct Given;
  class Locked;
  uint64_t Give(int stream, const Given& given);
  Cost Take(bool meets);

  Model* model_ = nullptr;
  int rank_;
  bool virtual_;
  std::vector<Cost> costs_;
  int32_t (*current_op_)() = nullptr;
  int32_t op_ = -1;      // that the last was issued by
  bool taken_ = false;   // its time has gone to something
  uint64_t seen_ = 0;    // of the log
  int64_t waits_ = 0;
};

}  // namespace soft
