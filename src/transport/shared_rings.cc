#include "transport/shared_rings.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

namespace interlace {

namespace {

constexpr uint64_t kMostBytes = 4 << 20, kLeastBytes = 64 << 10, kBytesOfRank = 12 << 20;
constexpr uint64_t kWorthWaking = 4;  // a writer waits until this part of its ring is free
constexpr uint32_t kWantsBytes = 1, kWantsRoom = 2;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;  // memory that shrinks would kill who reads it

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace

struct SharedRings::Shared {
  uint8_t token[16];
  struct Ring {  // each count has one writer, and a cache line of its own
    alignas(64) std::atomic<uint64_t> put;
    alignas(64) std::atomic<uint64_t> taken;
  } rings[2];
  alignas(64) std::atomic<uint32_t> wants[2];  // by side, while it sleeps
  alignas(4096) char bytes[];                  // of both rings
};

uint64_t SharedRings::RingBytes(int64_t peers) {
  const uint64_t most = kBytesOfRank / static_cast<uint64_t>(std::max<int64_t>(peers, 1));
  return std::clamp(std::bit_floor(most), kLeastBytes, kMostBytes);
}

bool SharedRings::Allowed() {
  const char* given = std::getenv("INTERLACE_SHARED_MEMORY");
  return given == nullptr || std::strcmp(given, "0") != 0;
}

bool SharedRings::Work() {
  const std::unique_ptr<SharedRings> made = Allowed() ? Create(kLeastBytes) : nullptr;
  return made != nullptr && Open(made->offer()) != nullptr;
}

std::unique_ptr<SharedRings> SharedRings::Create(uint64_t ring_bytes) {
  const int fd = memfd_create("interlace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  const size_t size = sizeof(Shared) + 2 * ring_bytes;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, static_cast<off_t>(size)) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0)
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  RingOffer offer{static_cast<int32_t>(getpid()), fd, ring_bytes, {}};
  if (memory == MAP_FAILED || getrandom(offer.token, sizeof offer.token, 0) != sizeof offer.token) {
    if (memory != MAP_FAILED) munmap(memory, size);
    close(fd);
    return nullptr;
  }
  auto* shared = static_cast<Shared*>(memory);  // zeros
  std::memcpy(shared->token, offer.token, sizeof offer.token);
  std::unique_ptr<SharedRings> made(new SharedRings(shared, ring_bytes, 0));
  made->offer_ = offer;
  return made;
}

std::unique_ptr<SharedRings> SharedRings::Open(const RingOffer& offer) {
  if (offer.fd < 0 || offer.bytes < kLeastBytes || offer.bytes > kMostBytes || !std::has_single_bit(offer.bytes))
    return nullptr;
  const std::string path = "/proc/" + std::to_string(offer.pid) + "/fd/" + std::to_string(offer.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return nullptr;
  const size_t size = sizeof(Shared) + 2 * offer.bytes;
  struct stat facts {};
  const int seals = fcntl(fd, F_GET_SEALS);
  void* memory = MAP_FAILED;
  if (fstat(fd, &facts) == 0 && facts.st_uid == geteuid() && facts.st_size == static_cast<off_t>(size) &&
      seals >= 0 && (seals & kSeals) == kSeals)  // the system may add one of its own
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return nullptr;
  std::unique_ptr<SharedRings> made(new SharedRings(static_cast<Shared*>(memory), offer.bytes, 1));
  if (std::memcmp(made->shared_->token, offer.token, sizeof offer.token) != 0) return nullptr;
  return made;
}

SharedRings::~SharedRings() {
  WithdrawOffer();
  munmap(shared_, sizeof(Shared) + 2 * bytes_);
}

void SharedRings::WithdrawOffer() {
  if (offer_.fd >= 0) close(offer_.fd);
  offer_.fd = -1;
}

// No more than it has room for, whatever the other process has written there.
uint64_t SharedRings::Held(int ring) const {
  const Shared::Ring& counts = shared_->rings[ring];
  const uint64_t taken = counts.taken.load(std::memory_order_acquire);
  return std::min(counts.put.load(std::memory_order_acquire) - taken, bytes_);
}

// Copies between the pieces of a message and a ring, from its byte `at` on: `count` bytes at most.
uint64_t SharedRings::Copy(const msghdr& message, int ring, uint64_t at, uint64_t count, bool put) {
  char* const begin = shared_->bytes + static_cast<uint64_t>(ring) * bytes_;
  uint64_t done = 0;
  for (size_t i = 0; i < message.msg_iovlen && done < count; ++i) {
    char* const piece = static_cast<char*>(message.msg_iov[i].iov_base);
    const uint64_t bytes = std::min<uint64_t>(message.msg_iov[i].iov_len, count - done);
    for (uint64_t copied = 0; copied < bytes;) {
      const uint64_t place = (at + done) & (bytes_ - 1), part = std::min(bytes - copied, bytes_ - place);
      std::memcpy(put ? begin + place : piece + copied, put ? piece + copied : begin + place, part);
      copied += part;
      done += part;
    }
  }
  return done;
}

// A fence between what was counted and the look at who sleeps, here and in MaySleep: one of the two sees the other.
static bool Sleeps(std::atomic<uint32_t>& wants, uint32_t what) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return (wants.load(std::memory_order_relaxed) & what) != 0 && (wants.fetch_and(~what) & what) != 0;
}

static void WakePeer(SocketCalls& calls, int socket) {
  const char byte = 0;  // a full socket, or one that is closed, wakes it as well
  calls.SendBytes(socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t SharedRings::Send(SocketCalls& calls, int socket, const msghdr& message) {
  Shared::Ring& ring = shared_->rings[side_];
  const uint64_t at = ring.put.load(std::memory_order_relaxed);
  const uint64_t room = hung_up_ < 0 ? bytes_ - Held(side_) : 0;
  if (room == 0) {
    errno = hung_up_ < 0 ? EAGAIN : hung_up_ == 0 ? EPIPE : hung_up_;
    return -1;
  }
  const uint64_t done = Copy(message, side_, at, room, /*put=*/true);
  ring.put.store(at + done, std::memory_order_release);
  if (Sleeps(shared_->wants[1 - side_], kWantsBytes)) WakePeer(calls, socket);
  return static_cast<ssize_t>(done);
}

ssize_t SharedRings::Receive(SocketCalls& calls, int socket, const msghdr& message) {
  Shared::Ring& ring = shared_->rings[1 - side_];
  const uint64_t at = ring.taken.load(std::memory_order_relaxed);
  const uint64_t held = Held(1 - side_);
  if (held == 0) {
    if (hung_up_ == 0) return 0;
    errno = hung_up_ < 0 ? EAGAIN : hung_up_;
    return -1;
  }
  const uint64_t done = Copy(message, 1 - side_, at, held, /*put=*/false);
  ring.taken.store(at + done, std::memory_order_release);
  if (Held(1 - side_) <= bytes_ - bytes_ / kWorthWaking && Sleeps(shared_->wants[1 - side_], kWantsRoom))
    WakePeer(calls, socket);
  return static_cast<ssize_t>(done);
}

bool SharedRings::MaySleep(bool for_bytes, bool for_room) {
  shared_->wants[side_].store((for_bytes ? kWantsBytes : 0) | (for_room ? kWantsRoom : 0), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return !(for_bytes && Held(1 - side_) > 0) && !(for_room && Held(side_) <= bytes_ - bytes_ / kWorthWaking);
}

void SharedRings::Wake(SocketCalls& calls, int socket) {
  shared_->wants[side_].store(0, std::memory_order_relaxed);
  char bytes[64];
  while (hung_up_ < 0) {
    const ssize_t got = calls.ReceiveBytes(socket, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    hung_up_ = got < 0 ? errno : 0;
  }
}

}  // namespace interlace
