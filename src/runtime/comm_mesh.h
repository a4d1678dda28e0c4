// comm_mesh.h — the connections of one process group on the CPU, shared by all Comms on it: what is sent and received,
// by whom it is driven, and who failed.
//
// All ranks start the same operations in the same order, so data needs no tags: on each connection lies one frame per
// operation, a header (which names the operation, so that ranks that differ get an error and not wrong data) and the
// bytes of all its pieces. Bytes go from the tensors to the socket and back; what a peer sends before this rank has
// started the operation waits in the kernel's buffers.
//
// No thread is needed to move data: whoever starts, waits, or calls Progress between two ops, writes and reads what the
// sockets take without blocking. Where ranks share cores, a thread that has to be woken waits for a core for
// milliseconds, which is many times what a small transfer takes. Only when no one has come by for a while, because an
// op takes long, a helper thread does the same.
//
// A mesh outlives its Comms: as long as its group lives, a later Comm goes on with the same connections.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "runtime/comm.h"
#include "runtime/comm_connect.h"
#include "runtime/comm_notes.h"

namespace interlace {

// Of the steady clock.
inline int64_t NanosNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One operation's transfers on this rank. Its memory must stay until the operation is done or the mesh has failed.
struct Exchange {
  std::string label;
  int32_t kind = 0;                                 // the same on all ranks
  std::vector<std::vector<iovec>> sends, receives;  // by peer; none for this rank
  // Written by the mesh, nanoseconds of the steady clock: the first byte was handed over; everything has come and gone.
  int64_t begin_ns = 0, end_ns = 0;

 private:
  friend class SocketMesh;
  uint64_t number = 0;
  int open = 0;  // frames that are not done
};

class SocketMesh {
 public:
  // The mesh of the spec's process group; connects the ranks when it is the first. Error: unknown group name, wrong
  // rank or size, a group without a CPU backend, a rank that cannot be reached.
  static Result<std::shared_ptr<SocketMesh>> Open(const AxisSpec& spec, double timeout_s);
  ~SocketMesh();

  // Queues an operation and sends what the sockets take at once.
  Status Start(Exchange& exchange);
  // Blocks until it is done. Error: a rank was lost, is silent for timeout_s, or did something else.
  Status Finish(Exchange& exchange, double timeout_s);
  // Moves what can be moved; nothing when nothing is under way, or when somebody did so less than 50 us ago.
  void Progress();
  // This rank stops for a reason of its own: closes its connections, so that nobody waits for it. No note is sent,
  // which makes this rank the culprit that the others name.
  void Leave();
  std::optional<Error> failure() const;

 private:
  struct Header {
    uint32_t magic = 0;
    int32_t kind = 0;
    uint64_t number = 0, bytes = 0;
    char label[40] = {};
  };
  struct Frame {
    Exchange* exchange = nullptr;
    Header header;  // what is sent; of a receive: what has come
    Header expected;
    std::vector<iovec> pieces;  // what is left; the header first
    size_t at = 0;              // first piece that is not done
  };
  struct Peer {
    PeerSockets sockets;
    std::deque<Frame> out, in;  // in the order of issue
    bool held = false;          // its next frame may not begin yet: FirstToHold
    int error = -1;             // of the connection for data, errno or 0: it was closed; -1: none
    bool differs = false;       // the header that came is not the one expected
    Witness witness;
    Note note;  // as far as it has come
    size_t note_bytes = 0;
  };

  SocketMesh() = default;
  Header HeaderOf(const Exchange& exchange, const std::vector<iovec>& pieces) const;
  bool Drive();  // with the lock, as all below; whether anything moved
  uint64_t FirstToHold() const;
  bool Write(Peer& peer, uint64_t hold);
  bool Read(Peer& peer);
  static size_t Collect(std::deque<Frame>& queue, uint64_t hold, iovec* batch, msghdr& message);
  static size_t Take(Frame& frame, size_t bytes);
  void Close(std::deque<Frame>& queue);  // its first frame is done
  void ReadNote(Peer& peer);
  void Tell(const Note& note);
  // The peers that something of this operation or an earlier one has still to go to or come from.
  std::vector<int> Unfinished(const Exchange& exchange) const;
  Error Fail(const Exchange& exchange, double elapsed_s);
  void Listen(int64_t patience_ms, bool all);
  Verdict JudgePeers(const Note& own);
  void Shut(bool control);
  void HelperLoop();

  std::string axis_;
  int rank_ = 0, size_ = 1;
  std::vector<uint64_t> global_ranks_;  // by rank of the group; empty where the group does not know
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t next_number_ = 0;
  std::optional<Error> failure_;

  std::atomic<int> in_flight_ = 0;      // operations that are not done
  std::atomic<int> waiting_ = 0;        // threads in Finish
  std::atomic<int64_t> driven_ns_ = 0;  // when somebody last moved data
  std::mutex helper_mutex_;             // held for moments only
  std::condition_variable helper_wakes_;
  std::atomic<bool> helper_sleeps_ = false;
  bool stop_ = false;
  std::thread helper_;
};

}  // namespace interlace
