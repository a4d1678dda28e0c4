// output_file.h — writing ranges of a file that others write too, past the page cache where the system lets us.
//
// A buffered write of 256 MB costs half a second of a core, a direct one 8 ms; but a direct write takes whole blocks.
// So the blocks that a range covers go directly, and its two ends, which share their blocks with other ranges, through
// the page cache. Direct and buffered writes never meet in one block, because every writer cuts at the same places.
//
//   range       |   ####|########|########|##      |
//   buffered         ^^^                    ^^           direct: the two blocks between
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace interlace {

inline constexpr int64_t kBlock = 4096;  // bytes: what direct writes are aligned to, in memory and in the file

// What the system refused: its number (ENOSPC, ...) and where. `code` 0 is success.
struct FileFailure {
  int code = 0;
  std::string path;
  explicit operator bool() const { return code != 0; }
};

class OutputFile {
 public:
  OutputFile() = default;
  OutputFile(OutputFile&& other) noexcept { *this = std::move(other); }
  OutputFile& operator=(OutputFile&& other) noexcept;
  ~OutputFile();

  // Opens an existing file for writing.
  FileFailure Open(const std::string& path);
  // Writes data[lead, lead + size) of a block-aligned buffer at `offset`, where lead = offset % kBlock.
  FileFailure Write(const char* buffer, int64_t size, int64_t offset);
  // Until the disk has it.
  FileFailure Sync();

 private:
  FileFailure WriteAll(int descriptor, const char* data, int64_t size, int64_t offset);

  std::string path_;
  int buffered_ = -1, direct_ = -1;
};

// Makes a file of `size` bytes that begins with `head`, with all of its room set aside: a full disk is found now and
// not half-way.
FileFailure CreateFile(const std::string& path, const std::string& head, int64_t size);

// Block-aligned memory. From 2 MiB on in huge pages: to the system a direct write from one of these is one segment,
// from small pages hundreds, for which it takes twice the processor time.
struct FreeAligned {
  void operator()(char* memory) const;
};
using Blocks = std::unique_ptr<char[], FreeAligned>;
Blocks AllocateBlocks(int64_t size);

}  // namespace interlace
