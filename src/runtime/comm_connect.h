// comm_connect.h — TCP connections between all ranks of a process group. The group is used twice, to exchange who is on
// which host and then where each rank listens; afterwards the ranks talk to each other directly.
//
// The address is that of GLOO_SOCKET_IFNAME (the first name) when it is set, loopback when all ranks share one host and
// network namespace, else the one the host's name stands for. A rank connects to every lower rank and accepts from
// every higher one. Each listener has a random secret that only the group's ranks learn; a connection that does not
// begin with it is dropped.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "runtime/comm.h"

namespace interlace {

// A file descriptor that is closed with its owner.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct PeerSockets {
  Socket data, control;
};

// Every rank's bytes, by rank; all ranks give the same number of bytes.
using ExchangeBytes = std::function<Result<std::vector<std::string>>(const std::string& mine)>;

// Two non-blocking connections to every peer, by rank (none to this rank). All ranks of the axis must call it together.
// Error: no address to listen on, or a rank that cannot be reached within the timeout.
Result<std::vector<PeerSockets>> ConnectPeers(const AxisSpec& spec, const ExchangeBytes& exchange, double timeout_s);

}  // namespace interlace
