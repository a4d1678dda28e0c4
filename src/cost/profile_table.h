// profile_table.h — what was measured on real machines, in the one text form that the cost model reads.
//
//   interlace-profile 2
//   fingerprint "AMD EPYC, 2 cores, torch 2.13.0, 1 thread, 2 ranks"
//   op "aten.mm(f32[512,256],f32[256,512])->f32[512,512]" us 812.5 bytes 1048576 transient 0 measured
//   op "aten._softmax(f32[8,64],-1,false)->f32[8,64]" us 11.2 bytes 2048 transient 0 estimated
//   collective gather ranks 2 bytes 1048576 us 913.0
//   core gather ranks 2 bytes 1048576 us 1220
//   finish reduce ranks 2 bytes 1048576 us 80.5
//   copy h2d bytes 1048576 us 104.1
//   issue us 12.5
//   together compute 1.04 file_read 1.31
//   interference [1.1, ...]
//
// us: median microseconds, on CPUs on cores of its own (ranks that must share cores are the simulator's matter), of a
// collective until the last rank has it; bytes of an op: its results; transient: the peak inside the op beyond operands
// and results. Bytes of a collective: the whole buffer of a rank; of a copy: what is moved. `estimated` marks what was
// too large to run. On CPUs, where a collective works on the cores that ranks compute on: `core` is the processor time
// one rank spends for it on all its threads, `finish` what its own thread does after the data has come (both within
// `us`; a size may have these two alone), `issue` what its thread takes to start a transfer. Collectives: gather,
// reduce, all_reduce, broadcast, all_to_all, p2p; copies: h2d, d2h, file_read, file_write.
//
// `ranks`: how many, and where they are not neighbours in the mesh how far apart: "2/4" are two ranks four apart.
// "2+2/2" is the reduction of hybrid sharding, within the first group and then across the second.
//
// `together`: two kinds of work and the factor, at least 1, by which each takes longer while the other is under way:
// compute, collective and the copies. What sharing cores explains is left out of a pair of compute and a collective,
// for the simulator adds it; copies are not counted against the cores, so their pairs hold it. `interference`: the 28
// factors of cost/cluster.h, for accelerators. Version 1 has no pairs, and is read as well.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"

namespace interlace {

struct OpTiming {
  double us = 0;
  int64_t bytes = 0;
  int64_t transient_bytes = 0;
  bool measured = true;
};

// Measured times over sizes; between them by lines, beyond them by the nearest line.
class Sweep {
 public:
  // Error: a size given twice.
  Status Add(int64_t bytes, double us);
  // nullopt without points.
  std::optional<double> Us(double bytes) const;
  const std::map<int64_t, double>& points() const { return points_; }

 private:
  std::map<int64_t, double> points_;
};

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
};

struct ProfileTable {
  std::string fingerprint;
  std::unordered_map<std::string, OpTiming, StringHash, std::equal_to<>> ops;
  using Sweeps = std::map<std::pair<std::string, std::string>, Sweep>;  // by kind, group (RanksWord)
  Sweeps collectives, core, finish;
  std::map<std::string, Sweep> copies;
  std::optional<double> issue_us;
  // Factors of two kinds that run at the same time, the kinds in the order of kTogether.
  std::map<std::pair<std::string, std::string>, std::pair<double, double>> together;
  std::vector<double> interference;  // 28, or empty
};

// Whether the profile is of another machine than `machine` (a fingerprint; "" accepts any). Error: it is, and may not
// be.
Result<bool> IsOfAnotherMachine(const ProfileTable& profile, const std::string& machine, bool may_be);

// Error: "file:line:col" with the line and a caret: unknown words (did you mean), times that are not positive,
// duplicates.
Result<ProfileTable> ParseProfile(std::string_view text, std::string_view file);

}  // namespace interlace
