// fault_ops.h — the operations of a run (faults.h) on one rank's memory, and what a plain loop says they give.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/collectives.h"
#include "transport/testing/faults.h"

namespace interlace {

class FaultOp {
 public:
  // As operation `number` on `rank`.
  FaultOp(const FaultCase& one, size_t number, int rank);
  // 0 where this rank has no part in it.
  Result<Ticket> Start(Collectives& group);
  // After it was waited for: what is wrong, or nothing.
  std::string Check() const;

 private:
  int64_t bytes(int64_t elements) const { return elements * DTypeBytes(op_.dtype); }
  TypedSpan Span(std::vector<char>& memory, int64_t begin, int64_t elements) {
    return {memory.data() + bytes(begin), elements, op_.dtype};
  }
  std::vector<char> Given(int rank, int64_t elements) const;  // what that rank begins with
  std::vector<char> Sum(const std::vector<int>& ranks, int64_t all, int64_t begin, int64_t elements) const;

  const FaultCase& case_;
  const FaultCase::Op& op_;
  const size_t number_;
  const int rank_;
  std::vector<char> own_, out_, receive_;
};

}  // namespace interlace
