#include "passes/cost_options.h"

#include <limits>

#include "base/files.h"

namespace interlace {

Result<PassCosts> ReadCosts(const Program& program, const PassOptions& options) {
  PassCosts costs;
  const int64_t ranks = program.Ranks();
  std::string name = options.Text("cluster", "local");
  if (name == "local") name += "-" + std::to_string(ranks);
  const bool file = name.ends_with(".toml") || name.find('/') != std::string::npos;
  if (file) {
    INTERLACE_ASSIGN(std::string text, ReadFile(name));
    INTERLACE_ASSIGN(costs.cluster, ParseCluster(text, name));
  } else {
    INTERLACE_ASSIGN(costs.cluster, LoadCluster(name, "cluster"));
  }
  std::string profile = options.Text("profile", "none");
  if (profile != "none") {
    INTERLACE_ASSIGN(std::string text, ReadFile(profile));
    INTERLACE_ASSIGN(ProfileTable table, ParseProfile(text, profile));
    costs.profile = std::make_unique<ProfileTable>(std::move(table));
  }
  INTERLACE_ASSIGN(std::optional<int64_t> limit, options.Bytes("limit"));
  if (limit) {
    costs.limit = *limit;
  } else {
    costs.limit = costs.cluster.cpu ? std::numeric_limits<int64_t>::max() : costs.cluster.MemoryLimitBytes();
  }
  return costs;
}

}  // namespace interlace
