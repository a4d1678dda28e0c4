// Fuzz target: the readers beside the program's own. The first byte says which: a cluster file, a profile, a program to
// simulate, or JSON. What is accepted must print, and read back the same.
//   cmake --preset fuzz && cmake --build --preset fuzz && mkdir -p build/corpus &&
//   build/fuzz/reader_fuzz -max_total_time=60 -rss_limit_mb=1024 build/corpus
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cost/cluster.h"
#include "cost/profile_table.h"
#include "sim/simulate.h"
#include "trace/json.h"

namespace {

void FuzzProfile(std::string_view text) {
  using namespace interlace;
  Result<ProfileTable> table = ParseProfile(text, "fuzz");
  if (!table.ok()) return;
  const std::string printed = PrintProfile(*table);
  Result<ProfileTable> again = ParseProfile(printed, "printed");
  if (!again.ok() || PrintProfile(*again) != printed) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace interlace;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      (void)LoadCluster(text, "fuzz");
      break;
    case 1:
      FuzzProfile(text);
      break;
    case 2:
      (void)SimulateText(text, "local-2", "", "json", {});
      break;
    default:
      (void)ParseJson(text);
  }
  return 0;
}
