#include "tier/file_worker.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "io/checksum.h"

namespace interlace {

namespace {

void SleepUntil(int64_t ns) {
  const timespec at{ns / 1000000000, ns % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

Error IoError(const TierFile& file, const FileJob& job, int64_t offset, const char* what, int code) {
  std::string hint;
  if (code == ENOSPC) hint = "; the disk is full: free some space or give another tier folder";
  if (code == EIO) hint = "; the disk fails";
  return MakeError(what, " the tier file ", file.path, " at byte ", offset, " (", job.place->name, ", ", job.bytes,
                   " bytes): ", std::strerror(code), hint);
}

bool InPlace(const char* memory, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % kTierAlign == 0 && bytes % kTierAlign == 0;
}

int64_t Padded(int64_t bytes) {
  return (bytes + kTierAlign - 1) / kTierAlign * kTierAlign;
}

}  // namespace

void File::Close() {
  if (fd >= 0) close(fd);
}

FileWorker::FileWorker(TierFile& file) : file_(file) {
  buffer_.reset(static_cast<char*>(std::aligned_alloc(kTierAlign, kTierBlock)));
  thread_ = std::thread([this] { Loop(); });
}
FileWorker::~FileWorker() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void FileWorker::Give(const FileJob& job) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(job);
  }
  wake_.notify_one();
}

void FileWorker::Loop() {
  prctl(PR_SET_TIMERSLACK, 1);  // ns: a pause ends when it should; by default up to 50 us late, block by block
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const FileJob job = queue_.front();
    queue_.pop_front();
    lock.unlock();
    const int64_t begin = NanosOf(CLOCK_MONOTONIC);
    Status status = job.write ? Write(job) : Read(job);
    busy_ns_ += NanosOf(CLOCK_MONOTONIC) - begin;
    if (status.ok()) bytes_ += job.bytes;
    {
      const std::lock_guard finished(file_.mutex);
      file_.finished.emplace(job.ticket, std::move(status));
    }
    file_.done.notify_all();
    lock.lock();
  }
}

// Not before the bytes so far could have gone at the bandwidth that was asked for, back to back from when they were
// given.
void FileWorker::Pace(const FileJob& job, int64_t bytes) {
  if (file_.bytes_per_second <= 0) return;
  free_ns_ = std::max(free_ns_, job.given_ns) +
             static_cast<int64_t>(static_cast<double>(bytes) / file_.bytes_per_second * 1e9);
  SleepUntil(free_ns_);
}

Status FileWorker::Write(const FileJob& job) {
  for (int64_t at = 0, block = 0; at < job.bytes; at += kTierBlock, ++block) {
    const int64_t bytes = std::min(kTierBlock, job.bytes - at), padded = Padded(bytes);
    const bool in_place = InPlace(job.memory + at, bytes);
    const char* const from = in_place ? job.memory + at : buffer_.get();
    uint64_t& sum = job.place->checksums[static_cast<size_t>(block)];
    if (in_place) {
      sum = Checksum(from, static_cast<size_t>(bytes));
    } else {
      sum = CopyAndChecksum(buffer_.get(), job.memory + at, static_cast<size_t>(bytes));
      std::memset(buffer_.get() + bytes, 0, static_cast<size_t>(padded - bytes));
    }
    for (int64_t sent = 0; sent < padded;) {
      const ssize_t n =
          pwrite(file_.file.fd, from + sent, static_cast<size_t>(padded - sent), job.place->offset + at + sent);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return IoError(file_, job, job.place->offset + at + sent, "cannot write", n < 0 ? errno : ENOSPC);
      sent += n;
    }
    Forget(job.place->offset + at, padded);
    Pace(job, bytes);
  }
  job.place->written = true;
  return Ok{};
}

Status FileWorker::Read(const FileJob& job) {
  if (!job.place->written) {
    std::memset(job.memory, 0, static_cast<size_t>(job.bytes));
    return Ok{};
  }
  for (int64_t at = 0, block = 0; at < job.bytes; at += kTierBlock, ++block) {
    const int64_t bytes = std::min(kTierBlock, job.bytes - at), padded = Padded(bytes), offset = job.place->offset + at;
    const bool in_place = InPlace(job.memory + at, bytes);
    char* const to = in_place ? job.memory + at : buffer_.get();
    for (int64_t got = 0; got < padded;) {
      const ssize_t n = pread(file_.file.fd, to + got, static_cast<size_t>(padded - got), offset + got);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return IoError(file_, job, offset + got, "cannot read", errno);
      if (n == 0) {
        return MakeError("the tier file ", file_.path, " ends at byte ", offset + got, ", within ", job.place->name,
                         ": it was cut short while the run was using it; start again from the last checkpoint");
      }
      got += n;
    }
    const uint64_t wanted = job.place->checksums[static_cast<size_t>(block)],
                   found = in_place ? Checksum(to, static_cast<size_t>(bytes))
                                    : CopyAndChecksum(job.memory + at, buffer_.get(), static_cast<size_t>(bytes));
    if (found != wanted) {
      return MakeError("the tier file ", file_.path, " gives other bytes than were written, between ", offset, " and ",
                       offset + bytes, " (", job.place->name, "; XXH64 ", found, ", expected ", wanted,
                       "): the disk or another program changed them; start again from the last checkpoint");
    }
    Forget(offset, padded);
    Pace(job, bytes);
  }
  return Ok{};
}

// Without direct I/O the page cache gives back what it holds of the block.
void FileWorker::Forget(int64_t offset, int64_t bytes) {
  if (!file_.direct) posix_fadvise(file_.file.fd, offset, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace interlace
