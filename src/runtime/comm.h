// comm.h — collectives of one mesh axis on tensors. On the CPU they are transfers between each two ranks over sockets
// of our own, summed locally in rank order (the room transport): near wire speed in both directions, half the traffic
// of gloo's reduce-scatter, and a result that depends on nothing but the ranks' data. The calling thread moves the data
// (transport/mesh.h says why). On NCCL the native collectives are used. Every wait works against one deadline; a lost
// or stuck peer is an Error that names its rank and the op. Tensors given to Start* are kept until waited for; nobody
// may write the sources or touch the results meanwhile. Every rank must start the same operations on an axis in the
// same order; waits may come in any order. After a failure every call gives that Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/collectives.h"
#include "transport/operation.h"

namespace interlace {

class DeviceTimes;

struct AxisSpec {
  std::string name;  // "dp"
  int64_t rank = 0, size = 1;
  std::string backend;  // "tcp" (CPU) | "nccl" | "native" (any group's own collectives) | "none" (size 1)
  // The process group's name for c10d::resolve_process_group. "tcp" only exchanges addresses through it, once a group.
  std::string native;
  // Native groups: another group of the same ranks, or empty. A device carries out the operations of one group one
  // after the other; reductions go through this one, and messages to lower ranks, so that none stands behind a gather,
  // or behind a message of the other direction that its peer has not come to.
  std::string beside;
  // TCP, of several axes of a mesh: ranks along the last one, which lie next to one another. Gathers and reductions go
  // along the others and it one after the other (transport/collectives.h). 0: all at once.
  int64_t row = 0;
  // TCP: connections of their own for what two ranks send one another. Those of collectives may stand still until the
  // last rank has come, which may wait for just such a message. Of their channel; -1: of collectives.
  int64_t channel = -1;
};

class Comm {
 public:
  virtual ~Comm() = default;
  // Full i is [size * shard_i] and receives shard r at r * shard_i; shard i may already lie at its own place in full i
  // (no copy then).
  virtual Result<Ticket> StartGather(std::vector<at::Tensor> shards, std::vector<at::Tensor> fulls,
                                     std::string label) = 0;
  // shard i = sum over ranks, in rank order, of their flat i at [rank * shard_i]; shard i may be the own part of flat
  // i. 16-bit floats are added in float32 and rounded once (tcp).
  virtual Result<Ticket> StartReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                                     std::string label) = 0;
  // The same on a grid of the ranks (transport/collectives.h): flat i has a part for each rank of this one's row.
  virtual Result<Ticket> StartGridReduce(std::vector<at::Tensor> flats, std::vector<at::Tensor> shards,
                                         const RankGrid& grid, std::string label) = 0;
  // In-place sum (integers: exact in any order; floats: in rank order on tcp).
  virtual Result<Ticket> StartAllReduce(at::Tensor value, std::string label) = 0;
  // Part p of `from` goes to rank p, part p of `to` comes from it; as many equal parts as ranks, one after another.
  virtual Result<Ticket> StartAllToAll(at::Tensor from, at::Tensor to, std::string label) = 0;
  virtual Result<Ticket> StartBroadcast(at::Tensor value, int64_t root, std::string label) = 0;
  // What goes between two ranks matches in order.
  virtual Result<Ticket> StartSend(at::Tensor value, int64_t peer, std::string label) = 0;
  virtual Result<Ticket> StartRecv(at::Tensor value, int64_t peer, std::string label) = 0;
  virtual Status Wait(Ticket ticket) = 0;
  // The next StartReduce or StartAllReduce receives into this, until it is waited for, and not into a buffer of the
  // transport's own. Bytes: ReceiveBytes (ir/memory_plan.h). Transports without such a buffer have no use for it.
  virtual void OfferReceiveBuffer(at::Tensor /*bytes*/) {}
  // Moves what can be moved without waiting. Costs nothing when nothing is under way; to be called between the ops of a
  // step.
  virtual void Progress() {}
  // Ends this rank's part for good: its connections close, so that ranks that wait for it hear of it at once.
  virtual void Leave() {}

  struct Stats {
    int64_t bytes_sent = 0, bytes_received = 0, receive_buffer_peak_bytes = 0, calls = 0;
  };
  virtual Stats stats() const = 0;
  // Operations have moved as much once more, as part of a device graph.
  virtual void CountAgain(const Stats& /*more*/) {}
  virtual const AxisSpec& spec() const = 0;

  using Times = TransferTimes;
  // Operations started while recording is on are remembered until their times are taken.
  virtual void SetRecording(bool /*on*/) {}
  // Times of an operation that was waited for; zeros when it was not recorded.
  virtual Times TakeTimes(Ticket) { return {}; }
  // On devices: while recording is on, times are taken by marks in these, which outlive the recording.
  virtual void Watch(DeviceTimes* /*times*/) {}

  // Error: unknown group name, backend without support.
  static Result<std::unique_ptr<Comm>> Create(const AxisSpec& spec, double timeout_s);
};

}  // namespace interlace
