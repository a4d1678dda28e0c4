#include "tier/tier_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

namespace interlace {

namespace {

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

}  // namespace

Status OpenTierFile(const TierOptions& options, File& lock, TierFile& file) {
  const std::string& folder = options.folder;
  struct stat info {};
  if (stat(folder.c_str(), &info) != 0) {
    return MakeError("the tier folder '", folder, "' cannot be used: ", std::strerror(errno),
                     errno == ENOENT ? "; make it first, on a fast local disk" : "");
  }
  if (!S_ISDIR(info.st_mode)) return MakeError("the tier '", folder, "' is not a folder");
  const std::string base = folder + "/" + std::string(kPrefix) + std::to_string(options.rank);
  // A link in a folder that others can write to must not lead us to truncate what it points at.
  constexpr int kOpen = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
  lock = File(open((base + ".lock").c_str(), kOpen, 0600));
  if (lock.fd < 0) {
    return MakeError("the tier folder '", folder,
                     "' is not writable: ", errno == ELOOP ? base + ".lock is a link" : std::strerror(errno));
  }
  if (flock(lock.fd, LOCK_EX | LOCK_NB) != 0) {
    char owner[64] = {};
    const ssize_t n = pread(lock.fd, owner, sizeof(owner) - 1, 0);
    return MakeError("the tier folder '", folder, "' is in use by another run (", n > 0 ? owner : "an unknown process",
                     "); give each run a folder of its own");
  }
  const std::string owner = std::string(kOwner) + std::to_string(getpid());
  if (ftruncate(lock.fd, 0) != 0 || pwrite(lock.fd, owner.data(), owner.size(), 0) < 0) {
    return MakeError("the tier folder '", folder, "' cannot be written: ", std::strerror(errno),
                     errno == ENOSPC ? "; its disk is full" : "");
  }
  const std::string path = base + ".data";
  int fd = open(path.c_str(), kOpen | O_TRUNC | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) {
    file.direct = false;
    fd = open(path.c_str(), kOpen | O_TRUNC, 0600);
  }
  if (fd < 0)
    return MakeError("the tier file ", path,
                     " cannot be made: ", errno == ELOOP ? "it is a link" : std::strerror(errno));
  file.file = File(fd);
  file.path = path;  // from here on it is ours to remove
  file.bytes_per_second = options.bytes_per_second;
  RemoveLeftBehind(folder, options.ranks);
  return Ok{};
}

}  // namespace interlace
