// two_stages.h — a network of two layers, x -> h = tanh(x w) -> y = tanh(h v) -> loss, in one program and in two
// stages. Four micro-batches, two ranks with data of their own beside each other in each stage.
#pragma once

#include <string>

namespace interlace::testing {

// "f0 f1 b0": runs of the first stage's phases.
inline const std::string k1F1BOfTwo = "f0 f1 b0 f2 b1 f3 b2 b3 ";

std::string WholeNetwork();
std::string FirstStage(const std::string& order);
// Begins to receive a micro-batch while it works on the one before.
std::string SecondStage();
// Does not, so that the first stage must not run ahead of it.
std::string SecondStageOneByOne(int micro_batches = 4);

}  // namespace interlace::testing
