// mesh.h — the connections of one group of ranks: what is sent and received, by whom it is driven, and who failed.
//
// On each connection lies one frame per message, a header and the bytes of all its pieces; frames need no routing,
// because both ends start what they have with one another in the same order. Headers are numbered and name their
// operation, so that ranks that differ get an error and not wrong data. Bytes go from memory to the socket and back;
// what a peer sends before this rank has started the operation waits in the kernel's buffers.
//
// Behind the bytes stands their checksum (frame_sum.h): what was changed on the way is an error and not a wrong number.
// Where ranks encrypt, header and bytes are, and the checksum is the cipher's tag (cipher.h): what is sent is encrypted
// into a small buffer of the connection, piece by piece, and what comes is decrypted where it lies.
//
//   rank 0 to rank 1:   [header gather u0|bytes|checksum][header reduce u0|bytes|checksum] ...
//
// No thread is needed to move data: whoever starts, waits, or calls Progress between two ops, writes and reads what the
// sockets take without blocking. Where ranks share cores, a thread that has to be woken waits for a core for
// milliseconds, which is many times what a small transfer takes. Only when no one has come by for a while, because an
// op takes long, a helper thread does the same.
//
// From any thread. Operations that everyone takes part in start in the same order on all ranks; what only two ranks do
// must have its place between those on both of them.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/result.h"
#include "transport/cipher.h"
#include "transport/connect.h"
#include "transport/frame_sum.h"
#include "transport/group.h"
#include "transport/notes.h"
#include "transport/operation.h"
#include "transport/socket_calls.h"

namespace interlace {

struct MeshOptions {
  // How long a rank that closed may take to say why, and how long a rank that waits too may take to say so.
  int lost_patience_ms = 300;
  int silent_patience_ms = 500;
  bool helper = true;  // moves data when no one else comes by for a while
  SocketCalls* calls = nullptr;  // null: the system
};

class Mesh {
 public:
  // Connects the ranks; all of them must call it together. Error: a rank that cannot be reached.
  static Result<std::shared_ptr<Mesh>> Connect(const RankGroup& group, const ExchangeBytes& exchange, double timeout_s);
  // On connections that are there, by index in the group, not blocking; none to this rank.
  Mesh(RankGroup group, std::vector<PeerSockets> sockets, MeshOptions options = {});
  ~Mesh();

  // Queues an operation and sends what the sockets take at once.
  Status Start(Operation& operation);
  // Blocks until it is done but for the sums of its last round. Error: a rank was lost, is silent for timeout_s, or did
  // something else.
  Status Finish(Operation& operation, double timeout_s);
  // Moves what can be moved; nothing when nothing is under way, or when somebody did so less than 50 us ago.
  void Progress();
  // This rank stops for a reason of its own: closes its connections, so that nobody waits for it. No note is sent,
  // which makes this rank the culprit that the others name.
  void Leave();
  // What has made it unusable.
  std::optional<Error> failure() const;
  const RankGroup& group() const { return group_; }

 private:
  struct Header {
    uint32_t magic = 0;
    int32_t kind = 0;
    uint64_t number = 0, bytes = 0;
    char tag[40] = {};
  };
  struct Frame {
    Operation* operation = nullptr;
    size_t round = 0;
    Header header;  // what is sent; of a receive: what has come
    Header expected;
    std::vector<iovec> pieces;  // what is left; the header first, the tag last
    size_t at = 0;              // first piece that is not done
    size_t summed = 0;          // pieces whose bytes are in `sum` or encrypted, of what is sent
    FrameSum sum;
    FrameTag tag = {};                                       // what is sent; of a receive: what has come
    bool waits() const { return round > operation->round; }  // for a round before it
  };
  using Queue = std::deque<Frame>;  // in the order of issue
  struct Peer {
    PeerSockets sockets;
    std::unique_ptr<Cipher> seal, open;  // null: it is not encrypted
    std::vector<char> sealed;            // encrypted pieces that have not all been sent
    size_t sealed_bytes = 0;
    Queue out, in;
    uint64_t sent = 0, received = 0;  // frames that were ever queued
    bool held = false;                // its next frame may not begin yet: FirstToHold, or a round before it
    int error = -1;                   // of the connection for data, errno or 0: it was closed; -1: none
    bool differs = false;             // the header that came is not the one expected, or
    bool damaged = false;             // the bytes are not those that were sent
    Witness witness;
    Note note;  // as far as it has come
    size_t note_bytes = 0;
  };

  void Enqueue(Operation& operation);  // with the lock, as all below
  bool Drive();                        // whether anything moved
  uint64_t FirstToHold() const;
  bool Write(Peer& peer, uint64_t hold);
  bool Read(Peer& peer);
  static size_t Collect(Peer& peer, const uint64_t* hold, iovec* batch, msghdr& message);
  ssize_t Send(Peer& peer, const msghdr& message);
  ssize_t Receive(Peer& peer, msghdr& message);
  static bool SumPiece(Peer& peer, Frame& frame, size_t piece);
  static size_t Take(Frame& frame, size_t bytes);
  static size_t TakeIn(Peer& peer, size_t bytes);
  void Close(Queue& queue);  // its first frame is done
  void Advance(Operation& operation);
  void ReadNote(Peer& peer);
  void Tell(Note note);
  void FindUnfinished(const Operation& operation, std::vector<bool>& found) const;
  std::vector<int> Unfinished(const Operation& operation) const;
  bool MustStop(const Operation& operation) const;
  double CollectEvents(std::vector<pollfd>& events) const;
  Error Fail(const Operation& operation, double elapsed_s);
  void Listen(int64_t patience_ms, bool all);
  Verdict JudgePeers(const Note& own);
  void Shut(bool control);
  void HelperLoop();

  const RankGroup group_;
  const MeshOptions options_;
  SocketCalls& calls_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;
  uint64_t next_number_ = 0;
  bool advanced_ = false;  // a round has ended: what waited for it may begin
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
