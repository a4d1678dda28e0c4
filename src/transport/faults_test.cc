// Everything that can go wrong between ranks, by seed (testing/faults.h). INTERLACE_FAULT_SEED=n runs one seed and prints
// what happened; INTERLACE_SOAK=1 runs forty times as many.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "base/rounds.h"
#include "transport/testing/faults.h"

namespace interlace {
namespace {

std::string Problems(const FaultCase& one, const FaultRun& run) {
  std::string text;
  for (const std::string& problem : run.problems) text += "  " + problem + "\n";
  if (text.empty()) return "";
  return one.Text() + "\n" + text + "alone: INTERLACE_FAULT_SEED=" + std::to_string(one.seed) +
         " transport_test --gtest_filter=Faults.RanksEndWell\n";
}

TEST(Faults, RanksEndWell) {
  const char* given = std::getenv("INTERLACE_FAULT_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  const uint64_t count = given != nullptr ? 1 : static_cast<uint64_t>(Rounds(250));
  std::map<int, std::pair<int, int>> seen;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const FaultCase one = DrawCase(seed);
    const FaultRun run = RunCase(one, {.keep_trace = given != nullptr});
    if (given != nullptr) std::printf("%s\n%s", one.Text().c_str(), run.trace.c_str());
    EXPECT_TRUE(run.problems.empty()) << Problems(one, run);
  }
}

}  // namespace
}  // namespace interlace
