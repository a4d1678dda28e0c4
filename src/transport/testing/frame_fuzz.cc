// libFuzzer target: whatever peers send, a rank ends with a result or an error.
#include "base/testing/fuzz_limits.h"
#include "transport/testing/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  interlace::FuzzLimits limits(size);
  interlace::RunWire(data, size);
  return 0;
}
