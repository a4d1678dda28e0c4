// sizes.h — a program's sizes as numbers to decide by, and back as they are written.
//
// What fits where is decided on numbers (placement.h). Sizes and ranks that are symbols stand for the numbers of a
// sample, whose symbols are primes (times the ranks, where the ranks divide them) that no constant size has, so that a
// number says which expression it is:
//
//   tp = 2, b = 101, s = 2 * 103     f32[b,s,4096]: 101, 206, 4096
//                                    206 * 4096 elements, and a rank's part of them: 4096*s, 4096*(s//tp)
//
// Without symbols a number is written as it is.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "ir/program.h"
#include "passes/tensor/placement.h"

namespace interlace::tensor {

class Sizes {
 public:
  // `sample`: numbers for the symbols of the program, the axis among them when its size is one; empty: there are none.
  Sizes(Program& program, std::string axis, const Binding& sample);

  int64_t ranks() const { return ranks_; }
  Dim written_ranks() const { return written_ranks_; }
  // A size as a number; below 0: it is none, even so.
  int64_t Number(Dim dim);

  Dim Written(int64_t number);
  Dim Part(int64_t number);  // a rank's part of what the ranks divide
  // Where this rank's part of so many elements begins.
  Dim RankTimesPart(int64_t whole);
  Type TypeOf(const Geometry& geometry);
  // The type and offset that a view of a storage has in the packed part of it.
  void WritePart(const Geometry& geometry, DimCut cut, int64_t period, Value& value);

 private:
  struct Factor {
    int64_t number = 1;
    Dim dim;
  };
  // `number` as a product of symbols and a constant; with `part`, of the first factor that ranks divide only a part.
  Dim Product(int64_t number, bool part);

  Program& program_;
  const std::string axis_;
  Binding sample_;
  int64_t ranks_ = 1;
  Dim written_ranks_;
  std::vector<Factor> factors_;
  std::unordered_map<int64_t, Dim> known_;  // symbolic sizes of the program
};

}  // namespace interlace::tensor
