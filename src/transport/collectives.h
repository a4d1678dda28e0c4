// collectives.h — what the ranks of a group do with one another's memory, each started with a ticket that is waited
// for.
//
//               goes to peer p            comes from peer p         afterwards
//   gather      own shard                 p's place in full         own shard copied to its own place
//   reduce      p's part of flat          receive buffer            shard = sum of the parts in rank order
//   all-reduce  the value                 receive buffer            value = sum of the values in rank order
//               (large, and more than two ranks: a reduce of equal parts, then their gather; operation.h)
//   all-to-all  the part for p            the part of p             own part copied
//   broadcast   the value, from its root alone
//   send, recv  between two ranks
//
// On a grid of ranks a reduce is of the ranks along one side, and then all-reduces the sums along the other: hybrid
// sharding, {within {0, 1}, across {0, 2}} for rank 0 of
//
//                 0 1      ranks with the same parameters in their shards: a column
//                 2 3      ranks that share the parameters: a row
//
// Where all ranks of a grid have shards of their own, a gather goes along the columns first and then along the rows,
// and a reduce the other way, so that of what goes between rows (a slow link) each rank sends and receives its own
// column's part alone: a reduce of 0 sends 1 the parts of 1 and 3, adds up those of 0 and 2, and sends 2 the sum of its
// own.
//
// Every rank of the group starts the same operations in the same order; sends and receives between two ranks match in
// order, and lie at the same place between the operations of all. Waits may come in any order. Memory that was given
// must stay until the wait; nobody may write what is sent or touch what is received meanwhile. Every wait works against
// one deadline; a lost or stuck peer is an Error that names its rank and the operation. After a failure every call
// gives that Error. From any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/mesh.h"
#include "transport/sum.h"

namespace interlace {

// Contiguous memory of one type.
struct TypedSpan {
  char* data = nullptr;
  int64_t elements = 0;
  DType dtype = DType::kU8;
  int64_t bytes() const { return elements * DTypeBytes(dtype); }
};

// This rank's row and column of a grid: places in the group, this rank's own among them, in rank order.
struct RankGrid {
  std::vector<int> within, across;
  bool nested = false;  // where all have shards of their own, those of a column lie side by side, not those of a row
};

class Collectives {
 public:
  // `parallel`: how sums are shared between threads.
  Collectives(std::shared_ptr<Mesh> mesh, double timeout_s, ParallelFor parallel = {})
      : mesh_(std::move(mesh)), timeout_s_(timeout_s), parallel_(std::move(parallel)) {}
  // Finishes what was started, for the peers need this rank's part of it.
  ~Collectives();
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // All of these: an Error when sizes do not fit one another, or when the group has failed.

  // Full i is [size * shard i] and receives rank r's shard at r * shard i; shard i may already lie at its own place.
  Result<Ticket> StartGather(const std::vector<TypedSpan>& shards, const std::vector<TypedSpan>& fulls,
                             std::string label);
  // The same along the columns of a grid that has all ranks, then along its rows; of one row, all at once.
  Result<Ticket> StartGather(const std::vector<TypedSpan>& shards, const std::vector<TypedSpan>& fulls,
                             const RankGrid& grid, std::string label);
  // Shard i = the sum of the ranks' flat i at [rank * shard i]; it may be the own part of flat i. `receive`: memory of
  // ReceiveBytes(group size, shards) bytes.
  Result<Ticket> StartReduce(const std::vector<TypedSpan>& flats, const std::vector<TypedSpan>& shards, char* receive,
                             std::string label);
  // The same on a grid: flat i is [row * shard i], or [size * shard i] of a grid that has all ranks, each with a shard
  // of its own (grid.nested says where). `receive`: memory of GridReceiveBytes(grid, shards) bytes, or of
  // GridScatterBytes(grid, shards).
  Result<Ticket> StartReduce(const std::vector<TypedSpan>& flats, const std::vector<TypedSpan>& shards,
                             const RankGrid& grid, char* receive, std::string label);
  // In place. `receive`: memory of AllReduceReceiveBytes(group size, value) bytes.
  Result<Ticket> StartAllReduce(const TypedSpan& value, char* receive, std::string label);
  // to[p] goes to p, from[p] comes from p, which gives as many bytes; by rank of the group.
  Result<Ticket> StartAllToAll(const std::vector<TypedSpan>& to, const std::vector<TypedSpan>& from, std::string label);
  Result<Ticket> StartBroadcast(const TypedSpan& value, int root, std::string label);
  // Both ends say the same `tag`.
  Result<Ticket> StartSend(const TypedSpan& value, int peer, std::string label, std::string tag = "send");
  Result<Ticket> StartRecv(const TypedSpan& value, int peer, std::string label, std::string tag = "send");

  Status Wait(Ticket ticket) { return WaitFor(ticket, timeout_s_); }
  // Moves what can be moved without waiting.
  void Progress() { mesh_->Progress(); }
  void Leave() { mesh_->Leave(); }
  const RankGroup& group() const { return mesh_->group(); }

  struct Stats {
    int64_t bytes_sent = 0, bytes_received = 0, calls = 0;
  };
  Stats stats() const;
  // Operations started while recording is on are remembered until their times are taken.
  void SetRecording(bool on);
  // Times of an operation that was waited for; zeros when it was not recorded.
  TransferTimes TakeTimes(Ticket ticket);

  static int64_t ReceiveBytes(int size, const std::vector<TypedSpan>& shards);
  static int64_t GridReceiveBytes(const RankGrid& grid, const std::vector<TypedSpan>& shards);
  static int64_t GridScatterBytes(const RankGrid& grid, const std::vector<TypedSpan>& shards);
  static int64_t AllReduceReceiveBytes(int size, const TypedSpan& value);

 private:
  struct Copy {
    const char* from;
    char* to;
    int64_t bytes;
  };
  struct Open {
    Operation operation;
    std::vector<Copy> copies;  // within this rank
    bool recorded = false;
    TransferTimes times;
  };
  Error Misfit(const Open& open, const std::string& what) const;
  void ScatterOnGrid(const TypedSpan& flat, const TypedSpan& shard, const RankGrid& grid, char*& receive,
                     std::vector<Round>& rounds) const;
  Result<Ticket> Start(std::unique_ptr<Open> open);
  // One side of a message; `what`: of which, for the error.
  Result<Ticket> StartMessage(const TypedSpan& value, int peer, std::string label, std::string tag,
                              std::vector<PeerSpan> Round::*side, const char* what);
  Status WaitFor(Ticket ticket, double timeout_s);

  const std::shared_ptr<Mesh> mesh_;
  const double timeout_s_;
  const ParallelFor parallel_;
  mutable std::mutex mutex_;  // taken before the mesh's own, never held while waiting
  std::map<Ticket, std::unique_ptr<Open>> open_;
  Ticket next_ticket_ = 1;
  bool recording_ = false;
  std::map<Ticket, TransferTimes> times_;
  Stats stats_;
};

}  // namespace interlace
