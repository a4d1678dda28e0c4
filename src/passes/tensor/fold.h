// fold.h — a captured program with its repeated blocks folded: of blocks that compute alike four stay, the first, one
// that stands for all between, and the last two. What it says of the middle one counts for each that it stands for.
//
//   embedding, layers.0 ... layers.79, head     →     embedding, layers.0, layers.1 (77 times), layers.78, layers.79, head
//
// Whoever used a value of a block that went uses that of its twin, the same op of a block that ran before: in the
// forward part of layers.1, in the backward part of layers.78. So what the middle one is given is placed as in the
// whole program.
#pragma once

#include <string_view>
#include <vector>

#include "ir/program.h"

namespace interlace::tensor {

struct Folded {
  Program program;
  std::vector<double> times;  // by module: blocks that an op of it stands for
};

// A program with one micro-batch phase.
Folded Fold(const Program& program);

// "model.layers.3" of "model.layers.3.mlp"; empty: in no list.
std::string_view BlockOfPath(std::string_view path);

}  // namespace interlace::tensor
