#include "io/output_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

namespace interlace {

namespace {

constexpr int64_t kDirectFrom = 64 << 10;  // bytes; below, a direct write's own cost is the larger
constexpr int64_t kHugePage = 2 << 20;     // bytes

}  // namespace

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(buffered_, other.buffered_);
  std::swap(direct_, other.direct_);
  return *this;
}

OutputFile::~OutputFile() {
  for (int descriptor : {buffered_, direct_}) {
    if (descriptor >= 0) close(descriptor);
  }
}

FileFailure OutputFile::Open(const std::string& path) {
  path_ = path;
  buffered_ = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
  if (buffered_ < 0) return {errno, path};
#ifdef O_DIRECT
  direct_ = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_DIRECT);  // refused by some file systems
#endif
  return {};
}

FileFailure OutputFile::WriteAll(int descriptor, const char* data, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t written = pwrite(descriptor, data, static_cast<size_t>(size), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return {written < 0 ? errno : EIO, path_};
    data += written, size -= written, offset += written;
    // The rest of a direct write that was cut short need not be aligned any more.
    if (descriptor == direct_ && size > 0 && written % kBlock != 0) descriptor = buffered_;
  }
  return {};
}

FileFailure OutputFile::Write(const char* buffer, int64_t size, int64_t offset) {
  const int64_t lead = offset % kBlock;
  const char* data = buffer + lead;
  if (direct_ < 0 || size < kDirectFrom) return WriteAll(buffered_, data, size, offset);
  const int64_t head = lead == 0 ? 0 : kBlock - lead;
  const int64_t blocks = (size - head) / kBlock * kBlock;
  if (FileFailure failure = WriteAll(buffered_, data, head, offset)) return failure;
  FileFailure failure = WriteAll(direct_, data + head, blocks, offset + head);
  if (failure.code == EINVAL) {  // opened, but not served: this file system cannot
    close(std::exchange(direct_, -1));
    failure = WriteAll(buffered_, data + head, blocks, offset + head);
  }
  if (failure) return failure;
  return WriteAll(buffered_, data + head + blocks, size - head - blocks, offset + head + blocks);
}

FileFailure OutputFile::Sync() {
  return fsync(buffered_) == 0 ? FileFailure{} : FileFailure{errno, path_};
}

FileFailure CreateFile(const std::string& path, const std::string& head, int64_t size) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return {errno, path};
  FileFailure failure;
  int refused = 0;
  while (size > 0 && (refused = fallocate(descriptor, 0, 0, size) == 0 ? 0 : errno) == EINTR) {
  }
  if (refused != 0) {
    const bool cannot = refused == EOPNOTSUPP || refused == ENOSYS;
    if (!cannot) failure = {refused, path};
    if (cannot && ftruncate(descriptor, size) != 0) failure = {errno, path};
  }
  for (size_t done = 0; !failure && done < head.size();) {
    const ssize_t written = pwrite(descriptor, head.data() + done, head.size() - done, static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) failure = {written < 0 ? errno : EIO, path};
    done += static_cast<size_t>(std::max<ssize_t>(written, 0));
  }
  if (close(descriptor) != 0 && !failure) failure = {errno, path};
  return failure;
}

void FreeAligned::operator()(char* memory) const {
  std::free(memory);
}

Blocks AllocateBlocks(int64_t size) {
  const int64_t align = size >= kHugePage ? kHugePage : kBlock;
  const auto bytes = static_cast<size_t>((size + align - 1) / align * align);
  Blocks blocks(static_cast<char*>(std::aligned_alloc(static_cast<size_t>(align), bytes)));
  if (blocks && align == kHugePage) madvise(blocks.get(), bytes, MADV_HUGEPAGE);
  return blocks;
}

}  // namespace interlace
