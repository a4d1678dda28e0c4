// cost_options.h — what passes that decide by cost read from their options: the cluster, a profile, a memory limit.
//
//   prefetch(cluster=h100-80gb-32,profile=run.profile,limit=60GiB)
//
// `cluster` is a preset's name or the path of a TOML file (default: local-<ranks of the program>), `profile` the path
// of a profile's text, `limit` the bytes a rank may use (default: what the cluster's device has; none on CPUs).
#pragma once

#include <memory>

#include "base/result.h"
#include "cost/cost_model.h"
#include "cost/profile_table.h"
#include "passes/pass_options.h"
#include "passes/pass_table.h"

namespace interlace {

struct PassCosts {
  ClusterSpec cluster;
  std::unique_ptr<ProfileTable> profile;  // nullptr: none was given
  int64_t limit = 0;                      // bytes of a rank; INT64_MAX: no limit
  bool transient = false;  // pass transient_gradients runs behind: programs are judged as it makes them

  // A model over the program as it is now; it keeps pointers to the program and to this.
  Result<CostModel> Model(const Program& program) const { return CostModel::Create(program, cluster, profile.get()); }
};

// Error: an unknown preset, a file that cannot be read or parsed, a bad limit.
Result<PassCosts> ReadCosts(const Program& program, const PassOptions& options);

// Their rows in the pass table.
inline const OptionInfo kClusterOption = {"cluster", OptionKind::kText, "local", "preset or TOML file of the machines"};
inline const OptionInfo kProfileOption = {"profile", OptionKind::kText, "none", "file with measured times"};
inline const OptionInfo kLimitOption = {"limit", OptionKind::kBytes, "none", "bytes a rank may use"};

}  // namespace interlace
