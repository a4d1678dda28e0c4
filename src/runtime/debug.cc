#include "runtime/debug.h"

#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ir/op_table.h"
#include "ir/residency.h"
#include "ir/text.h"
#include "runtime/view.h"

namespace interlace {

namespace {

bool IsFloatingTensor(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

struct Extent {
  int64_t nans = 0, infinities = 0;
};

Extent Examine(const at::Tensor& tensor) {
  if (!IsFloatingTensor(tensor) || tensor.numel() == 0) return {};
  return {at::isnan(tensor).sum().item<int64_t>(), at::isinf(tensor).sum().item<int64_t>()};
}

// There are no numbers to look at.
bool IsOutOfMemory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 && tensor.storage().nbytes() == 0;
}

bool AsksForInfinity(const Arg& arg) {
  if (arg.kind == Arg::Kind::kFloat && !std::isfinite(arg.real)) return true;
  return std::any_of(arg.list.begin(), arg.list.end(), AsksForInfinity);
}

// Results of these are in flight or not yet written when the op ends.
bool HasResultsLater(const Op& op) {
  return IsStart(op) || op.kind == OpKind::kGradBegin;
}

bool InModule(const Program& program, const Op& op, const std::string& path) {
  const std::string module = ModuleOf(program, op);
  return module == path || (module.size() > path.size() && module.starts_with(path) && module[path.size()] == '.');
}

}  // namespace

std::string ModuleOf(const Program& program, const Op& op) {
  return op.module >= 0 && op.module < static_cast<int32_t>(program.modules.size()) ? program.modules[op.module].path
                                                                                    : std::string();
}

std::string SourceOf(const Program& program, const Op& op) {
  return op.source >= 0 && op.source < static_cast<int32_t>(program.sources.size()) ? program.sources[op.source].place
                                                                                    : std::string();
}

std::optional<ValueReport> ReportOf(ValueId id, const at::Tensor& tensor) {
  if (!IsFloatingTensor(tensor) || IsOutOfMemory(tensor)) return std::nullopt;
  ValueReport report;
  report.value = id;
  report.type = Describe(tensor);
  if (tensor.numel() == 0) return report;
  const at::Tensor numbers = (tensor.is_complex() ? tensor.abs() : tensor).to(c10::kDouble);
  const at::Tensor finite = numbers.isfinite();
  const int64_t count = finite.sum().item<int64_t>();
  report.nonfinite = tensor.numel() - count;
  const double infinity = std::numeric_limits<double>::infinity();
  report.min = at::where(finite, numbers, infinity).min().item<double>();
  report.max = at::where(finite, numbers, -infinity).max().item<double>();
  report.mean = count ? at::where(finite, numbers, 0.0).sum().item<double>() / static_cast<double>(count) : 0.0;
  return report;
}

void DebugObserver::BeginPhase(const Phase& phase, int64_t micro_batch) {
  phase_ = &phase;
  micro_batch_ = micro_batch;
  std::fill(state_.begin(), state_.end(), uint8_t{kUnknown});
  stop_op_ = kNone;
  if (stop_at_.empty()) return;
  for (OpId id : phase.ops) {
    const Op& op = program_.op(id);
    if (op.part == Part::kForward && !IsOwn(op) && InModule(program_, op, stop_at_)) stop_op_ = id;
  }
}

uint8_t DebugObserver::StateOf(ValueId id, const std::vector<at::Tensor>& slots) {
  if (state_[id] != kUnknown) return state_[id];
  if (IsOutOfMemory(slots[id])) return kUnknown;
  const Extent extent = Examine(slots[id]);
  state_[id] = static_cast<uint8_t>(kFinite | (extent.infinities ? kHasInf : 0) | (extent.nans ? kHasNan : 0));
  return state_[id];
}

bool DebugObserver::AfterOp(int32_t index, OpId id, const std::vector<at::Tensor>& slots) {
  const Op& op = program_.op(id);
  if (op.kind == OpKind::kReloadStart && IsFresh(op)) {
    ForEachOperand(op, [&](ValueId operand) { state_[operand] = kUnwritten; });
  }
  if (HasResultsLater(op)) return true;
  if (op.kind == OpKind::kReloadWait) {
    bool unwritten = false;
    ForEachOperand(op, [&](ValueId operand) {
      unwritten = unwritten || state_[operand] == kUnwritten;
      state_[operand] = kUnknown;
    });
    if (unwritten) return true;  // memory alone has come back
  }
  uint8_t before = 0, after = 0;
  bool asked = false;
  if (!IsWait(op)) {
    ForEachOperand(op, [&](ValueId operand) { before |= StateOf(operand, slots); });
  }
  for (const Arg& arg : op.args) asked = asked || AsksForInfinity(arg);
  for (const NamedArg& named : op.named) asked = asked || AsksForInfinity(named.arg);
  std::vector<ValueId> results = op.results;
  if (IsWait(op)) ForEachOperand(op, [&](ValueId operand) { results.push_back(operand); });
  for (ValueId result : results) {
    if (result != kNone) after |= StateOf(result, slots);
  }
  // An operand with any bad element excuses NaNs (inf - inf); an infinity is excused by an infinity or a NaN before it.
  const bool inherited = (before & (kHasNan | kHasInf)) != 0;
  const bool fault = !inherited && (((after & kHasNan) != 0) || ((after & kHasInf) != 0 && !asked));
  const bool nan_from_inf = (after & kHasNan) != 0 && (before & kHasNan) == 0;
  const bool guilty = (fault || nan_from_inf) && !culprit;

  const bool wanted = !stop_at_.empty() && InModule(program_, op, stop_at_) && op.part == Part::kForward;
  if (record_all_ || guilty) {
    DebugRecord record;
    record.index = index;
    record.phase = phase_->name;
    record.micro_batch = micro_batch_ + MicroBatchOf(op);
    record.name = op.name;
    record.text = PrintOp(program_, op);
    record.module = ModuleOf(program_, op);
    record.source = SourceOf(program_, op);
    for (ValueId result : results) {
      if (result == kNone) continue;
      if (auto described = ReportOf(result, slots[result])) record.results.push_back(*described);
    }
    if (guilty) {
      culprit = record;
      report.first_nonfinite = static_cast<int64_t>(report.records.size());
    }
    if (!record.results.empty() || guilty) report.records.push_back(std::move(record));
  }
  if (wanted) {
    for (ValueId result : results) {
      if (result != kNone && slots[result].defined() && !IsOutOfMemory(slots[result]))
        report.values.emplace_back("%" + std::to_string(result), slots[result].clone());
    }
  }
  return id != stop_op_;
}

}  // namespace interlace
