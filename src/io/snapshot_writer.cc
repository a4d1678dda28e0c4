#include "io/snapshot_writer.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "io/checksum.h"

namespace interlace {

namespace {

constexpr int kNice = 10;  // of the thread: where cores are short the owner goes first, and copies what is left itself

double Seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

SnapshotWriter::SnapshotWriter(std::vector<std::string> paths, Options options)
    : options_(options), paths_(std::move(paths)) {
  thread_ = std::thread([this] { Run(); });
}

void SnapshotWriter::Add(const std::vector<Piece>& pieces) {
  const std::lock_guard lock(mutex_);
  for (const Piece& piece : pieces) {
    for (int64_t done = 0; done < piece.bytes;) {
      const int64_t offset = piece.offset + done;
      // Cuts inside a piece lie on block borders of the file.
      const int64_t end = (offset / kBlock * kBlock) + options_.chunk_bytes;
      const int64_t bytes = std::min(piece.bytes - done, end - offset);
      chunks_.push_back({piece.data + done, bytes, piece.file, offset, State::kWaiting, 0, nullptr});
      ++unstaged_;
      done += bytes;
    }
  }
  changed_.notify_all();
}

void SnapshotWriter::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

SnapshotWriter::~SnapshotWriter() {
  Cancel();
  thread_.join();
}

void SnapshotWriter::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

bool SnapshotWriter::staged() {
  const std::lock_guard lock(mutex_);
  return unstaged_ == 0 || done_;
}

SnapshotWriter::Stats SnapshotWriter::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

FileFailure SnapshotWriter::WaitDurable() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
  return failure_;
}

void SnapshotWriter::WaitStaged() {
  std::unique_lock lock(mutex_);
  if (unstaged_ == 0 || done_) return;
  const double begin = Seconds(CLOCK_MONOTONIC);
  while (unstaged_ > 0 && !done_) {
    while (next_to_stage_ < chunks_.size() && chunks_[next_to_stage_].state != State::kWaiting) ++next_to_stage_;
    if (next_to_stage_ == chunks_.size() || held_bytes_ + chunks_[next_to_stage_].bytes > options_.staging_bytes) {
      changed_.wait(lock);  // for the thread: it copies the last one, or frees room
      continue;
    }
    Chunk& chunk = chunks_[next_to_stage_++];
    chunk.state = State::kCopying;
    held_bytes_ += chunk.bytes;
    stats_.staging_peak_bytes = std::max(stats_.staging_peak_bytes, held_bytes_ + options_.chunk_bytes);
    stats_.staged_bytes += chunk.bytes;
    lock.unlock();
    Blocks copy = AllocateBlocks(chunk.bytes + kBlock);
    if (copy) chunk.sum = CopyTo(copy.get(), chunk);
    lock.lock();
    if (!copy) {  // no memory: the thread, which has its buffer, takes this one and all that follow
      options_.staging_bytes = 0;
      held_bytes_ -= chunk.bytes, stats_.staged_bytes -= chunk.bytes;
      chunk.state = State::kWaiting;
      --next_to_stage_;
      changed_.notify_all();
      continue;
    }
    chunk.copy = std::move(copy);
    chunk.state = State::kStaged;
    --unstaged_;
    changed_.notify_all();
  }
  stats_.stall_seconds += Seconds(CLOCK_MONOTONIC) - begin;
}

// Into a buffer of whole blocks, as far from its start as the place in the file is from a block's.
uint64_t SnapshotWriter::CopyTo(char* buffer, const Chunk& chunk) {
  return CopyAndChecksum(buffer + chunk.offset % kBlock, chunk.data, static_cast<size_t>(chunk.bytes));
}

// Takes the chunk of that number once there is one, from its copy or from the owner's memory; nullptr: there are no
// more. False: cancelled.
bool SnapshotWriter::Copy(size_t index, char* buffer, Chunk*& chunk) {
  std::unique_lock lock(mutex_);
  changed_.wait(
      lock, [&] { return cancelled_ || (index < chunks_.size() ? chunks_[index].state != State::kCopying : closed_); });
  if (cancelled_) return false;
  chunk = index < chunks_.size() ? &chunks_[index] : nullptr;
  if (chunk == nullptr || chunk->state == State::kStaged) return true;
  chunk->state = State::kTaken;
  lock.unlock();
  chunk->sum = CopyTo(buffer, *chunk);
  lock.lock();
  --unstaged_;
  changed_.notify_all();
  return true;
}

FileFailure SnapshotWriter::WriteChunks() {
  std::vector<OutputFile> files(paths_.size());
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (FileFailure failure = files[i].Open(paths_[i])) return failure;
  }
  const Blocks buffer = AllocateBlocks(options_.chunk_bytes + kBlock);
  if (!buffer) return {ENOMEM, paths_.empty() ? "" : paths_[0]};
  Chunk* chunk = nullptr;
  for (size_t index = 0;; ++index) {
    if (!Copy(index, buffer.get(), chunk)) return {ECANCELED, ""};
    if (chunk == nullptr) break;
    const char* from = chunk->copy ? chunk->copy.get() : buffer.get();
    sums_.push_back({chunk->file, chunk->offset, chunk->bytes, chunk->sum});
    if (FileFailure failure = files[chunk->file].Write(from, chunk->bytes, chunk->offset)) return failure;
    if (chunk->copy) {
      chunk->copy.reset();
      const std::lock_guard lock(mutex_);
      held_bytes_ -= chunk->bytes;
      changed_.notify_all();
    }
  }
  for (OutputFile& file : files) {
    if (FileFailure failure = file.Sync()) return failure;
  }
  return {};
}

void SnapshotWriter::Run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
  const double begin = Seconds(CLOCK_MONOTONIC);
  FileFailure failure = WriteChunks();
  const std::lock_guard lock(mutex_);
  failure_ = std::move(failure);
  done_ = true;
  stats_.cpu_seconds = Seconds(CLOCK_THREAD_CPUTIME_ID);
  stats_.seconds = Seconds(CLOCK_MONOTONIC) - begin;
  changed_.notify_all();
}

}  // namespace interlace
