// The moving of data. What happens after a failure: mesh_failure.cc.
#include "transport/mesh.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

namespace interlace {

namespace {

constexpr uint32_t kFrameMagic = 0x464d4c49;  // "ILMF"
constexpr int kBatch = 64;                    // pieces of one system call
constexpr size_t kPieceBytes = 256 << 10;     // at most, and of one system call about as much: what was summed is sent, and
                                              // what has come is summed, while it lies in the cache
constexpr size_t kSealedBytes = 2 * kPieceBytes;  // of a connection's buffer for what is encrypted
constexpr int64_t kBetweenOpsNs = 50'000;     // Progress looks at the sockets no more often
// A wait looks at the sockets for so long before it sleeps: a core that went to sleep takes about 100 us to come back
// (measured: a step of 118 short waits took 30 ms, and 16 ms with this).
constexpr int64_t kSpinNs = 50'000;
constexpr auto kHelperPause = std::chrono::milliseconds(1);
constexpr double kRingSleepMs = 20;  // another thread that waits may take the byte that was to wake this one
constexpr double kMomentS = 1e-3;  // of sending that FirstToHold does not mind
constexpr double kStoppedNs = 1e8;  // that a wait takes longer than it should: this process was stopped
constexpr int kHelperQuiet = 50;   // pauses without any operation after which the helper sleeps for good

// Whether the kernel holds more than a moment's worth of bytes that this connection has not sent.
bool SendsForLong(SocketCalls& calls, int fd) {
  tcp_info info = {};
  socklen_t size = sizeof info;
  if (calls.GetOption(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  if (size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) return false;
  return info.tcpi_notsent_bytes > kMomentS * static_cast<double>(info.tcpi_delivery_rate);
}

// Null also while a benchmark leaves it out.
Cipher* InUse(const std::unique_ptr<Cipher>& cipher) { return FrameSum::left_out() ? nullptr : cipher.get(); }

}  // namespace

Result<std::shared_ptr<Mesh>> Mesh::Connect(const RankGroup& group, const ExchangeBytes& exchange, double timeout_s) {
  INTERLACE_ASSIGN(std::vector<PeerSockets> sockets, ConnectPeers(group, exchange, timeout_s, SystemCalls(), SharedRings::Allowed()));
  return std::make_shared<Mesh>(group, std::move(sockets));
}

Mesh::Mesh(RankGroup group, std::vector<PeerSockets> sockets, MeshOptions options)
    : group_(std::move(group)),
      options_(options),
      calls_(options.calls ? *options.calls : SystemCalls()),
      peers_(sockets.size()) {
  for (size_t i = 0; i < sockets.size(); ++i) {
    peers_[i].sockets = std::move(sockets[i]);
    if (!peers_[i].sockets.encrypts) continue;
    peers_[i].seal = std::make_unique<Cipher>(std::exchange(peers_[i].sockets.send_key, {}), /*encrypts=*/true);
    peers_[i].open = std::make_unique<Cipher>(std::exchange(peers_[i].sockets.receive_key, {}), /*encrypts=*/false);
  }
  if (options_.helper) helper_ = std::thread([this] { HelperLoop(); });
}

Mesh::~Mesh() {
  {
    std::lock_guard lock(helper_mutex_);
    stop_ = true;
  }
  helper_wakes_.notify_one();
  if (helper_.joinable()) helper_.join();
}

Status Mesh::Start(Operation& operation) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return *failure_;
    Enqueue(operation);
    if (failure_) {  // a message is too large
      Shut(/*control=*/true);
      return *failure_;
    }
    ++in_flight_;
    Advance(operation);  // past rounds in which this rank has no part
    Drive();
  }
  if (in_flight_ > 0 && helper_sleeps_) {
    std::lock_guard lock(helper_mutex_);
    helper_wakes_.notify_one();
  }
  return Ok{};
}

void Mesh::Enqueue(Operation& operation) {
  operation.number = next_number_++;
  operation.open.assign(operation.rounds.size(), 0);
  const auto add = [&](Queue& queue, uint64_t& count, const std::string& key, size_t round, const PeerSpan& piece) {
    const Peer& peer = peers_[piece.peer];
    if (queue.empty() || queue.back().operation != &operation || queue.back().round != round) {
      Frame& made = queue.emplace_back();
      made.operation = &operation;
      made.round = round;
      made.expected.magic = kFrameMagic;
      made.expected.kind = operation.kind;
      made.expected.number = count++;
      operation.tag.copy(made.expected.tag, sizeof(made.expected.tag) - 1);
      made.sum = peer.sockets.rings ? FrameSum::None() : FrameSum(key, made.expected.number);
      made.pieces.push_back({&made.header, sizeof made.header});
      ++operation.open[round];
    }
    Frame& frame = queue.back();
    frame.expected.bytes += piece.bytes;
    if (peer.seal && frame.expected.bytes > Cipher::kMostBytes)
      failure_ = MakeError(operation.label, ": more than 63 GiB at once cannot be encrypted; use more ranks or units");
    for (size_t at = 0; at < piece.bytes; at += kPieceBytes)
      frame.pieces.push_back({piece.data + at, std::min(kPieceBytes, piece.bytes - at)});
  };
  for (size_t i = 0; i < operation.rounds.size(); ++i) {
    const Round& round = operation.rounds[i];
    for (const PeerSpan& piece : round.sends) {
      Peer& peer = peers_[piece.peer];
      add(peer.out, peer.sent, peer.sockets.send_key, i, piece);
    }
    for (const PeerSpan& piece : round.receives) {
      Peer& peer = peers_[piece.peer];
      add(peer.in, peer.received, peer.sockets.receive_key, i, piece);
    }
  }
  const auto end = [&](Frame& frame) { frame.pieces.push_back({frame.tag.data(), frame.tag.size()}); };
  for (Peer& peer : peers_) {
    for (auto frame = peer.out.rbegin(); frame != peer.out.rend() && frame->operation == &operation; ++frame) {
      frame->header = frame->expected;
      end(*frame);
    }
    for (auto frame = peer.in.rbegin(); frame != peer.in.rend() && frame->operation == &operation; ++frame) end(*frame);
  }
}

void Mesh::Progress() {
  if (in_flight_.load(std::memory_order_relaxed) == 0) return;
  if (calls_.Nanos() - driven_ns_.load(std::memory_order_relaxed) < kBetweenOpsNs) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);  // else another thread is at it
  if (lock && !failure_) Drive();
}

// Rank r begins with r + 1, so that no rank is everybody's first.
bool Mesh::Drive() {
  bool moved = false;
  const int size = group_.size();
  do {
    advanced_ = false;
    const uint64_t hold = FirstToHold();
    for (int d = 1; d < size; ++d) moved |= Write(peers_[(group_.index + d) % size], hold);
    for (int d = 1; d < size; ++d) moved |= Read(peers_[(group_.index + d) % size]);
  } while (advanced_);
  driven_ns_ = calls_.Nanos();
  return moved;
}

// The first operation that may not begin to be sent. All connections share one link: what goes to a peer that is ahead
// takes its share from what another peer still waits for, and ranks once apart stay so, each idle in turn. So an
// operation begins when every connection has sent, but for a moment's worth, what comes before it. Measured with four
// ranks at 250 Mbit/s and TCP's bbr, the same gathers back to back, twelve times each: median 1.04 s and two beyond 1.2
// s; without this 1.08 s and five. With cubic 0.97 s either way.
// What not everyone takes part in is never held: a peer may wait for it before it takes what others wait for.
uint64_t Mesh::FirstToHold() const {
  constexpr uint64_t kNothing = std::numeric_limits<uint64_t>::max();
  if (group_.size() == 2) return kNothing;
  const auto first = [](const Peer& peer) -> const Frame* {
    return !peer.out.empty() && peer.out.front().operation->everyone ? &peer.out.front() : nullptr;
  };
  uint64_t next = kNothing;
  for (const Peer& peer : peers_) {
    if (const Frame* frame = first(peer)) next = std::min(next, frame->operation->number);
  }
  if (next == kNothing) return kNothing;
  for (const Peer& peer : peers_) {
    if (const Frame* frame = first(peer); frame && frame->operation->number == next && frame->at > 0)
      return next + 1;  // begun
  }
  for (const Peer& peer : peers_) {
    if (first(peer) && peer.error < 0 && !peer.sockets.rings && SendsForLong(calls_, peer.sockets.data.fd())) return next;
  }
  return next + 1;
}

// Adds a piece that is about to be sent to the frame's sum, or encrypts it; of the last piece it makes the tag. False:
// what is encrypted has no room until more of it has been sent.
bool Mesh::SumPiece(Peer& peer, Frame& frame, size_t piece) {
  if (piece < frame.summed) return true;
  Cipher* const seal = InUse(peer.seal);
  iovec& bytes = frame.pieces[piece];
  if (piece + 1 == frame.pieces.size()) {
    frame.tag = seal ? seal->Tag() : frame.sum.Finish();
  } else if (!seal) {
    frame.sum.Add(bytes.iov_base, bytes.iov_len);
  } else {
    void* to = bytes.iov_base;  // the header stays where it is
    if (piece == 0) {
      seal->Begin(frame.header.number);
    } else {
      peer.sealed.resize(kSealedBytes);
      if (peer.sealed_bytes + bytes.iov_len > kSealedBytes) return false;
      to = peer.sealed.data() + peer.sealed_bytes;
      peer.sealed_bytes += bytes.iov_len;
    }
    seal->Apply(bytes.iov_base, to, bytes.iov_len);
    bytes.iov_base = to;
  }
  ++frame.summed;
  return true;
}

// Pieces of the first frames, up to kBatch; gives their bytes. With `hold`, of those that may be sent: all that are
// encrypted are among them.
size_t Mesh::Collect(Peer& peer, const uint64_t* hold, iovec* batch, msghdr& message) {
  size_t bytes = 0;
  message = {};
  message.msg_iov = batch;
  for (Frame& frame : hold != nullptr ? peer.out : peer.in) {
    const bool may_begin = hold == nullptr || (peer.seal && frame.summed > 0) ||
                           (!frame.waits() && (!frame.operation->everyone || frame.operation->number < *hold));
    if (frame.at == 0 && !may_begin) break;
    for (size_t i = frame.at; i < frame.pieces.size() && message.msg_iovlen < kBatch; ++i) {
      if (bytes >= kPieceBytes || (hold != nullptr && !SumPiece(peer, frame, i))) return bytes;
      batch[message.msg_iovlen++] = frame.pieces[i];
      bytes += frame.pieces[i].iov_len;
    }
    if (message.msg_iovlen == kBatch) break;
  }
  return bytes;
}

// Bytes that have come: those of the first frame are decrypted where they lie, or added to its sum, and taken off.
size_t Mesh::TakeIn(Peer& peer, size_t bytes) {
  Frame& frame = peer.in.front();
  Cipher* const open = InUse(peer.open);
  size_t left = bytes;
  for (size_t i = frame.at; i + 1 < frame.pieces.size() && left > 0; ++i) {
    const iovec& piece = frame.pieces[i];
    const size_t taken = std::min(left, piece.iov_len);
    if (!open) {
      frame.sum.Add(piece.iov_base, taken);
    } else {
      if (i == 0 && piece.iov_len == sizeof(Header)) open->Begin(frame.expected.number);
      open->Apply(piece.iov_base, piece.iov_base, taken);
    }
    left -= taken;
  }
  return Take(frame, bytes);
}

// Takes up to `bytes` off the frame's pieces; gives what is left of them.
size_t Mesh::Take(Frame& frame, size_t bytes) {
  while (frame.at < frame.pieces.size() && bytes > 0) {
    iovec& piece = frame.pieces[frame.at];
    const size_t taken = std::min(bytes, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + taken;
    piece.iov_len -= taken;
    bytes -= taken;
    if (piece.iov_len == 0) ++frame.at;
  }
  return bytes;
}

void Mesh::Close(Queue& queue) {
  Operation& operation = *queue.front().operation;
  --operation.open[queue.front().round];
  queue.pop_front();
  Advance(operation);
}

void Mesh::Advance(Operation& operation) {
  while (operation.round < operation.rounds.size() && operation.open[operation.round] == 0) {
    if (++operation.round == operation.rounds.size()) {  // its sums are made by who waits for it
      operation.end_ns = calls_.Nanos();
      --in_flight_;
      return;
    }
    for (const LocalSum& sum : operation.rounds[operation.round - 1].sums) SumInOrder(sum);
    advanced_ = true;
  }
}

ssize_t Mesh::Send(Peer& peer, const msghdr& message) {
  const int fd = peer.sockets.data.fd();
  if (peer.sockets.rings) return peer.sockets.rings->Send(calls_, fd, message);
  return calls_.Send(fd, message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t Mesh::Receive(Peer& peer, msghdr& message) {
  const int fd = peer.sockets.data.fd();
  if (peer.sockets.rings) return peer.sockets.rings->Receive(calls_, fd, message);
  return calls_.Receive(fd, message, MSG_DONTWAIT);
}

bool Mesh::Write(Peer& peer, uint64_t hold) {
  bool moved = false;
  iovec batch[kBatch];
  msghdr message;
  while (!peer.out.empty() && peer.error < 0) {
    const size_t wanted = Collect(peer, &hold, batch, message);
    peer.held = wanted == 0;
    if (peer.held) break;
    const ssize_t sent = Send(peer, message);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) peer.error = errno;
      break;
    }
    moved = true;
    auto left = static_cast<size_t>(sent);
    if (left == wanted) peer.sealed_bytes = 0;
    while (left > 0) {
      Frame& frame = peer.out.front();
      if (frame.operation->begin_ns == 0) frame.operation->begin_ns = calls_.Nanos();
      left = Take(frame, left);
      if (frame.at == frame.pieces.size()) Close(peer.out);
    }
    if (static_cast<size_t>(sent) < wanted) break;  // the socket is full
  }
  return moved;
}

// Headers are read together with what follows: a read never goes beyond what this rank expects, and a frame counts only
// when its header is the expected one.
bool Mesh::Read(Peer& peer) {
  bool moved = false;
  iovec batch[kBatch];
  msghdr message;
  while (!peer.in.empty() && peer.error < 0 && !peer.differs) {
    const size_t wanted = Collect(peer, nullptr, batch, message);
    const ssize_t got = Receive(peer, message);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) {
      peer.error = got < 0 ? errno : 0;
      break;
    }
    moved = true;
    auto left = static_cast<size_t>(got);
    while (left > 0) {
      Frame& frame = peer.in.front();
      const bool checked = frame.at > 0;
      if (!frame.operation->everyone && frame.operation->begin_ns == 0) frame.operation->begin_ns = calls_.Nanos();
      left = TakeIn(peer, left);
      if (!checked && frame.at > 0 && std::memcmp(&frame.header, &frame.expected, sizeof(Header)) != 0) {
        peer.differs = true;
        return true;
      }
      if (frame.at < frame.pieces.size()) continue;
      Cipher* const open = InUse(peer.open);
      if (open ? !open->Verify(frame.tag) : frame.sum.Finish() != frame.tag) {
        peer.differs = peer.damaged = true;
        return true;
      }
      Close(peer.in);
    }
    if (static_cast<size_t>(got) < wanted) break;  // the socket is empty
  }
  return moved;
}

// The peers that something of this operation has still to go to or come from; of what waits behind another operation's
// round, those that this round waits for.
void Mesh::FindUnfinished(const Operation& operation, std::vector<bool>& found) const {
  const auto look = [&](const Queue& queue, size_t peer) {
    const auto mine = std::find_if(queue.begin(), queue.end(), [&](const Frame& frame) {
      return frame.operation == &operation && frame.round == operation.round;
    });
    if (mine == queue.end()) return;
    if (queue.front().waits()) {
      FindUnfinished(*queue.front().operation, found);
    } else {
      found[peer] = true;
    }
  };
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    look(peers_[peer].in, peer);
    look(peers_[peer].out, peer);
  }
}

std::vector<int> Mesh::Unfinished(const Operation& operation) const {
  std::vector<bool> found(peers_.size());
  FindUnfinished(operation, found);
  std::vector<int> peers;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (found[peer]) peers.push_back(peer);
  }
  return peers;
}

// Nothing will come any more from a peer that it waits for, or somebody has given up.
bool Mesh::MustStop(const Operation& operation) const {
  const auto broken = [](const Peer& peer) { return peer.error >= 0 || peer.differs; };
  if (std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.witness.note.has_value(); }))
    return true;
  if (std::none_of(peers_.begin(), peers_.end(), broken)) return false;
  const std::vector<int> unfinished = Unfinished(operation);
  return std::any_of(unfinished.begin(), unfinished.end(), [&](int peer) { return broken(peers_[peer]); });
}

// What to sleep for, two entries a peer: its data, its notes. For how many milliseconds at most: no event tells the end
// of what is held.
double Mesh::CollectEvents(std::vector<pollfd>& events) const {
  events.clear();
  double most_ms = 60'000;
  for (const Peer& peer : peers_) {
    const bool live = peer.error < 0 && !peer.differs, held = !peer.out.empty() && peer.held;
    int wanted = live ? (peer.in.empty() ? 0 : POLLIN) | (peer.out.empty() || held ? 0 : POLLOUT) : 0;
    if (live && held) most_ms = std::min(most_ms, 1.0);
    if (wanted != 0 && peer.sockets.rings) {
      const bool may_sleep = peer.sockets.rings->MaySleep((wanted & POLLIN) != 0, (wanted & POLLOUT) != 0);
      most_ms = std::min(most_ms, may_sleep ? kRingSleepMs : 0.0);
      wanted = POLLIN;
    }
    // poll leaves out what is negative.
    events.push_back({wanted != 0 ? peer.sockets.data.fd() : -1, static_cast<short>(wanted), 0});
    events.push_back({peer.witness.closed ? -1 : peer.sockets.control.fd(), POLLIN, 0});
  }
  return most_ms;
}

Status Mesh::Finish(Operation& operation, double timeout_s) {
  const int64_t begin_ns = calls_.Nanos();
  double deadline_ns = static_cast<double>(begin_ns) + timeout_s * 1e9;
  const auto done = [&] { return operation.round == operation.rounds.size(); };
  std::unique_lock lock(mutex_);
  if (failure_) return *failure_;
  struct Counted {  // the helper need not look while somebody waits
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& count) : count(count) { ++count; }
    ~Counted() { --count; }
  } counted(waiting_);
  std::vector<pollfd> events;
  int64_t moved_ns = begin_ns, patience_ns = kSpinNs;
  bool last_look = false;
  while (true) {
    const bool moved = !done() && Drive();
    if (done()) return Ok{};
    if (moved) moved_ns = driven_ns_;
    if (driven_ns_ - moved_ns < patience_ns) continue;
    patience_ns = 0;  // the network is slower than that: from now on it is worth sleeping at once
    const int64_t now_ns = calls_.Nanos();
    const double left_ms = std::ceil((deadline_ns - static_cast<double>(now_ns)) / 1e6);
    if (MustStop(operation) || (left_ms <= 0 && last_look))
      return Fail(operation, static_cast<double>(now_ns - begin_ns) / 1e9);
    last_look = left_ms <= 0;
    if (last_look) continue;
    const double sleep_ms = std::min(left_ms, CollectEvents(events));
    lock.unlock();
    calls_.Poll(events.data(), events.size(), static_cast<int>(sleep_ms));
    // A process that was stopped has not listened: what it slept meanwhile is no silence of its peers.
    const auto slept_ns = static_cast<double>(calls_.Nanos() - now_ns);
    if (slept_ns > sleep_ms * 1e6 + kStoppedNs) deadline_ns += slept_ns;
    lock.lock();
    if (failure_) return *failure_;
    for (size_t i = 0; i < peers_.size(); ++i) {
      PeerSockets& sockets = peers_[i].sockets;
      if (sockets.rings && events[2 * i].fd >= 0) sockets.rings->Wake(calls_, sockets.data.fd());
      if (events[2 * i + 1].revents != 0) ReadNote(peers_[i]);
    }
  }
}

void Mesh::HelperLoop() {
  std::unique_lock lock(helper_mutex_);
  int quiet = 0;
  while (!stop_) {
    quiet = in_flight_ == 0 ? quiet + 1 : 0;
    if (quiet > kHelperQuiet) {
      // Start counts its operation before it looks at the flag, and the flag is set before the count is looked at.
      helper_sleeps_ = true;
      helper_wakes_.wait(lock, [this] { return stop_ || in_flight_ > 0; });
      helper_sleeps_ = false;
    }
    helper_wakes_.wait_for(lock, kHelperPause, [this] { return stop_; });
    if (in_flight_ == 0 || waiting_ > 0) continue;
    if (calls_.Nanos() - driven_ns_ < std::chrono::nanoseconds(kHelperPause).count()) continue;
    const std::unique_lock moving(mutex_, std::try_to_lock);
    if (moving && !failure_) Drive();
  }
}

}  // namespace interlace
