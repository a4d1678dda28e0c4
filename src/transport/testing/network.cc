#include "transport/testing/network.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/connect.h"

namespace interlace {

int Network::Fail(int error) {
  errno = error;
  return -1;
}

int64_t Network::Latency() {
  return options_.latency_ns + (options_.jitter_ns > 0 ? draw_.Below(options_.jitter_ns) : 0);
}

// Its digest is of all lines, kept or not.
void Network::Log(const std::string& line) {
  const std::string whole =
      std::to_string(turns_.now() / 1000) + " us, " + std::to_string(turns_.self()) + ": " + line + "\n";
  for (const char c : whole) digest_ = (digest_ ^ static_cast<unsigned char>(c)) * 1099511628211u;
  if (keeps_trace_) trace_ += whole;
}

int Network::Open(int) {
  sockets_.push_back(std::make_unique<Socket>());
  sockets_.back()->rank = turns_.self();
  return kFirst + static_cast<int>(sockets_.size()) - 1;
}

int Network::SetOption(int fd, int level, int name, const void*, socklen_t) {
  if (level != SOL_SOCKET || name != SO_KEEPALIVE) return 0;
  At(fd).keeps_alive = true;
  if (Separated(At(fd).rank, At(At(fd).peer).rank)) AskInVain(fd);
  return 0;
}

int Network::GetOption(int fd, int level, int name, void* value, socklen_t* size) {
  Socket& socket = At(fd);
  if (level == SOL_SOCKET && name == SO_ERROR) {
    const int error = socket.broken_ns <= turns_.now() ? socket.error : 0;
    std::memcpy(value, &error, sizeof error);
    return 0;
  }
  if (level != IPPROTO_TCP || name != TCP_INFO) return Fail(EINVAL);
  tcp_info info{};
  info.tcpi_delivery_rate = 50'000'000;
  if (socket.peer >= 0) {
    for (const Segment& segment : At(socket.peer).in.segments) {
      if (segment.arrives > turns_.now()) info.tcpi_notsent_bytes += static_cast<uint32_t>(segment.bytes.size());
    }
  }
  *size = std::min<socklen_t>(*size, sizeof info);
  std::memcpy(value, &info, *size);
  return 0;
}

int Network::Bind(int fd, const sockaddr*, socklen_t) {
  At(fd).port = fd;
  return 0;
}

int Network::Listen(int fd, int) {
  At(fd).listens = true;
  return 0;
}

int Network::NameOf(int fd, sockaddr* name, socklen_t* size) {
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  here.sin_port = htons(static_cast<uint16_t>(At(fd).port));
  std::memcpy(name, &here, *size = sizeof here);
  return 0;
}

int Network::Connect(int fd, const sockaddr* name, socklen_t) {
  turns_.Pause();
  Socket& socket = At(fd);
  sockaddr_in there;
  std::memcpy(&there, name, sizeof there);
  const int port = ntohs(there.sin_port);
  Socket& listening = At(port);
  const int64_t when = turns_.now() + Latency();
  turns_.At(when);
  Log("connects to rank " + std::to_string(listening.rank));
  if (Separated(socket.rank, listening.rank)) return Fail(EINPROGRESS);
  if (listening.closed || !listening.listens) {
    Break(fd, ECONNREFUSED, when);
    return Fail(EINPROGRESS);
  }
  const int far = Open(AF_INET);
  Socket& accepted = At(far);
  accepted.rank = listening.rank;
  accepted.peer = fd;
  socket.peer = far;
  accepted.control = socket.control = connections_[{socket.rank, listening.rank}]++ == 1;
  accepted.ready_ns = socket.ready_ns = when;
  listening.backlog.push_back(far);
  return Fail(EINPROGRESS);
}

int Network::Accept(int fd) {
  turns_.Pause();
  Socket& socket = At(fd);
  if (socket.backlog.empty() || At(socket.backlog.front()).ready_ns > turns_.now()) return Fail(EAGAIN);
  const int made = socket.backlog.front();
  socket.backlog.pop_front();
  Log("accepts rank " + std::to_string(At(At(made).peer).rank));
  return made;
}

int64_t Network::Arrived(const Socket& socket) const {
  int64_t bytes = 0;
  for (const Segment& segment : socket.in.segments) {
    if (segment.arrives > turns_.now()) break;
    bytes += static_cast<int64_t>(segment.bytes.size());
  }
  return bytes;
}

// An error of the connection, from `when_ns` on; the first one stays.
void Network::Break(int fd, int error, int64_t when_ns) {
  Socket& socket = At(fd);
  if (when_ns >= socket.broken_ns) return;
  socket.broken_ns = when_ns;
  socket.error = error;
  turns_.At(when_ns);
}

// The system asks for a while whether anybody is there (connect.h).
void Network::AskInVain(int fd) {
  Break(fd, ETIMEDOUT, turns_.now() + kDeadSeconds * int64_t{1'000'000'000} + draw_.Below(4'000'000'000));
}

// What is sent, with what its stream's faults make of it.
void Network::Push(int fd, std::string bytes) {
  Socket& socket = At(fd);
  Stream& out = At(socket.peer).in;
  const int64_t begin = out.sent;
  out.sent += static_cast<int64_t>(bytes.size());
  out.size += static_cast<int64_t>(bytes.size());
  for (StreamFault& fault : faults_) {
    if (fault.struck || fault.from != socket.rank || fault.to != At(socket.peer).rank || fault.control != socket.control)
      continue;
    if (fault.at < begin || fault.at >= out.sent) continue;
    fault.struck = true;
    const size_t before = bytes.size();
    Strike(fault, bytes, static_cast<size_t>(fault.at - begin), out);
    out.size += static_cast<int64_t>(bytes.size()) - static_cast<int64_t>(before);
  }
  if (out.vanishes || Separated(socket.rank, At(socket.peer).rank)) {
    out.vanishes = true;
    return;  // its room stays taken: the other end says nothing of it
  }
  // In a few pieces, later than all before them.
  while (!bytes.empty() && out.ends_ns == kNever) {
    const auto size = static_cast<size_t>(
        draw_.OneIn(3) ? draw_.OfAnySize(static_cast<int64_t>(bytes.size()) + 1) : static_cast<int64_t>(bytes.size()));
    out.last_ns = std::max(out.last_ns, turns_.now() + Latency());
    out.segments.push_back({out.last_ns, bytes.substr(0, size)});
    turns_.At(out.last_ns);
    bytes.erase(0, size);
  }
}

void Network::Strike(const StreamFault& fault, std::string& bytes, size_t place, Stream& out) {
  const auto length = std::min(static_cast<size_t>(fault.bytes), bytes.size() - place);
  const int64_t soon = turns_.now() + Latency();
  Log("fault " + std::to_string(fault.kind) + " strikes what goes to " + std::to_string(fault.to));
  switch (fault.kind) {
    case StreamFault::kFlip:
      for (size_t i = 0; i < length; ++i) bytes[place + i] ^= static_cast<char>(draw_.Between(1, 255));
      break;
    case StreamFault::kDrop:
      bytes.erase(place, length);
      break;
    case StreamFault::kInsert:
      for (size_t i = 0; i < length; ++i) bytes.insert(place, 1, static_cast<char>(draw_.Bits()));
      break;
    case StreamFault::kRepeat:
      bytes.insert(place, bytes.substr(place, length));
      break;
    case StreamFault::kReorder:
      std::rotate(bytes.begin() + static_cast<long>(place), bytes.begin() + static_cast<long>(place + length / 2),
                  bytes.begin() + static_cast<long>(place + length));
      break;
    case StreamFault::kDelay:
      out.last_ns = std::max(out.last_ns, turns_.now()) + fault.delay_ns;
      break;
    case StreamFault::kHalfClose:  // the sender does not know
      bytes.resize(place);
      out.last_ns = std::max(out.last_ns, soon);
      out.segments.push_back({out.last_ns, bytes});
      out.ends_ns = out.last_ns;
      turns_.At(out.ends_ns);
      bytes.clear();
      break;
    case StreamFault::kVanish:
      out.vanishes = true;
      break;
  }
}

ssize_t Network::Send(int fd, const msghdr& message, int) {
  turns_.Pause();
  ++calls_;
  Socket& socket = At(fd);
  if (dead_.count(socket.rank) > 0 || turns_.over()) return Fail(ECONNRESET);
  if (socket.broken_ns <= turns_.now()) return Fail(socket.error == ECONNRESET ? EPIPE : socket.error);
  if (socket.shut || socket.peer < 0) return Fail(EPIPE);
  Socket& far = At(socket.peer);
  int64_t total = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) total += static_cast<int64_t>(message.msg_iov[i].iov_len);
  int64_t room = std::min(total, options_.buffer_bytes - far.in.size);
  // A few bytes always fit into an empty buffer: greetings and notes.
  if (total <= 512 && far.in.sent == 0) room = total;
  if (socket.control) room = total;
  if (room <= 0) return Fail(EAGAIN);
  if (options_.short_counts && !socket.control && far.in.sent > 0 && draw_.OneIn(2)) room = draw_.OfAnySize(room + 1);
  std::string bytes;
  for (size_t i = 0; i < message.msg_iovlen && static_cast<int64_t>(bytes.size()) < room; ++i) {
    const iovec& piece = message.msg_iov[i];
    bytes.append(static_cast<const char*>(piece.iov_base),
                 std::min(piece.iov_len, static_cast<size_t>(room) - bytes.size()));
  }
  Log("sends " + std::to_string(room) + " to " + std::to_string(far.rank) + (socket.control ? " as a note" : ""));
  if (far.closed || far.shut) {  // its system answers that nobody reads that
    if (!Separated(socket.rank, far.rank)) Break(fd, ECONNRESET, turns_.now() + 2 * Latency());
  } else {
    Push(fd, std::move(bytes));
  }
  return room;
}

ssize_t Network::Receive(int fd, msghdr& message, int) {
  turns_.Pause();
  ++calls_;
  Socket& socket = At(fd);
  if (dead_.count(socket.rank) > 0 || turns_.over()) return Fail(ECONNRESET);
  int64_t left = Arrived(socket);
  if (left == 0) {
    if (socket.broken_ns <= turns_.now()) return Fail(socket.error);
    if (socket.shut || (socket.in.ends_ns <= turns_.now() && socket.in.segments.empty())) return 0;
    return Fail(EAGAIN);
  }
  if (options_.short_counts && draw_.OneIn(2)) left = draw_.OfAnySize(left + 1);
  int64_t got = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) {
    auto* at = static_cast<char*>(message.msg_iov[i].iov_base);
    size_t room = message.msg_iov[i].iov_len;
    while (room > 0 && left > 0) {
      std::string& bytes = socket.in.segments.front().bytes;
      const size_t taken = std::min({room, bytes.size(), static_cast<size_t>(left)});
      std::memcpy(at, bytes.data(), taken);
      bytes.erase(0, taken);
      if (bytes.empty()) socket.in.segments.pop_front();
      at += taken, room -= taken, left -= static_cast<int64_t>(taken), got += static_cast<int64_t>(taken);
    }
  }
  socket.in.size -= got;
  Log("reads " + std::to_string(got) + " of " + std::to_string(At(socket.peer).rank));
  return got;
}

short Network::Events(int fd, short wanted) {
  if (fd < kFirst) return 0;
  const Socket& socket = At(fd);
  const int64_t now = turns_.now();
  if (dead_.count(socket.rank) > 0 || turns_.over() || socket.broken_ns <= now)
    return static_cast<short>(POLLERR | POLLHUP | wanted);
  int events = 0;
  if (socket.listens) return !socket.backlog.empty() && At(socket.backlog.front()).ready_ns <= now ? POLLIN : 0;
  if (socket.ready_ns > now) return 0;
  if (Arrived(socket) > 0 || socket.shut || (socket.in.ends_ns <= now && socket.in.segments.empty())) events |= POLLIN;
  if (socket.shut || At(socket.peer).in.size < options_.buffer_bytes) events |= POLLOUT;
  return static_cast<short>(events & wanted);
}

int Network::Poll(pollfd* fds, nfds_t count, int timeout_ms) {
  ++calls_;
  for (nfds_t i = 0; i < count; ++i) {
    if (fds[i].fd < kFirst || dead_.count(At(fds[i].fd).rank) == 0) continue;
    turns_.Sleep(std::max(timeout_ms, 1) * int64_t{1'000'000});  // what has been killed does nothing: its deadline comes
    break;
  }
  const auto look = [this, fds, count] {
    int ready = 0;
    for (nfds_t i = 0; i < count; ++i) ready += (fds[i].revents = Events(fds[i].fd, fds[i].events)) != 0;
    return ready;
  };
  if (options_.interrupts && draw_.OneIn(10)) {
    turns_.Pause();
    return Fail(EINTR);
  }
  turns_.Wait([&] { return look() > 0; }, timeout_ms < 0 ? kNever : turns_.now() + timeout_ms * int64_t{1'000'000});
  return look();
}

// The writing end stops. With `reset`, what has not arrived yet may be lost, and the other end gets an error.
void Network::End(int fd, bool reset) {
  Socket& socket = At(fd);
  if (socket.peer < 0 || socket.shut) return;
  socket.shut = true;
  Socket& far = At(socket.peer);
  Stream& out = far.in;
  if (out.vanishes || Separated(socket.rank, far.rank)) return;
  const int64_t when = turns_.now() + Latency();
  if (reset) {
    while (!out.segments.empty() && out.segments.back().arrives > when) out.segments.pop_back();
    Break(socket.peer, ECONNRESET, when);
  }
  out.ends_ns = std::min(out.ends_ns, std::max(out.last_ns, when));
  turns_.At(out.ends_ns);
}

int Network::Shutdown(int fd, int) {
  turns_.Pause();
  Log("shuts its end to " + std::to_string(At(fd).peer < 0 ? -1 : At(At(fd).peer).rank));
  End(fd, /*reset=*/false);
  return 0;
}

int Network::Close(int fd) {
  Socket& socket = At(fd);
  socket.closed = true;
  if (socket.listens) {
    for (const int guest : socket.backlog) Close(guest);
    return 0;
  }
  const bool unread = Arrived(socket) > 0;
  if (socket.shut && unread && socket.peer >= 0 && !Separated(socket.rank, At(socket.peer).rank))
    Break(socket.peer, ECONNRESET, turns_.now() + Latency());
  End(fd, unread);
  return 0;
}

void Network::Kill(int rank) {
  Log("rank " + std::to_string(rank) + " is killed");
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (sockets_[i]->rank == rank && !sockets_[i]->closed) Close(kFirst + static_cast<int>(i));
  }
  dead_.insert(rank);
}

void Network::Cut(int a, int b, bool data, bool control) {
  Log("connections of " + std::to_string(a) + " and " + std::to_string(b) + " are cut");
  const int64_t when = turns_.now() + Latency();
  for (size_t i = 0; i < sockets_.size(); ++i) {
    Socket& socket = *sockets_[i];
    if (!Between(socket, a, b) || !(socket.control ? control : data)) continue;
    Break(kFirst + static_cast<int>(i), ECONNRESET, when);
    std::deque<Segment>& coming = socket.in.segments;
    while (!coming.empty() && coming.back().arrives > when) coming.pop_back();
  }
}

int Network::ListenerOf(int rank) const {
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (sockets_[i]->rank == rank && sockets_[i]->listens && !sockets_[i]->closed) return kFirst + static_cast<int>(i);
  }
  return -1;
}

bool Network::Between(const Socket& socket, int a, int b) const {
  if (socket.peer < 0) return false;
  const int far = sockets_[static_cast<size_t>(socket.peer - kFirst)]->rank;
  return (socket.rank == a && far == b) || (socket.rank == b && far == a);
}

void Network::Separate(int a, int b) {
  Log("nothing passes between " + std::to_string(a) + " and " + std::to_string(b));
  separated_.insert({std::min(a, b), std::max(a, b)});
  for (size_t i = 0; i < sockets_.size(); ++i) {
    Socket& socket = *sockets_[i];
    if (!Between(socket, a, b)) continue;
    Stream& in = socket.in;
    while (!in.segments.empty() && in.segments.back().arrives > turns_.now()) in.segments.pop_back();
    if (in.ends_ns > turns_.now()) in.ends_ns = kNever;
    if (socket.broken_ns > turns_.now()) socket.broken_ns = kNever;
    in.vanishes = true;
    if (socket.keeps_alive && !socket.closed) AskInVain(kFirst + static_cast<int>(i));
  }
}

}  // namespace interlace
