// The file tier. One file a rank, laid out in blocks of kTierBlock bytes; each direction has a thread with a buffer
// that direct I/O can use (aligned to 4096). Blocks go one by one, whole ones of memory that is aligned itself
// (page_heap.h) from and to where they lie, others through the buffer:
//
//   StartWrite ─► queue ─► writer: (copy and) checksum a block ─► pwrite ─► pause until the bandwidth allows it
//   StartRead  ─► queue ─► reader: pread a block ─► checksum (, copy) ─► pause
//
// The checksums stay in memory: a tier means nothing after its process, a checkpoint is what lasts. A run that is
// killed leaves its files; the next one takes the place of those with its own ranks' names, and removes the others.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "io/checksum.h"
#include "runtime/recorder.h"
#include "runtime/tier.h"

namespace interlace {

namespace {

constexpr int64_t kAlign = 4096;
constexpr int64_t kTierBlock = int64_t{1} << 20;
constexpr int64_t kMostBytes = int64_t{1} << 60;  // of a tier's file: far from where sums of sizes overflow

int64_t RoundUp(int64_t bytes, int64_t to) {
  return (bytes + to - 1) / to * to;
}

// Closes on destruction.
struct File {
  int fd = -1;
  explicit File(int descriptor = -1) : fd(descriptor) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
  File(File&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd, other.fd);
    return *this;
  }
};

void SleepUntil(int64_t ns) {
  const timespec at{ns / 1000000000, ns % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

struct FilePlace {
  std::string name;
  int64_t offset = 0, bytes = 0;  // in the file
  bool written = false;
  std::vector<uint64_t> checksums;  // by block
};

struct Job {
  Tier::Ticket ticket = 0;
  FilePlace* place = nullptr;
  char* memory = nullptr;
  int64_t bytes = 0;
  bool write = false;
  int64_t given_ns = 0;  // when it was started
};

// What both directions share.
struct Shared {
  std::string path;
  File file;
  bool direct = true;
  double bytes_per_second = 0;
  std::mutex mutex;
  std::condition_variable done;
  std::map<Tier::Ticket, Status> finished;
};

Error IoError(const Shared& shared, const Job& job, int64_t offset, const char* what, int code) {
  std::string hint;
  if (code == ENOSPC) hint = "; the disk is full: free some space or give another tier folder";
  if (code == EIO) hint = "; the disk fails";
  return MakeError(what, " the tier file ", shared.path, " at byte ", offset, " (", job.place->name, ", ", job.bytes,
                   " bytes): ", std::strerror(code), hint);
}

class Worker {
 public:
  explicit Worker(Shared& shared) : shared_(shared) {
    buffer_.reset(static_cast<char*>(std::aligned_alloc(kAlign, kTierBlock)));
    thread_ = std::thread([this] { Loop(); });
  }
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void Give(const Job& job) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(job);
    }
    wake_.notify_one();
  }
  int64_t bytes() const { return bytes_; }
  int64_t busy_ns() const { return busy_ns_; }

 private:
  void Loop() {
    prctl(PR_SET_TIMERSLACK, 1);  // ns: a pause ends when it should; by default up to 50 us late, block by block
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const Job job = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const int64_t begin = NanosOf(CLOCK_MONOTONIC);
      Status status = job.write ? Write(job) : Read(job);
      busy_ns_ += NanosOf(CLOCK_MONOTONIC) - begin;
      if (status.ok()) bytes_ += job.bytes;
      {
        const std::lock_guard finished(shared_.mutex);
        shared_.finished.emplace(job.ticket, std::move(status));
      }
      shared_.done.notify_all();
      lock.lock();
    }
  }

  // Not before the bytes so far could have gone at the bandwidth that was asked for, back to back from when they were
  // given.
  void Pace(const Job& job, int64_t bytes) {
    if (shared_.bytes_per_second <= 0) return;
    free_ns_ = std::max(free_ns_, job.given_ns) +
               static_cast<int64_t>(static_cast<double>(bytes) / shared_.bytes_per_second * 1e9);
    SleepUntil(free_ns_);
  }

  static bool InPlace(const char* memory, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(memory) % kAlign == 0 && bytes % kAlign == 0;
  }

  Status Write(const Job& job) {
    for (int64_t at = 0, block = 0; at < job.bytes; at += kTierBlock, ++block) {
      const int64_t bytes = std::min(kTierBlock, job.bytes - at), padded = RoundUp(bytes, kAlign);
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
            pwrite(shared_.file.fd, from + sent, static_cast<size_t>(padded - sent), job.place->offset + at + sent);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return IoError(shared_, job, job.place->offset + at + sent, "cannot write", n < 0 ? errno : ENOSPC);
        sent += n;
      }
      Forget(job.place->offset + at, padded);
      Pace(job, bytes);
    }
    job.place->written = true;
    return Ok{};
  }

  Status Read(const Job& job) {
    if (!job.place->written) {
      std::memset(job.memory, 0, static_cast<size_t>(job.bytes));
      return Ok{};
    }
    for (int64_t at = 0, block = 0; at < job.bytes; at += kTierBlock, ++block) {
      const int64_t bytes = std::min(kTierBlock, job.bytes - at), padded = RoundUp(bytes, kAlign),
                    offset = job.place->offset + at;
      const bool in_place = InPlace(job.memory + at, bytes);
      char* const to = in_place ? job.memory + at : buffer_.get();
      for (int64_t got = 0; got < padded;) {
        const ssize_t n = pread(shared_.file.fd, to + got, static_cast<size_t>(padded - got), offset + got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return IoError(shared_, job, offset + got, "cannot read", errno);
        if (n == 0) {
          return MakeError("the tier file ", shared_.path, " ends at byte ", offset + got, ", within ", job.place->name,
                           ": it was cut short while the run was using it; start again from the last checkpoint");
        }
        got += n;
      }
      const uint64_t wanted = job.place->checksums[static_cast<size_t>(block)],
                     found = in_place ? Checksum(to, static_cast<size_t>(bytes))
                                      : CopyAndChecksum(job.memory + at, buffer_.get(), static_cast<size_t>(bytes));
      if (found != wanted) {
        return MakeError("the tier file ", shared_.path, " gives other bytes than were written, between ", offset,
                         " and ", offset + bytes, " (", job.place->name, "; XXH64 ", found, ", expected ", wanted,
                         "): the disk or another program changed them; start again from the last checkpoint");
      }
      Forget(offset, padded);
      Pace(job, bytes);
    }
    return Ok{};
  }

  // Without direct I/O the page cache gives back what it holds of the block.
  void Forget(int64_t offset, int64_t bytes) {
    if (!shared_.direct) posix_fadvise(shared_.file.fd, offset, bytes, POSIX_FADV_DONTNEED);
  }

  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  Shared& shared_;
  std::unique_ptr<char, Free> buffer_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  bool stop_ = false;
  std::atomic<int64_t> bytes_{0}, busy_ns_{0};
  int64_t free_ns_ = 0;  // the direction is taken until then
  std::thread thread_;
};

constexpr std::string_view kPrefix = "interlace-tier-", kOwner = "process ";

// What a killed run with more ranks has left. Removed are a lock that nobody holds and the file beside it, if they are
// surely a tier's: by name, plain files of this user's with one name, and our note in the lock. All else stays,
// whatever is wrong with it.
void RemoveLeftBehind(const std::string& folder, int64_t ranks) {
  const auto plain = [](const struct stat& info) {
    return S_ISREG(info.st_mode) && info.st_uid == geteuid() && info.st_nlink == 1;
  };
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    constexpr std::string_view kLock = ".lock";
    if (!name.starts_with(kPrefix) || !name.ends_with(kLock) || name.size() <= kPrefix.size() + kLock.size()) continue;
    const std::string digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kLock.size());
    if (digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos) continue;
    const int64_t rank = std::stoll(digits);
    if (rank < ranks || std::to_string(rank) != digits) continue;
    const std::string base = folder + "/" + name.substr(0, name.size() - kLock.size()), lock_path = base + ".lock";
    const File lock(open(lock_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat held {
    }, named{}, data{};
    char note[kOwner.size()] = {};
    if (lock.fd < 0 || fstat(lock.fd, &held) != 0 || !plain(held)) continue;
    if (pread(lock.fd, note, sizeof(note), 0) != static_cast<ssize_t>(sizeof(note)) ||
        std::string_view(note, sizeof(note)) != kOwner)
      continue;
    if (flock(lock.fd, LOCK_EX | LOCK_NB) != 0) continue;  // its run is alive
    if (lstat(lock_path.c_str(), &named) != 0 || named.st_ino != held.st_ino || named.st_dev != held.st_dev) continue;
    const std::string path = base + ".data";
    if (lstat(path.c_str(), &data) == 0 && (!plain(data) || unlink(path.c_str()) != 0)) continue;
    unlink(lock_path.c_str());
  }
}

class FileTier final : public Tier {
 public:
  explicit FileTier(const TierOptions& options) : options_(options) {}

  Status Open() {
    const std::string& folder = options_.folder;
    struct stat info {};
    if (stat(folder.c_str(), &info) != 0) {
      return MakeError("the tier folder '", folder, "' cannot be used: ", std::strerror(errno),
                       errno == ENOENT ? "; make it first, on a fast local disk" : "");
    }
    if (!S_ISDIR(info.st_mode)) return MakeError("the tier '", folder, "' is not a folder");
    const std::string base = folder + "/" + std::string(kPrefix) + std::to_string(options_.rank);
    // A link in a folder that others can write to must not lead us to truncate what it points at.
    constexpr int kOpen = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    lock_ = File(open((base + ".lock").c_str(), kOpen, 0600));
    if (lock_.fd < 0) {
      return MakeError("the tier folder '", folder,
                       "' is not writable: ", errno == ELOOP ? base + ".lock is a link" : std::strerror(errno));
    }
    if (flock(lock_.fd, LOCK_EX | LOCK_NB) != 0) {
      char owner[64] = {};
      const ssize_t n = pread(lock_.fd, owner, sizeof(owner) - 1, 0);
      return MakeError("the tier folder '", folder, "' is in use by another run (",
                       n > 0 ? owner : "an unknown process", "); give each run a folder of its own");
    }
    const std::string owner = std::string(kOwner) + std::to_string(getpid());
    if (ftruncate(lock_.fd, 0) != 0 || pwrite(lock_.fd, owner.data(), owner.size(), 0) < 0) {
      return MakeError("the tier folder '", folder, "' cannot be written: ", std::strerror(errno),
                       errno == ENOSPC ? "; its disk is full" : "");
    }
    const std::string path = base + ".data";
    int fd = open(path.c_str(), kOpen | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL) {
      shared_.direct = false;
      fd = open(path.c_str(), kOpen | O_TRUNC, 0600);
    }
    if (fd < 0)
      return MakeError("the tier file ", path,
                       " cannot be made: ", errno == ELOOP ? "it is a link" : std::strerror(errno));
    shared_.file = File(fd);
    shared_.path = path;  // from here on it is ours to remove
    shared_.bytes_per_second = options_.bytes_per_second;
    RemoveLeftBehind(folder, options_.ranks);
    writer_ = std::make_unique<Worker>(shared_);
    reader_ = std::make_unique<Worker>(shared_);
    return Ok{};
  }

  ~FileTier() override {
    writer_.reset();
    reader_.reset();
    if (!shared_.path.empty()) unlink(shared_.path.c_str());
  }

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].bytes == bytes) return static_cast<Region>(i);
    }
    if (bytes < 0 || bytes > kMostBytes - end_)
      return MakeError(name, " of ", bytes, " bytes is more than a tier can hold");
    const int64_t padded = RoundUp(std::max<int64_t>(bytes, 1), kAlign);
    int code;
    do code = posix_fallocate(shared_.file.fd, end_, padded);
    while (code == EINTR);
    if (code != 0 && code != EOPNOTSUPP && code != EINVAL) {
      struct statvfs disk {};
      const bool known = statvfs(options_.folder.c_str(), &disk) == 0;
      return MakeError("the tier folder '", options_.folder, "' has no room for ", name, " (", bytes, " bytes after ",
                       end_, " reserved",
                       known ? ", " + std::to_string(disk.f_bavail * disk.f_frsize) + " free" : std::string(),
                       "): ", std::strerror(code), "; give a folder on a larger disk, or a higher memory limit");
    }
    FilePlace& place = places_.emplace_back();
    place.name = name;
    place.offset = end_;
    place.bytes = bytes;
    place.checksums.resize(static_cast<size_t>((bytes + kTierBlock - 1) / kTierBlock));
    end_ += padded;
    return static_cast<Region>(places_.size() - 1);
  }

  Ticket StartWrite(Region region, const void* memory, int64_t bytes) override {
    writer_->Give({++last_, &places_[region], static_cast<char*>(const_cast<void*>(memory)), bytes, true,
                   NanosOf(CLOCK_MONOTONIC)});
    return last_;
  }
  Ticket StartRead(Region region, void* memory, int64_t bytes) override {
    reader_->Give({++last_, &places_[region], static_cast<char*>(memory), bytes, false, NanosOf(CLOCK_MONOTONIC)});
    return last_;
  }
  Status Wait(Ticket ticket) override {
    std::unique_lock lock(shared_.mutex);
    shared_.done.wait(lock, [&] { return shared_.finished.contains(ticket); });
    auto node = shared_.finished.extract(ticket);
    return std::move(node.mapped());
  }

  TierStats stats() const override {
    return {.bytes_out = writer_->bytes(),
            .bytes_in = reader_->bytes(),
            .reserved_bytes = end_,
            .out_ns = writer_->busy_ns(),
            .in_ns = reader_->busy_ns(),
            .buffer_bytes = 2 * kTierBlock,
            .direct = shared_.direct};
  }
  std::string note() const override {
    if (shared_.direct) return {};
    return "the tier folder '" + options_.folder +
           "' has no direct I/O: its bytes pass through the page cache, which is asked to drop them" +
           (options_.bytes_per_second > 0 ? "" : "; limit it with tier_bandwidth to count it as a disk");
  }

 private:
  TierOptions options_;
  File lock_;
  Shared shared_;
  std::deque<FilePlace> places_;  // stable addresses: jobs point at them
  int64_t end_ = 0;
  Ticket last_ = 0;
  std::unique_ptr<Worker> writer_, reader_;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeFileTier(const TierOptions& options) {
  auto tier = std::make_unique<FileTier>(options);
  INTERLACE_TRY(tier->Open());
  return std::unique_ptr<Tier>(std::move(tier));
}

}  // namespace interlace
