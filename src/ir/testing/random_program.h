// random_program.h — captured training steps that are legal but odd, for testing passes: tied and unused parameters,
// frozen ones, scalars and sizes that divide by nothing, transposed and broadcast gradients, one value that is the
// gradient of two parameters, one that is handed on to the layers before, buffers assigned and mutated in place,
// dropout, constants, dead code. The interpreter runs all of them.
#pragma once

#include <cstdint>

#include "ir/program.h"

namespace interlace::testing {

struct RandomProgramOptions {
  uint64_t seed = 1;
  int layers = 6;          // about 8 ops each, forward and backward together
  int64_t max_width = 13;  // sizes are drawn from 1 to this
  DType dtype = DType::kF32;
  bool random_ops = true;  // dropout
  bool buffers = true;
  int64_t multiple = 1;        // of which sizes are multiples: what ranks are to divide
  bool cross_entropy = false;  // of 12 classes, labels being integers below 8; else the square of a difference
};

// The same program for the same options. It satisfies the verifier.
Program RandomProgram(const RandomProgramOptions& options = {});

}  // namespace interlace::testing
