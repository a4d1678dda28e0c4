#include "sim/testing/simulate_text.h"

#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace {

Result<std::string> SimulateText(std::string_view program_text, std::string_view cluster_text,
                                 std::string_view profile_text, std::string_view output,
                                 const SimulateOptions& options) {
  INTERLACE_ASSIGN(Program program, Parse(program_text, "program"));
  INTERLACE_TRY(Verify(program));  // the engine relies on the rules
  INTERLACE_ASSIGN(ClusterSpec cluster, LoadCluster(cluster_text, "cluster"));
  ProfileTable table;
  if (!profile_text.empty()) {
    INTERLACE_ASSIGN(table, ParseProfile(profile_text, "profile"));
  }
  INTERLACE_ASSIGN(Simulation simulation, Simulate(program, cluster, profile_text.empty() ? nullptr : &table, options));
  if (output == "json") return SimulationJson(simulation);
  if (output == "summary") return SimulationSummary(simulation);
  if (output == "trace") return SimulationTrace(simulation);
  return SimulationSnapshot(simulation);
}

}  // namespace interlace
