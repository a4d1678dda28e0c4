// cost_model.h — what every op of a program costs on a cluster: measured where a profile has it, else estimated.
//
// Times are picoseconds in 64-bit integers (a step may take 100 days), so that sums and the simulator on top of them
// give the same bits everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "cost/cluster.h"
#include "cost/collective_model.h"
#include "cost/profile_table.h"
#include "ir/op_table.h"
#include "ir/program.h"

namespace interlace {

enum class Resource : uint8_t {
  kNone,
  kCompute,
  kIntraLink,
  kInterLink,
  kHostToDevice,
  kDeviceToHost,
  kFile,
  kHostMemory
};

struct OpCost {
  enum class Source : uint8_t { kFree, kMeasured, kEstimated };
  Source source = Source::kFree;
  Resource resource = Resource::kNone;
  bool sends = false, receives = false;  // directions of a link that it fills; of a file: writes, reads
  int64_t latency_ps = 0;                // of a transfer: not slowed by what else runs
  int64_t work_ps = 0;                   // alone
  int64_t bytes = 0;                     // moved by one rank
  int64_t transient_bytes = 0;           // inside the op, beyond operands and results
  // On CPUs: processors that a transfer takes on each rank while it runs; time of the rank's own thread to start it,
  // and after the data has come (the sum of a reduction, in the op that waits). Measured ones only.
  double core_share = 0;
  int64_t issue_ps = 0, finish_ps = 0;
  double store_share = 1;   // of a file copy: of the store's rate in its direction that it takes alone
  int64_t group_ranks = 1;  // of a collective
};

// Largest time of one op: sums of 2^40 of them still fit.
inline constexpr int64_t kMaxOpPicoseconds = int64_t{1} << 62;
// Error: not a number, or too long.
Result<int64_t> Picoseconds(double us);
inline double Microseconds(int64_t ps) {
  return static_cast<double>(ps) / 1e6;
}

class CostModel {
 public:
  // `program` and `profile` (may be nullptr) must outlive the model. Error: the mesh has more ranks than the cluster
  // devices.
  static Result<CostModel> Create(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile);

  // Error: a size that is not yet a number, a time beyond 64 bits, a lane that the op cannot run on.
  Result<OpCost> Cost(const Op& op);
  // Of a collective that need not exist: `units` buffers of `bytes` together, in one call along `axis`.
  Result<OpCost> CollectiveCost(Exchange kind, std::string_view axis, double bytes, int64_t units);

  // Of bytes that go out to the tier, or come from it.
  Result<OpCost> CopyCost(Lane lane, bool to_device, double bytes);

  const ClusterSpec& cluster() const { return cluster_; }
  const Interference& interference() const { return interference_; }
  int64_t ranks() const { return ranks_; }
  // Ranks that share one host.
  int64_t ranks_per_node() const { return std::min(ranks_, cluster_.per_node); }
  // Cores of the host for each of them.
  double FairCores() const { return std::max(cluster_.cores / static_cast<double>(ranks_per_node()), 1e-3); }
  // Distinct compute ops, and those whose time comes from the profile; for the summary.
  struct Coverage {
    int64_t ops = 0, measured = 0;
  };
  const Coverage& coverage() const { return coverage_; }

 private:
  CostModel(const Program& program, const ClusterSpec& cluster, const ProfileTable* profile)
      : program_(&program), cluster_(cluster), profile_(profile) {}
  Result<OpCost> Compute(const Op& op);
  Result<OpCost> Collective(const Op& op, Exchange kind);
  Result<OpCost> OntoReplicas(const Op& op, const OpCost& within, double bytes, int64_t units);
  Result<OpCost> InRowsAndColumns(Exchange kind, std::string_view axes, double bytes, int64_t units);
  // `ranks`: the profile's word for the group.
  Result<OpCost> Timed(Exchange kind, GroupShape group, const std::string& ranks, double bytes, int64_t units);
  Result<OpCost> Copy(const Op& op, bool to_device);
  Result<OpCost> HostStep(const Op& op);
  void ReadPairs(const ProfileTable& profile);
  Result<double> OperandBytes(const Op& op, bool results) const;

  const Program* program_;
  ClusterSpec cluster_;
  const ProfileTable* profile_;
  Interference interference_;
  int64_t ranks_ = 1;
  Coverage coverage_;
  std::string key_;  // reused by every look-up
  std::unordered_map<std::string, OpCost, StringHash, std::equal_to<>> known_;
};

}  // namespace interlace
