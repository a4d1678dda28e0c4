// Fuzz target: the readers beside the program's own. The first word says which, as in the files: a profile, a plan, the
// text of a model, a program to simulate and to explain, JSON; anything else is a cluster file and a pipeline of
// passes. What is accepted must print, and read back the same.
//   make fuzz, or build/asan/reader_fuzz FILE
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/testing/fuzz_limits.h"
#include "cost/cluster.h"
#include "cost/profile_table.h"
#include "cost/testing/print_profile.h"
#include "ir/text.h"
#include "passes/explain.h"
#include "passes/pipeline.h"
#include "plan/model_text.h"
#include "plan/plan_text.h"
#include "plan/testing/write_model.h"
#include "sim/testing/simulate_text.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

// `print` of what `read` accepts is read again, and printed the same.
template <typename Read, typename Write>
void RoundTrip(std::string_view text, Read read, Write print) {
  auto found = read(text);
  if (!found.ok()) return;
  const std::string printed = print(*found);
  auto again = read(printed);
  if (!again.ok() || print(*again) != printed) std::abort();
}

void Try(std::string_view text) {
  if (text.starts_with("interlace-profile")) {
    RoundTrip(
        text, [](std::string_view t) { return ParseProfile(t, "fuzz"); }, PrintProfile);
  } else if (text.starts_with("interlace-plan")) {
    RoundTrip(
        text, [](std::string_view t) { return plan::ParsePlan(t, "fuzz"); }, plan::PrintPlan);
  } else if (text.starts_with("interlace-model")) {
    RoundTrip(
        text, [](std::string_view t) { return plan::ReadModelText(t, "fuzz"); }, plan::WriteModelText);
  } else if (text.starts_with("interlace ")) {
    (void)SimulateText(text, "local-2", "", "json", {});
    Result<Program> program = Parse(text);
    if (program.ok()) (void)Explain(*program);
  } else if (text.starts_with('{') || text.starts_with('[')) {
    (void)ParseJson(text);
  } else {
    (void)LoadCluster(text, "fuzz");
    RoundTrip(text, ParsePipeline, [](const std::vector<PassCall>& calls) { return PrintPipeline(calls); });
  }
}

}  // namespace
}  // namespace interlace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  interlace::FuzzLimits limits(size);
  interlace::Try({reinterpret_cast<const char*>(data), size});
  return 0;
}
