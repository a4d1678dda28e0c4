// tier.h — where storages lie that are not in memory: files, or host memory that no limit counts.
//
// A tier holds regions, one for each storage that ever goes out, reserved before the first step so that a full disk is
// found then. Transfers are asynchronous and go one after another in each direction; a ticket is waited for once.
//
//   region = Reserve("u0.exp_avg", bytes)
//   Wait(StartWrite(region, memory, bytes));     memory may be freed
//   Wait(StartRead(region, memory, bytes));      the same bits, or an error that says where they were lost
//
// Not thread-safe: one thread starts and waits. A region that was never written reads as zeros.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace interlace {

struct TierOptions {
  std::string folder;           // of a file tier; "host": host memory; empty: none
  double bytes_per_second = 0;  // at most, in each direction; 0: as fast as it goes
  int64_t rank = 0,
          ranks = 1;  // the rank names its own files; those that a killed run left for higher ones are removed
};

struct TierStats {
  int64_t bytes_out = 0, bytes_in = 0, reserved_bytes = 0;
  int64_t out_ns = 0, in_ns = 0;  // that its workers were busy, pauses of a limited bandwidth included
  int64_t buffer_bytes = 0;       // memory of its own, beside the storages
  bool direct = true;             // past the page cache
};

class Tier {
 public:
  using Region = int32_t;
  using Ticket = int64_t;

  virtual ~Tier() = default;
  // A place for `bytes` under a name; the one that is there when name and size are the same. Error: no room.
  virtual Result<Region> Reserve(const std::string& name, int64_t bytes) = 0;
  // `memory` must stay until the ticket was waited for; reads of a region come after writes of it were waited for.
  virtual Ticket StartWrite(Region region, const void* memory, int64_t bytes) = 0;
  virtual Ticket StartRead(Region region, void* memory, int64_t bytes) = 0;
  // Error: the write or read failed, or the bits are not those that were written; it names file, offset and region.
  virtual Status Wait(Ticket ticket) = 0;
  // The region's bytes, where an optimizer step can be made on them; nullptr: no memory.
  virtual void* Memory(Region) { return nullptr; }
  // Until no copy to or from the region is under way, so that its bytes may be read and written; from any thread.
  virtual void AwaitCopies(Region) {}
  virtual TierStats stats() const = 0;
  // What makes it less than its best on this machine, "" when nothing does.
  virtual std::string note() const { return {}; }
};

// Files in `options.folder`: direct I/O, a checksum (XXH64) of each block kept in memory, one thread for each
// direction. The folder is the run's own: a lock refuses another one. Error: no such folder, not writable, locked.
Result<std::unique_ptr<Tier>> MakeFileTier(const TierOptions& options);
// Host memory. The thread that starts a copy makes it.
std::unique_ptr<Tier> MakeHostTier();

}  // namespace interlace
