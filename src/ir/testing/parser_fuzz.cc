// Fuzz target: any bytes may come; what is accepted must print, read back, verify, bind, compact.
//   make fuzz, or build/asan/parser_fuzz FILE
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "base/testing/fuzz_limits.h"
#include "ir/liveness.h"
#include "ir/text.h"
#include "ir/verifier.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace interlace;
  FuzzLimits limits(size);
  Result<Program> program = Parse({reinterpret_cast<const char*>(data), size});
  if (!program.ok()) return 0;
  std::string text = Print(*program);
  Result<Program> again = Parse(text);
  if (!again.ok() || Print(*again) != text) std::abort();
  bool valid = VerifyAll(*program).empty();
  Binding binding;
  for (const Symbol& symbol : program->symbols) binding[symbol.name] = symbol.min;
  (void)Bind(*program, binding);
  if (valid) {
    for (const Phase& phase : program->phases) (void)ComputeLiveness(*program, phase);
  }
  program->Compact();
  if (!Parse(Print(*program)).ok()) std::abort();
  return 0;
}
