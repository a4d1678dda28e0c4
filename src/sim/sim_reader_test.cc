// Damaged input: every reader on the way to a prediction answers with a result or an error, whatever the bytes.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <random>

#include "sim/testing/simulate_text.h"
#include "trace/chrome_trace.h"
#include "trace/memory_snapshot.h"
#include "trace/testing/check_trace.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

std::string ReadGolden(const std::string& name) {
  std::ifstream in(std::string(INTERLACE_SOURCE_DIR) + "/tests/golden/sim/" + name, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  EXPECT_FALSE(text.empty()) << name;
  return text;
}

// A few bytes changed, cut out, doubled, or replaced by numbers that break careless readers.
std::string Damaged(std::string text, std::mt19937& random) {
  static const char* kNasty[] = {"-1",
                                 "0",
                                 "9223372036854775807",
                                 "99999999999999999999",
                                 "1e400",
                                 "nan",
                                 "\"",
                                 "[",
                                 "]",
                                 "%4294967295",
                                 "\n",
                                 "\\x",
                                 "%0",
                                 "#"};
  for (int edits = 1 + static_cast<int>(random() % 4); edits > 0 && !text.empty(); --edits) {
    size_t at = random() % text.size();
    switch (random() % 5) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, 1 + random() % 20);
        break;
      case 2:
        text.insert(at, text.substr(random() % text.size(), random() % 60));
        break;
      case 3:
        text.insert(at, kNasty[random() % std::size(kNasty)]);
        break;
      default: {
        size_t digit = text.find_first_of("0123456789", at);
        if (digit != std::string::npos) text.replace(digit, 1, kNasty[random() % std::size(kNasty)]);
      }
    }
  }
  return text;
}

TEST(Readers, DamagedProgramsClustersAndProfiles) {
  std::mt19937 random(11);
  std::string program = ReadGolden("step.il"), profile = ReadGolden("step.profile"),
              cluster = *PresetCluster("local-2");
  int fine = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string p = i % 3 == 0 ? Damaged(program, random) : program;
    std::string c = i % 3 == 1 ? Damaged(cluster, random) : cluster;
    std::string f = i % 3 == 2 ? Damaged(profile, random) : profile;
    static const char* kOutputs[] = {"json", "summary", "trace", "snapshot"};
    Result<std::string> out = SimulateText(p, c, f, kOutputs[i % 4], {});
    fine += out.ok();
    if (!out.ok()) {
      EXPECT_FALSE(out.error().message.empty());
    }
  }
  EXPECT_GT(fine, 150) << "damage that nothing survives tests only the first line";
  EXPECT_LT(fine, 2750);
}

TEST(Readers, DamagedTraces) {
  std::mt19937 random(12);
  std::string program = ReadGolden("step.il");
  std::string trace = *SimulateText(program, "local-2", "", "trace", {}),
              snapshot = *SimulateText(program, "local-2", "", "snapshot", {});
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    refused += !CheckChromeTrace(Damaged(trace, random)).ok();
    refused += !CheckMemorySnapshot(Damaged(snapshot, random)).ok();
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace interlace
