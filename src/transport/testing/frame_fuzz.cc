// libFuzzer target: whatever peers send, a rank ends with a result or an error.
#include "transport/testing/wire.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  interlace::RunWire(data, size);
  return 0;
}
