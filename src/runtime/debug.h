// debug.h — looking at a step op by op: what every floating result holds, and which op first made a value that is not
// finite.
//
// An op is to blame when a result holds a NaN and no operand did, or an infinity and no operand did and it was not
// asked for one (a mask filled with -inf is no fault). Whatever follows inherits, so the first such op is the cause.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "ir/op_table.h"
#include "ir/program.h"
#include "runtime/step_runner.h"
#include "runtime/stream.h"

namespace interlace {

struct ValueReport {
  ValueId value = kNone;
  std::string type;                   // "f32[4,64]"
  double min = 0, max = 0, mean = 0;  // of the finite elements
  int64_t nonfinite = 0;              // elements that are NaN or infinite
};

struct DebugRecord {
  int32_t index = 0;  // of the op in its phase
  std::string phase;
  int64_t micro_batch = 0;
  std::string name, text;      // "aten.mm", and the op's line
  std::string module, source;  // path and "file:line", empty when unknown
  std::vector<ValueReport> results;
};

struct DebugReport {
  std::vector<DebugRecord> records;
  int64_t first_nonfinite = -1;  // index into records
  // Results of the ops of the module that was stopped at: "%12" → tensor, in order.
  std::vector<std::pair<std::string, at::Tensor>> values;
};

class DebugObserver {
 public:
  // `record_all`: keep a record of every op with floating results, not just of the first culprit.
  DebugObserver(const Program& program, bool record_all, std::string stop_at)
      : program_(program), record_all_(record_all), stop_at_(std::move(stop_at)), state_(program.num_values(), 0) {}
  void BeginPhase(const Phase& phase, int64_t micro_batch);
  // After op `index` of the phase ran and before its operands are dropped. Returns false to stop here.
  bool AfterOp(int32_t index, OpId op, const std::vector<at::Tensor>& slots);

  DebugReport report;
  std::optional<DebugRecord> culprit;
  bool stopped = false;  // at the module asked for

 private:
  enum : uint8_t { kUnknown = 0, kFinite = 1, kHasInf = 2, kHasNan = 4, kUnwritten = 8 };
  uint8_t StateOf(ValueId id, const std::vector<at::Tensor>& slots);

  const Program& program_;
  bool record_all_;
  std::string stop_at_;
  std::vector<uint8_t> state_;  // by value id, of the current phase
  const Phase* phase_ = nullptr;
  int64_t micro_batch_ = 0;
  OpId stop_op_ = kNone;
};

// It as the observer of a step (step_runner.h). Without `update`, optimizer steps of units whose gradient is complete
// are left out; what they need of the tier still comes and goes, for later ops need it as well.
class Inspection : public NoObserver {
 public:
  static constexpr bool kServed = false;
  static constexpr bool kOneByOne = true;
  // `lanes`: of a device, whose current stream waits for them before it looks; nullptr on CPUs.
  Inspection(const Program& program, DebugObserver& observer, bool update, LaneStreams* lanes)
      : program_(program), observer_(observer), update_(update), lanes_(lanes) {}
  void BeginPhase(const Plan& plan, const PlanVariant*, size_t micro_batch) {
    observer_.BeginPhase(*plan.phase, static_cast<int64_t>(micro_batch));
  }
  bool Skips(const Instruction& at) const {
    const Op& op = program_.op(at.op);
    return !update_ && op.part == Part::kUpdate && TraitsOf(op).family != OpFamily::kTier;
  }
  bool After(const Plan&, const Instruction& at, const Frame& frame) {
    if (lanes_ != nullptr) lanes_->Join();
    observer_.stopped = !observer_.AfterOp(at.index, at.op, frame.slots);
    return !observer_.stopped;
  }
  bool stopped() const { return observer_.stopped; }

 private:
  const Program& program_;
  DebugObserver& observer_;
  const bool update_;
  LaneStreams* const lanes_;
};

// Statistics of a floating tensor; nullopt for other types and undefined tensors.
std::optional<ValueReport> ReportOf(ValueId id, const at::Tensor& tensor);
// Module path and source line of an op, or empty.
std::string ModuleOf(const Program& program, const Op& op);
std::string SourceOf(const Program& program, const Op& op);

}  // namespace interlace
