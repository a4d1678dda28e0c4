// The end of a mesh: who is told what, and who is to blame (notes.h).
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/mesh.h"

namespace interlace {

std::optional<Error> Mesh::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Mesh::Leave() {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = Error{"this rank has left axis " + group_.axis + "; compile again to go on", {}};
  Shut(/*control=*/true);
}

// Threads that wait wake up; the numbers of the sockets stay taken until the mesh goes.
void Mesh::Shut(bool control) {
  for (Peer& peer : peers_) {
    peer.in.clear();
    peer.out.clear();
    if (!peer.sockets.data) continue;
    calls_.Shutdown(peer.sockets.data.fd(), SHUT_RDWR);
    if (control) calls_.Shutdown(peer.sockets.control.fd(), SHUT_RDWR);
  }
  in_flight_ = 0;
}

void Mesh::ReadNote(Peer& peer) {
  while (!peer.witness.closed) {
    char rest[sizeof(Note)];  // of what follows the first note
    char* const place = peer.witness.note ? rest : reinterpret_cast<char*>(&peer.note) + peer.note_bytes;
    const size_t room = peer.witness.note ? sizeof rest : sizeof(Note) - peer.note_bytes;
    const ssize_t got = calls_.ReceiveBytes(peer.sockets.control.fd(), place, room, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      peer.witness.closed = true;
      // A host that no longer answers (connect.h): its other connection would wait for a quarter of an hour.
      if (got < 0 && peer.error < 0) peer.error = errno;
      return;
    }
    if (peer.witness.note) continue;
    peer.note_bytes += static_cast<size_t>(got);
    if (peer.note_bytes < sizeof(Note)) continue;
    if (peer.note.sum != peer.note.Sum()) peer.note = Note(Note::kTimedOut, {}, "", 0);
    peer.note.Sanitize();
    peer.witness.note = peer.note;
  }
}

// A note is the first that is written on its connection, whose buffer therefore takes it at once.
void Mesh::Tell(Note note) {
  note.sum = note.Sum();
  for (const Peer& peer : peers_) {
    if (peer.sockets.control)
      calls_.SendBytes(peer.sockets.control.fd(), &note, sizeof note, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

// Reads notes until every peer (or, if not `all`, every one whose data connection broke) has said something or closed.
void Mesh::Listen(int64_t patience_ms, bool all) {
  const int64_t deadline_ns = calls_.Nanos() + patience_ms * 1'000'000;
  while (true) {
    std::vector<pollfd> ready;
    for (Peer& peer : peers_) {
      if (!peer.sockets.control) continue;
      ReadNote(peer);
      if (peer.witness.note && peer.witness.note->kind != Note::kTimedOut) return;  // that explains everything
      if (peer.witness.note || peer.witness.closed || !(all || peer.error >= 0)) continue;
      ready.push_back({peer.sockets.control.fd(), POLLIN, 0});
    }
    const int64_t left_ns = deadline_ns - calls_.Nanos();
    if (ready.empty() || left_ns <= 0) return;
    calls_.Poll(ready.data(), ready.size(), static_cast<int>((left_ns + 999'999) / 1'000'000));
  }
}

Verdict Mesh::JudgePeers(const Note& own) {
  std::vector<Witness> witnesses;
  for (Peer& peer : peers_) {
    peer.witness.broken = peer.error >= 0;
    witnesses.push_back(peer.witness);
  }
  return Judge(group_.index, own, witnesses);
}

// Makes the mesh unusable and says why. The lock is held while notes are awaited: nothing can move any more.
Error Mesh::Fail(const Operation& operation, double elapsed_s) {
  std::vector<int> suspects = Unfinished(operation), differing;
  bool lost = false, explained = false;
  for (int peer : suspects) {
    lost |= peers_[peer].error >= 0;
    if (peers_[peer].differs) differing.push_back(peer);
  }
  for (const Peer& peer : peers_) explained |= peer.witness.note && peer.witness.note->kind != Note::kTimedOut;
  Note own(lost ? Note::kLost : Note::kTimedOut, suspects, operation.label, elapsed_s);
  const bool damaged = std::any_of(differing.begin(), differing.end(), [&](int peer) { return peers_[peer].damaged; });
  if (!differing.empty()) own = Note(damaged ? Note::kDamaged : Note::kMismatch, differing, operation.label, elapsed_s);
  Verdict verdict{own, -1};
  if (!differing.empty() || explained) {
    verdict = JudgePeers(own);
    Tell(verdict.note);
  } else {
    if (lost) {
      Listen(options_.lost_patience_ms, /*all=*/false);
      verdict = JudgePeers(own);
    }
    if (!lost || verdict.note.kind == Note::kTimedOut) {  // who broke off had itself waited for too long
      own.kind = Note::kTimedOut;
      Tell(own);
      Listen(options_.silent_patience_ms, /*all=*/true);
      verdict = JudgePeers(own);
    } else {
      Tell(verdict.note);
    }
  }
  std::string text = Explain(verdict, group_, operation.label);
  if (verdict.reporter < 0 && verdict.note.kind != Note::kTimedOut) {
    const Peer& first = peers_[verdict.note.ranks[0]];
    if (verdict.note.kind == Note::kMismatch) {
      const Frame& frame = first.in.front();
      const std::string tag = Printable(frame.header.tag, sizeof frame.header.tag);
      text += ": as number " + std::to_string(frame.expected.number) + " it sends " +
              std::to_string(frame.header.bytes) + " bytes of \"" + tag + "\" (number " +
              std::to_string(frame.header.number) + "), this rank expects " + std::to_string(frame.expected.bytes) +
              "; all ranks must start the same operations in the same order";
    } else if (first.damaged) {
      const Frame& frame = first.in.front();
      text += ": the checksum of message " + std::to_string(frame.expected.number) + " of " +
              std::to_string(frame.expected.bytes) + " bytes is wrong, and nothing of it was used";
    } else if (verdict.note.kind == Note::kLost) {
      text += std::string(" (connection closed") +
              (first.error > 0 ? std::string(": ") + std::strerror(first.error) : "") + ")";
    }
  }
  failure_ = Error{text + "; the group cannot be used any more: restart all ranks from the last checkpoint", {}};
  Shut(/*control=*/false);
  return *failure_;
}

}  // namespace interlace
