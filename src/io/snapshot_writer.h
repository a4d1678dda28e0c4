// snapshot_writer.h — writes memory that is about to change to files, while its owner goes on working.
//
// A thread copies chunk by chunk into one small buffer, takes the checksum, and writes what follows on each other in
// the file at one blow. The owner may read the memory meanwhile; before it writes there it calls WaitStaged, and what
// the thread has not reached yet is copied then and there, up to `staging_bytes` at once:
//
//   owner    start ─ forward ─ backward ────── WaitStaged ─ update ─ forward ...
//   thread         copy+write 0 │ 1 │ ... │ 6 │            7' │ 8' │ 9' │ sync   7' to 9': of what WaitStaged copied
//
// With a disk that keeps up nothing is ever held twice, and WaitStaged returns at once.
//
// Memory may also come bit by bit: Add, WaitStaged, give the memory back, Add the next, and at last Close.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/output_file.h"

namespace interlace {

// Bytes of memory and their place in one of the files.
struct Piece {
  const char* data = nullptr;
  int64_t bytes = 0;
  int32_t file = 0;
  int64_t offset = 0;
};

// The checksum of a range of a file.
struct RangeSum {
  int32_t file = 0;
  int64_t offset = 0, bytes = 0;
  uint64_t sum = 0;
};

class SnapshotWriter {
 public:
  struct Options {
    int64_t chunk_bytes = 1 << 20;  // a multiple of kBlock: of a checksum, and of what WaitStaged copies
    int64_t batch_bytes = 2 << 20;  // of the thread's buffer, at least a chunk: a write costs 50 us besides its bytes
    int64_t staging_bytes = INT64_MAX;  // most that WaitStaged may hold in copies
  };
  struct Stats {
    int64_t staged_bytes = 0;             // copied by WaitStaged
    int64_t staging_peak_bytes = 0;       // highest held at once, the thread's own buffer included
    double stall_seconds = 0;             // that WaitStaged took
    double cpu_seconds = 0, seconds = 0;  // of the thread
  };

  // The files exist and are long enough.
  SnapshotWriter(std::vector<std::string> paths, Options options);
  ~SnapshotWriter();  // cancels
  // Goes on to these. The memory must stay until staged() or WaitStaged.
  void Add(const std::vector<Piece>& pieces);
  // Nothing more will be added.
  void Close();
  // Returns when the memory of what was added is no longer needed. Any thread, any number of times.
  void WaitStaged();
  bool staged();
  // After Close: returns when the disk has everything, or with what went wrong (ECANCELED after Cancel).
  FileFailure WaitDurable();
  void Cancel();
  // After WaitDurable, in the order in which they were added.
  const std::vector<RangeSum>& sums() const { return sums_; }
  Stats stats();
  size_t files() const { return paths_.size(); }

 private:
  enum class State : uint8_t { kWaiting, kCopying, kStaged, kTaken };
  struct Chunk {
    const char* data;
    int64_t bytes;
    int32_t file;
    int64_t offset;
    State state = State::kWaiting;
    uint64_t sum = 0;  // once it was copied
    Blocks copy;
  };
  // Chunks in the thread's buffer, one after the other in a file; each byte as far from a block's start as in the file.
  struct Batch {
    Blocks buffer;
    int64_t capacity = 0;
    int32_t file = 0;
    int64_t begin = 0, end = 0;  // of the file
    bool Takes(const Chunk& chunk) const;
    char* Place(const Chunk& chunk) { return buffer.get() + begin % kBlock + (chunk.offset - begin); }
  };
  void Run();
  FileFailure WriteChunks();
  bool Take(size_t index, Chunk*& chunk);

  Options options_;
  std::vector<std::string> paths_;
  std::deque<Chunk> chunks_;  // stable addresses: a chunk is copied and written while others are added
  std::vector<RangeSum> sums_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a chunk's state, what is held, closed, cancelled
  std::condition_variable ended_;    // done: apart, so that who waits for the disk is not woken by every chunk
  size_t unstaged_ = 0;              // chunks whose memory is still needed
  size_t next_to_stage_ = 0;         // chunks before it are no business of WaitStaged any more
  int64_t held_bytes_ = 0;
  bool closed_ = false, cancelled_ = false, done_ = false;
  FileFailure failure_;
  Stats stats_;
  std::thread thread_;
};

}  // namespace interlace
