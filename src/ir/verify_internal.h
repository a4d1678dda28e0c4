// verify_internal.h — what the parts of the verifier share; included by verifier.cc and verify_*.cc only.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/scan.h"
#include "ir/program.h"
#include "ir/text.h"

namespace interlace {

// Collects violations with the line they stand on; the program is printed only when there is one.
class VerifyReport {
 public:
  explicit VerifyReport(const Program& program) : program_(program) {}

  // The caret points at operand or result `at`, or at the op's name.
  void AtOp(const Op& op, std::string what, ValueId at = kNone);
  void AtValue(ValueId value, std::string what);  // its declaration
  void AtUnit(UnitId unit, std::string what);
  void AtPhase(const Phase& phase, std::string what);
  void AtRun(size_t index, std::string what);  // of Program::order
  void AtProgram(std::string what);            // the first line
  bool empty() const { return found_.empty(); }
  // In line order.
  std::vector<Error> Take();

 private:
  struct Found {
    int32_t line;
    Error error;
  };
  void Add(int32_t line, std::string what, std::string_view needle, bool after_paren);
  std::string_view LineText(int32_t line);
  void Print();

  const Program& program_;
  std::optional<PrintedProgram> printed_;
  std::vector<size_t> line_begin_;
  std::vector<Found> found_;
};

// A half-open range of bytes within a root; `known` is false when it is symbolic.
struct ByteRange {
  ValueId root = kNone;
  int64_t begin = 0, end = 0;
  bool known = false;
  bool Overlaps(const ByteRange& other) const {
    return root == other.root && (!known || !other.known || (begin < other.end && other.begin < end));
  }
};
ByteRange RangeOf(const Program& program, ValueId id);

// Elements of a value, when they are a number.
std::optional<int64_t> NumericElements(const Type& type);

// Checks that ops of many kinds ask for. Each reports what it finds, and says whether to go on.
class OpChecks {
 protected:
  OpChecks(const Program& program, VerifyReport& report) : program_(program), report_(report) {}

  const Type& TypeOf(ValueId id) const { return program_.value(id).type; }
  // Every positional argument must be a value, and nothing is passed by name.
  bool ValueOperands(const Op& op);
  bool Shape(const Op& op, size_t min_args, size_t max_args, size_t results);
  void Elements(const Op& op, ValueId id, int64_t wanted, const std::string& meaning);

  const Program& program_;
  VerifyReport& report_;
};

// Phases, names, symbols, units, constants. False: the run order does not hold.
bool VerifyLayout(const Program& program, VerifyReport& report);
void VerifyOps(const Program& program, VerifyReport& report);  // each op by itself
// A start by itself. `dims`: a copy of the program's, in which sizes that follow are made.
void VerifyTransfer(const Program& program, const Op& op, DimTable& dims, VerifyReport& report);
// What is wrong with the structure of a region's body, the first of it; "" when nothing is.
std::string VerifyStructure(const Program& body, VerifyReport& report);
// Of a region: what its body has is checked once for each func, a call against it.
void VerifyFuncs(const Program& program, VerifyReport& report);
void VerifyCall(const Program& program, const Op& op, VerifyReport& report);
void VerifyFlow(const Program& program,
                VerifyReport& report);  // transfers in flight, takes and gives over the run order
void VerifyCarried(const Program& program, VerifyReport& report);    // what runs save and load, along the run order
void VerifyResidency(const Program& program, VerifyReport& report);  // what is out is not used, and comes back
void VerifyPending(const Program& program, VerifyReport& report);    // ops of the step before, and what they touch

}  // namespace interlace
