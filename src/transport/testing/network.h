// network.h — a network in memory for ranks that are threads with turns (turns.h): streams of bytes as TCP has them, with
// buffers that fill, bytes that take a while, short writes and reads, interrupted waits, and ends that close or reset as
// Linux does it. On top of that come faults: where in which stream, or when to which ranks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/socket_calls.h"
#include "transport/testing/turns.h"

namespace interlace {

// To what one rank sends another, once, when byte `at` of that stream is sent; the greeting counts.
struct StreamFault {
  enum Kind { kFlip, kDrop, kInsert, kRepeat, kReorder, kDelay, kHalfClose, kVanish };
  Kind kind = kFlip;
  int from = 0, to = 0;
  bool control = false;  // in the stream of notes
  int64_t at = 0;
  int64_t bytes = 1;     // so many are changed
  int64_t delay_ns = 0;
  bool struck = false;
};

struct NetworkOptions {
  int64_t latency_ns = 50'000, jitter_ns = 0;
  int64_t buffer_bytes = 1 << 20;
  bool short_counts = false;  // writes and reads move less than they could
  bool interrupts = false;    // waits end without an event
};

class Network : public SocketCalls {
 public:
  Network(Turns& turns, uint64_t seed, NetworkOptions options) : turns_(turns), draw_(seed), options_(options) {}

  std::vector<StreamFault>& faults() { return faults_; }
  const std::vector<StreamFault>& faults() const { return faults_; }
  // The rank's process ends: the system closes what it had.
  void Kill(int rank);
  // Their connections are reset: that for data, that for notes.
  void Cut(int a, int b, bool data, bool control);
  // Where a rank listens; -1: it does not.
  int ListenerOf(int rank) const;
  // From now on nothing passes between the two, and nobody is told.
  void Separate(int a, int b);
  // What happened, a line each; with `on` from the beginning.
  void KeepTrace(bool on) { keeps_trace_ = on; }
  const std::string& trace() const { return trace_; }
  uint64_t digest() const { return digest_; }  // of all that happened
  int64_t calls() const { return calls_; }
  void Log(const std::string& line);  // into the trace

  int64_t Nanos() override {
    turns_.Tick();
    return turns_.now();
  }
  int Open(int family) override;
  int SetOption(int fd, int level, int name, const void* value, socklen_t size) override;
  int GetOption(int fd, int level, int name, void* value, socklen_t* size) override;
  int Bind(int fd, const sockaddr* name, socklen_t size) override;
  int Listen(int fd, int backlog) override;
  int NameOf(int fd, sockaddr* name, socklen_t* size) override;
  int Accept(int fd) override;
  int Connect(int fd, const sockaddr* name, socklen_t size) override;
  ssize_t Send(int fd, const msghdr& message, int flags) override;
  ssize_t Receive(int fd, msghdr& message, int flags) override;
  int Poll(pollfd* fds, nfds_t count, int timeout_ms) override;
  int Shutdown(int fd, int how) override;
  int Close(int fd) override;

 private:
  struct Segment {
    int64_t arrives;
    std::string bytes;
  };
  struct Stream {  // from one end to the other
    std::deque<Segment> segments;
    int64_t size = 0, sent = 0;  // bytes that wait in it; that were ever written
    int64_t last_ns = 0;         // when its newest segment arrives
    int64_t ends_ns = kNever;    // when its end does
    bool vanishes = false;       // what is sent from now on does not arrive
  };
  struct Socket {
    int rank = 0;
    int port = 0;
    bool listens = false, control = false, shut = false, closed = false, keeps_alive = false;
    std::deque<int> backlog;
    // Connected:
    int peer = -1;
    int64_t ready_ns = kNever;  // when it is
    Stream in;
    int64_t broken_ns = kNever;  // and with which error
    int error = 0;
  };
  Socket& At(int fd) { return *sockets_[static_cast<size_t>(fd - kFirst)]; }
  int Fail(int error);
  int64_t Latency();
  int64_t Arrived(const Socket& socket) const;
  short Events(int fd, short wanted);
  void Push(int fd, std::string bytes);
  void Strike(const StreamFault& fault, std::string& bytes, size_t place, Stream& out);
  void Break(int fd, int error, int64_t when_ns);
  void AskInVain(int fd);
  void End(int fd, bool reset);
  bool Between(const Socket& socket, int a, int b) const;
  bool Separated(int a, int b) const { return separated_.count({std::min(a, b), std::max(a, b)}) > 0; }

  static constexpr int kFirst = 1000;
  Turns& turns_;
  Draw draw_;
  const NetworkOptions options_;
  std::vector<StreamFault> faults_;
  std::vector<std::unique_ptr<Socket>> sockets_;
  std::map<std::pair<int, int>, int> connections_;  // that a rank made to another
  std::set<std::pair<int, int>> separated_;
  std::set<int> dead_;
  bool keeps_trace_ = false;
  std::string trace_;
  uint64_t digest_ = 14695981039346656037u;
  int64_t calls_ = 0;
};

}  // namespace interlace
