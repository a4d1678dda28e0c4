// shared_rings.h — the bytes of a connection between two processes of one host: two rings in memory that both have, one
// each way. A byte is copied twice and no system call is made for it; loopback TCP copies as often, and takes it apart
// into segments in between (measured, both ways at once, a core each: 1 MiB in 0.10 ms and not 0.28).
//
//   put and taken count bytes since the beginning:   taken ........ put      (at most a ring's bytes apart)
//
// Who finds nothing to do sleeps on the connection's socket, after it has said here what it waits for; the other one
// then writes a byte into it. A socket that is closed is a peer that has gone, once its ring is empty.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>

#include "transport/socket_calls.h"

namespace interlace {

// Where one process finds the memory that another one made.
struct RingOffer {
  int32_t pid = 0, fd = -1;
  uint64_t bytes = 0;      // of a ring, a power of two
  uint8_t token[16] = {};  // at its beginning: a number of a descriptor may have come to mean something else
};

class SharedRings {
 public:
  // Of each of the rings that a rank has with so many: up to four ranks as much as a socket holds (connect.cc), of many
  // ranks together 12 MiB a rank each way.
  static uint64_t RingBytes(int64_t peers);

  // Whether this process may have any (INTERLACE_SHARED_MEMORY is not 0), and whether the system gives it some.
  static bool Allowed();
  static bool Work();

  // Null: the system does not allow it.
  static std::unique_ptr<SharedRings> Create(uint64_t ring_bytes);
  // Null likewise, and where the processes do not see one another, or belong to different users.
  static std::unique_ptr<SharedRings> Open(const RingOffer& offer);
  ~SharedRings();
  SharedRings(const SharedRings&) = delete;
  SharedRings& operator=(const SharedRings&) = delete;

  const RingOffer& offer() const { return offer_; }
  // Once the other process has opened it, or will not.
  void WithdrawOffer();

  // As sendmsg and recvmsg of a socket that does not block, errno included. The socket is that of the connection.
  ssize_t Send(SocketCalls& calls, int socket, const msghdr& message);
  ssize_t Receive(SocketCalls& calls, int socket, const msghdr& message);
  // Before a thread sleeps on the socket, for bytes to read or for room to write: false if there is something already.
  bool MaySleep(bool for_bytes, bool for_room);
  // Behind it; takes what woke it up.
  void Wake(SocketCalls& calls, int socket);

 private:
  struct Shared;
  SharedRings(Shared* shared, uint64_t ring_bytes, int side) : shared_(shared), bytes_(ring_bytes), side_(side) {}

  uint64_t Held(int ring) const;
  uint64_t Copy(const msghdr& message, int ring, uint64_t at, uint64_t count, bool put);

  Shared* shared_;
  uint64_t bytes_;
  int side_;  // whose puts are in ring `side_`
  RingOffer offer_;
  int hung_up_ = -1;  // the peer has gone: errno, or 0
};

}  // namespace interlace
