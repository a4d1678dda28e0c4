// connect.h — TCP connections between all ranks of a group. What the ranks already have to exchange a few bytes is used
// twice, for who is on which host and then for where each rank listens; afterwards they talk to each other directly.
//
// The address is that of GLOO_SOCKET_IFNAME (the first name) when it is set, loopback when all ranks share one host and
// network namespace, else the one the host's name stands for. A rank connects to every lower rank and accepts from
// every higher one. Each listener has a random secret that only the group's ranks learn; a connection that does not
// begin with it is dropped, and the listener is closed when all are there.
//
// INTERLACE_MESH_KEY (64 hexadecimal digits) is the key of a run that has a secret. With it a connection begins with a
// proof instead, and where ranks are on several hosts, frames have tags that nobody makes without it (frame_sum.h).
// With INTERLACE_ENCRYPT=1, too, frames are encrypted (cipher.h), on one host as well; all ranks must have it, or none.
//
// Ranks of one host that do not encrypt have their data in memory that both see (shared_rings.h), unless one of them has
// INTERLACE_SHARED_MEMORY=0 or the system does not allow it; the connection then wakes up who sleeps, and ends with its
// rank.
//
// The system asks the other end of the connection for notes whether its host is there, every few seconds: a host that
// is cut off ends it after kDeadSeconds, whatever the timeout of the operation.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "transport/group.h"
#include "transport/shared_rings.h"
#include "transport/socket_calls.h"

namespace interlace {

// A file descriptor that is closed with its owner.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd, SocketCalls& calls = SystemCalls()) : fd_(fd), calls_(&calls) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), calls_(other.calls_) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(calls_, other.calls_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) calls_->Close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
  SocketCalls* calls_ = nullptr;
};

inline constexpr int kDeadSeconds = 8;

struct PeerSockets {
  Socket data, control;
  std::unique_ptr<SharedRings> rings = {};      // with a peer of this host: what is sent on `data` goes through them
  std::string send_key = {}, receive_key = {};  // of the frames on `data`, 32 bytes; empty: they have checksums
  bool encrypts = false;                        // the keys are those of a cipher
};

// Gives every rank's bytes, in the order of the group; all ranks give the same number of bytes.
using ExchangeBytes = std::function<Result<std::vector<std::string>>(const std::string& mine)>;

// Two non-blocking connections to every peer, by index (none to this rank). All ranks of the group must call it
// together. `shares_memory`: with ranks that do so too, have the same host and see this process, what is sent goes
// through rings that both have. Error: no address to listen on, a rank that cannot be reached within the timeout, or
// one that encrypts where another does not.
Result<std::vector<PeerSockets>> ConnectPeers(const RankGroup& group, const ExchangeBytes& exchange, double timeout_s,
                                              SocketCalls& calls = SystemCalls(), bool shares_memory = false);

}  // namespace interlace
