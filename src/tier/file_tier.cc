// The file tier. One file a rank, laid out in blocks of kTierBlock bytes; each direction has a thread with a buffer
// that direct I/O can use (aligned to 4096). Blocks go one by one, whole ones of memory that is aligned itself
// (page_heap.h) from and to where they lie, others through the buffer:
//
//   StartWrite ─► queue ─► writer: (copy and) checksum a block ─► pwrite ─► pause until the bandwidth allows it
//   StartRead  ─► queue ─► reader: pread a block ─► checksum (, copy) ─► pause
//
// The checksums stay in memory: a tier means nothing after its process, a checkpoint is what lasts.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>

#include "base/clock.h"
#include "tier/file_worker.h"
#include "tier/tier_folder.h"

namespace interlace {

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 60;  // of a tier's file: far from where sums of sizes overflow

int64_t RoundUp(int64_t bytes, int64_t to) {
  return (bytes + to - 1) / to * to;
}

class FileTier final : public Tier {
 public:
  explicit FileTier(const TierOptions& options) : options_(options) {}

  Status Open() {
    INTERLACE_TRY(OpenTierFile(options_, lock_, file_));
    writer_ = std::make_unique<FileWorker>(file_);
    reader_ = std::make_unique<FileWorker>(file_);
    return Ok{};
  }

  ~FileTier() override {
    writer_.reset();
    reader_.reset();
    if (!file_.path.empty()) unlink(file_.path.c_str());
  }

  Result<Region> Reserve(const std::string& name, int64_t bytes) override {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].name == name && places_[i].bytes == bytes) return static_cast<Region>(i);
    }
    if (bytes < 0 || bytes > kMostBytes - end_)
      return MakeError(name, " of ", bytes, " bytes is more than a tier can hold");
    const int64_t padded = RoundUp(std::max<int64_t>(bytes, 1), kTierAlign);
    int code;
    do code = posix_fallocate(file_.file.fd, end_, padded);
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
    std::unique_lock lock(file_.mutex);
    file_.done.wait(lock, [&] { return file_.finished.contains(ticket); });
    auto node = file_.finished.extract(ticket);
    return std::move(node.mapped());
  }

  TierStats stats() const override {
    return {.bytes_out = writer_->bytes(),
            .bytes_in = reader_->bytes(),
            .reserved_bytes = end_,
            .out_ns = writer_->busy_ns(),
            .in_ns = reader_->busy_ns(),
            .buffer_bytes = 2 * kTierBlock,
            .direct = file_.direct};
  }
  std::string note() const override {
    if (file_.direct) return {};
    return "the tier folder '" + options_.folder +
           "' has no direct I/O: its bytes pass through the page cache, which is asked to drop them" +
           (options_.bytes_per_second > 0 ? "" : "; limit it with tier_bandwidth to count it as a disk");
  }

 private:
  TierOptions options_;
  File lock_;
  TierFile file_;
  std::deque<FilePlace> places_;  // stable addresses: jobs point at them
  int64_t end_ = 0;
  Ticket last_ = 0;
  std::unique_ptr<FileWorker> writer_, reader_;
};

}  // namespace

Result<std::unique_ptr<Tier>> MakeFileTier(const TierOptions& options) {
  auto tier = std::make_unique<FileTier>(options);
  INTERLACE_TRY(tier->Open());
  return std::unique_ptr<Tier>(std::move(tier));
}

}  // namespace interlace
