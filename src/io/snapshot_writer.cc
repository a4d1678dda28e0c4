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
  options_.batch_bytes =
      std::max(options.batch_bytes, options.chunk_bytes + kBlock);  // a chunk may begin inside a block
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
  ended_.wait(lock, [&] { return done_; });
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
    stats_.staging_peak_bytes = std::max(stats_.staging_peak_bytes, held_bytes_ + options_.batch_bytes);
    stats_.staged_bytes += chunk.bytes;
    lock.unlock();
    Blocks copy = AllocateBlocks(chunk.bytes + kBlock);
    if (copy) {
      char* const place = copy.get() + chunk.offset % kBlock;
      chunk.sum = CopyAndChecksum(place, chunk.data, static_cast<size_t>(chunk.bytes));
    }
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

// Takes the chunk of that number once there is one, to be copied if it has no copy; nullptr: there are no more. False:
// cancelled.
bool SnapshotWriter::Take(size_t index, Chunk*& chunk) {
  std::unique_lock lock(mutex_);
  changed_.wait(
      lock, [&] { return cancelled_ || (index < chunks_.size() ? chunks_[index].state != State::kCopying : closed_); });
  if (cancelled_) return false;
  chunk = index < chunks_.size() ? &chunks_[index] : nullptr;
  if (chunk != nullptr && chunk->state == State::kWaiting) chunk->state = State::kTaken;
  return true;
}

bool SnapshotWriter::Batch::Takes(const Chunk& chunk) const {
  return begin != end && chunk.file == file && chunk.offset == end &&
         begin % kBlock + (end - begin) + chunk.bytes <= capacity;
}

FileFailure SnapshotWriter::WriteChunks() {
  std::vector<OutputFile> files(paths_.size());
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (FileFailure failure = files[i].Open(paths_[i])) return failure;
  }
  Batch batch;
  batch.capacity = options_.batch_bytes;
  batch.buffer = AllocateBlocks(batch.capacity);
  if (!batch.buffer) return {ENOMEM, paths_.empty() ? "" : paths_[0]};
  const auto write = [&]() -> FileFailure {
    const int64_t bytes = batch.end - batch.begin;
    return bytes == 0 ? FileFailure{} : files[batch.file].Write(batch.buffer.get(), bytes, batch.begin);
  };
  Chunk* chunk = nullptr;
  for (size_t index = 0;; ++index) {
    if (!Take(index, chunk)) return {ECANCELED, ""};
    if (chunk == nullptr) break;
    if (chunk->copy) {
      if (FileFailure failure = files[chunk->file].Write(chunk->copy.get(), chunk->bytes, chunk->offset))
        return failure;
      chunk->copy.reset();
      const std::lock_guard lock(mutex_);
      held_bytes_ -= chunk->bytes;
      changed_.notify_all();
    } else {
      if (!batch.Takes(*chunk)) {
        if (FileFailure failure = write()) return failure;
        batch.file = chunk->file;
        batch.begin = chunk->offset;
      }
      chunk->sum = CopyAndChecksum(batch.Place(*chunk), chunk->data, static_cast<size_t>(chunk->bytes));
      batch.end = chunk->offset + chunk->bytes;
      const std::lock_guard lock(mutex_);
      --unstaged_;
      changed_.notify_all();
    }
    sums_.push_back({chunk->file, chunk->offset, chunk->bytes, chunk->sum});
  }
  if (FileFailure failure = write()) return failure;
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
  ended_.notify_all();
}

}  // namespace interlace
