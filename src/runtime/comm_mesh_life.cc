// The beginning of a mesh, and its end: who is told what, and who is to blame (comm_notes.h).
#include <ATen/ops/empty.h>
#include <c10/util/intrusive_ptr.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "runtime/comm_mesh.h"

namespace interlace {

namespace {

using Clock = std::chrono::steady_clock;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// How long a rank that closed may take to say why, and how long a rank that waits too may take to say so.
constexpr int64_t kLostPatienceMs = 300;
constexpr int64_t kSilentPatienceMs = 500;

// c10d and gloo report by exceptions. Of "[file:line] What happened [address]. Advice ...\n stack trace" only what
// happened is kept.
std::string FirstLine(const std::string& text) {
  const size_t begin = text.starts_with('[') && text.find("] ") != std::string::npos ? text.find("] ") + 2 : 0;
  return text.substr(begin, std::min(text.find('\n', begin), text.find(". ", begin)) - begin);
}

struct Known {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<SocketMesh> mesh;
};

// Never destroyed: meshes may be in use while the process ends.
std::mutex& KnownMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::vector<Known>& KnownMeshes() {
  static auto* const meshes = new std::vector<Known>;
  return *meshes;
}

}  // namespace

Result<std::shared_ptr<SocketMesh>> SocketMesh::Open(const AxisSpec& spec, double timeout_s) {
  ProcessGroup group;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    group = c10d::resolve_process_group(spec.native);
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& e) {
    return MakeError("axis ", spec.name, ": no process group named \"", spec.native, "\" that can send from the CPU",
                     "; create it with torch.distributed.new_group and pass its group_name (", FirstLine(e.what()),
                     ")");
  }
  if (backend->getRank() != spec.rank || backend->getSize() != spec.size) {
    return MakeError("axis ", spec.name, ": process group \"", spec.native, "\" says rank ", backend->getRank(), " of ",
                     backend->getSize(), ", the axis says rank ", spec.rank, " of ", spec.size);
  }
  {
    std::lock_guard lock(KnownMutex());
    std::erase_if(KnownMeshes(),
                  [](const Known& known) { return known.group.expired() && known.mesh.use_count() == 1; });
    for (const Known& known : KnownMeshes()) {
      if (known.group.lock() == group) return known.mesh;
    }
  }
  const ExchangeBytes exchange = [&](const std::string& mine) -> Result<std::vector<std::string>> {
    const auto bytes = static_cast<int64_t>(mine.size());
    std::vector<at::Tensor> sent{at::empty({bytes}, at::kByte)};
    std::memcpy(sent[0].mutable_data_ptr(), mine.data(), mine.size());
    std::vector<std::vector<at::Tensor>> received(1);
    for (int64_t rank = 0; rank < spec.size; ++rank) received[0].push_back(at::empty({bytes}, at::kByte));
    c10d::AllgatherOptions options;
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
    try {
      backend->allgather(received, sent, options)->wait();
    } catch (const std::exception& e) {
      return MakeError("axis ", spec.name, ": cannot reach the other ranks over process group \"", spec.native,
                       "\": ", FirstLine(e.what()));
    }
    std::vector<std::string> out;
    for (const at::Tensor& one : received[0])
      out.emplace_back(static_cast<const char*>(one.const_data_ptr()), mine.size());
    return out;
  };
  INTERLACE_ASSIGN(std::vector<PeerSockets> sockets, ConnectPeers(spec, exchange, timeout_s));
  std::shared_ptr<SocketMesh> mesh(new SocketMesh);
  mesh->axis_ = spec.name;
  mesh->rank_ = static_cast<int>(spec.rank);
  mesh->size_ = static_cast<int>(spec.size);
  mesh->peers_.resize(spec.size);
  for (int64_t peer = 0; peer < spec.size; ++peer) mesh->peers_[peer].sockets = std::move(sockets[peer]);
  try {
    mesh->global_ranks_ = backend->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {  // a backend that has no options: ranks are named within the axis
  }
  if (mesh->global_ranks_.size() != static_cast<size_t>(spec.size)) mesh->global_ranks_.clear();
  mesh->helper_ = std::thread([raw = mesh.get()] { raw->HelperLoop(); });
  std::lock_guard lock(KnownMutex());
  KnownMeshes().push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), mesh});
  return mesh;
}

SocketMesh::~SocketMesh() {
  {
    std::lock_guard lock(helper_mutex_);
    stop_ = true;
  }
  helper_wakes_.notify_one();
  if (helper_.joinable()) helper_.join();
}

std::optional<Error> SocketMesh::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void SocketMesh::Leave() {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = Error{"this rank has left axis " + axis_ + "; compile again to go on", {}};
  Shut(/*control=*/true);
}

// Threads that wait wake up; the numbers of the sockets stay taken until the mesh goes.
void SocketMesh::Shut(bool control) {
  for (Peer& peer : peers_) {
    peer.in.clear();
    peer.out.clear();
    if (!peer.sockets.data) continue;
    shutdown(peer.sockets.data.fd(), SHUT_RDWR);
    if (control) shutdown(peer.sockets.control.fd(), SHUT_RDWR);
  }
  in_flight_ = 0;
}

void SocketMesh::ReadNote(Peer& peer) {
  while (!peer.witness.closed) {
    char rest[sizeof(Note)];  // of what follows the first note
    char* const place = peer.witness.note ? rest : reinterpret_cast<char*>(&peer.note) + peer.note_bytes;
    const size_t room = peer.witness.note ? sizeof rest : sizeof(Note) - peer.note_bytes;
    const ssize_t got = recv(peer.sockets.control.fd(), place, room, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      peer.witness.closed = true;
      return;
    }
    if (peer.witness.note) continue;
    peer.note_bytes += static_cast<size_t>(got);
    if (peer.note_bytes < sizeof(Note)) continue;
    peer.note.Sanitize();
    peer.witness.note = peer.note;
  }
}

// A note is the first that is written on its connection, whose buffer therefore takes it at once.
void SocketMesh::Tell(const Note& note) {
  for (const Peer& peer : peers_) {
    if (peer.sockets.control) send(peer.sockets.control.fd(), &note, sizeof note, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

// Reads notes until every peer (or, if not `all`, every one whose data connection broke) has said something or closed.
void SocketMesh::Listen(int64_t patience_ms, bool all) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(patience_ms);
  while (true) {
    std::vector<pollfd> ready;
    for (Peer& peer : peers_) {
      if (!peer.sockets.control) continue;
      ReadNote(peer);
      if (peer.witness.note && peer.witness.note->kind != Note::kTimedOut) return;  // that explains everything
      if (peer.witness.note || peer.witness.closed || !(all || peer.error >= 0)) continue;
      ready.push_back({peer.sockets.control.fd(), POLLIN, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (ready.empty() || left <= 0) return;
    poll(ready.data(), ready.size(), static_cast<int>(left));
  }
}

Verdict SocketMesh::JudgePeers(const Note& own) {
  std::vector<Witness> witnesses;
  for (Peer& peer : peers_) {
    peer.witness.broken = peer.error >= 0;
    witnesses.push_back(peer.witness);
  }
  return Judge(rank_, own, witnesses);
}

// Makes the mesh unusable and says why. The lock is held while notes are awaited: nothing can move any more.
Error SocketMesh::Fail(const Exchange& exchange, double elapsed_s) {
  std::vector<int> suspects = Unfinished(exchange), differing;
  bool lost = false, explained = false;
  for (int peer : suspects) {
    lost |= peers_[peer].error >= 0;
    if (peers_[peer].differs) differing.push_back(peer);
  }
  for (const Peer& peer : peers_) explained |= peer.witness.note && peer.witness.note->kind != Note::kTimedOut;
  Note own(lost ? Note::kLost : Note::kTimedOut, suspects, exchange.label, elapsed_s);
  if (!differing.empty()) own = Note(Note::kMismatch, differing, exchange.label, elapsed_s);
  Verdict verdict{own, -1};
  if (!differing.empty() || explained) {
    verdict = JudgePeers(own);
    Tell(verdict.note);
  } else {
    if (lost) {
      Listen(kLostPatienceMs, /*all=*/false);
      verdict = JudgePeers(own);
    }
    if (!lost || verdict.note.kind == Note::kTimedOut) {  // who broke off had itself waited for too long
      own.kind = Note::kTimedOut;
      Tell(own);
      Listen(kSilentPatienceMs, /*all=*/true);
      verdict = JudgePeers(own);
    } else {
      Tell(verdict.note);
    }
  }
  std::string text = Explain(verdict, rank_, axis_, exchange.label, global_ranks_);
  if (verdict.reporter < 0 && verdict.note.kind != Note::kTimedOut) {
    const Peer& first = peers_[verdict.note.ranks[0]];
    if (verdict.note.kind == Note::kMismatch) {
      const Frame& frame = first.in.front();
      const std::string label = Printable(frame.header.label, sizeof frame.header.label);
      text += ": as number " + std::to_string(frame.expected.number) + " it sends " +
              std::to_string(frame.header.bytes) + " bytes of \"" + label + "\" (number " +
              std::to_string(frame.header.number) + "), this rank expects " + std::to_string(frame.expected.bytes) +
              "; all ranks must start the same operations in the same order";
    } else {
      text += std::string(" (connection closed") +
              (first.error > 0 ? std::string(": ") + std::strerror(first.error) : "") + ")";
    }
  }
  failure_ = Error{text + "; the group cannot be used any more: restart all ranks from the last checkpoint", {}};
  Shut(/*control=*/false);
  return *failure_;
}

}  // namespace interlace
