// socket_calls.h — what the transport asks of the system: sockets, and the clock that its deadlines are on. Each function
// is the call in its body, errno included. Tests put a network of their own in its place (testing/network.h), where time
// and everything that can go wrong are theirs.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

#include "base/clock.h"

namespace interlace {

class SocketCalls {
 public:
  virtual ~SocketCalls() = default;
  virtual int64_t Nanos() { return NanosNow(); }
  virtual int Open(int family) { return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }
  virtual int SetOption(int fd, int level, int name, const void* value, socklen_t size) {
    return setsockopt(fd, level, name, value, size);
  }
  virtual int GetOption(int fd, int level, int name, void* value, socklen_t* size) {
    return getsockopt(fd, level, name, value, size);
  }
  virtual int Bind(int fd, const sockaddr* name, socklen_t size) { return bind(fd, name, size); }
  virtual int Listen(int fd, int backlog) { return listen(fd, backlog); }
  virtual int NameOf(int fd, sockaddr* name, socklen_t* size) { return getsockname(fd, name, size); }
  virtual int Accept(int fd) { return accept4(fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }
  virtual int Connect(int fd, const sockaddr* name, socklen_t size) { return connect(fd, name, size); }
  virtual ssize_t Send(int fd, const msghdr& message, int flags) { return sendmsg(fd, &message, flags); }
  virtual ssize_t Receive(int fd, msghdr& message, int flags) { return recvmsg(fd, &message, flags); }
  virtual int Poll(pollfd* fds, nfds_t count, int timeout_ms) { return poll(fds, count, timeout_ms); }
  virtual int Shutdown(int fd, int how) { return shutdown(fd, how); }
  virtual int Close(int fd) { return close(fd); }

  // The same for one piece of memory.
  ssize_t SendBytes(int fd, const void* data, size_t size, int flags) {
    iovec piece{const_cast<void*>(data), size};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    return Send(fd, message, flags);
  }
  ssize_t ReceiveBytes(int fd, void* data, size_t size, int flags) {
    iovec piece{data, size};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    return Receive(fd, message, flags);
  }
};

inline SocketCalls& SystemCalls() {
  static SocketCalls calls;
  return calls;
}

}  // namespace interlace
