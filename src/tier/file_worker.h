// file_worker.h — one direction of the file tier (file_tier.cc): a thread that writes or reads regions block by block,
// with checksums and, where asked for, no faster than a bandwidth.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/result.h"
#include "tier/tier.h"

namespace interlace {

constexpr int64_t kTierAlign = 4096;  // of direct I/O
constexpr int64_t kTierBlock = int64_t{1} << 20;

// A descriptor that is closed on destruction.
struct File {
  int fd = -1;
  explicit File(int descriptor = -1) : fd(descriptor) {}
  ~File() { Close(); }
  File(File&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd, other.fd);
    return *this;
  }
  void Close();
};

// A region.
struct FilePlace {
  std::string name;
  int64_t offset = 0, bytes = 0;  // in the file
  bool written = false;
  std::vector<uint64_t> checksums;  // by block
};

struct FileJob {
  Tier::Ticket ticket = 0;
  FilePlace* place = nullptr;
  char* memory = nullptr;
  int64_t bytes = 0;
  bool write = false;
  int64_t given_ns = 0;  // when it was started
};

// What both directions share.
struct TierFile {
  std::string path;
  File file;
  bool direct = true;
  double bytes_per_second = 0;
  std::mutex mutex;
  std::condition_variable done;
  std::map<Tier::Ticket, Status> finished;
};

class FileWorker {
 public:
  explicit FileWorker(TierFile& file);
  ~FileWorker();  // what it has begun is ended, the rest is dropped

  void Give(const FileJob& job);
  int64_t bytes() const { return bytes_; }
  int64_t busy_ns() const { return busy_ns_; }

 private:
  void Loop();
  void Pace(const FileJob& job, int64_t bytes);
  Status Write(const FileJob& job);
  Status Read(const FileJob& job);
  void Forget(int64_t offset, int64_t bytes);
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  TierFile& file_;
  std::unique_ptr<char, Free> buffer_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<FileJob> queue_;
  bool stop_ = false;
  std::atomic<int64_t> bytes_{0}, busy_ns_{0};
  int64_t free_ns_ = 0;  // the direction is taken until then
  std::thread thread_;
};

}  // namespace interlace
