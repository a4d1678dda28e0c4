#include "ir/liveness.h"

#include <algorithm>

#include "ir/residency.h"
#include "ir/text.h"
#include "ir/touches.h"

namespace interlace {
namespace {

// Storage of phase-local roots; persistent ones (parameters, buffers, states, constants) and inputs are not counted per
// op.
bool IsLocal(const Value& root) {
  return root.kind == ValueKind::kResult || root.kind == ValueKind::kTake;
}

class Analysis {
 public:
  Analysis(const Program& program, const Phase& phase)
      : program_(program), phase_(phase), end_(static_cast<int32_t>(phase.ops.size())) {}

  Result<PhaseLiveness> Run(const Residency& residency, bool with_deaths) {
    INTERLACE_TRY(Persistent(residency));
    storage_of_.assign(program_.num_values(), -1);
    if (auto places = residency.at_begin.find(&phase_); places != residency.at_begin.end()) {
      for (size_t i = 0; i < residency.states.size(); ++i) {
        if (places->second[i] != Place::kOut) INTERLACE_TRY(Take(residency.states[i], -1));
      }
    }
    for (ValueId id : phase_.Incoming()) INTERLACE_TRY(Begin(program_.RootOf(id), -1));
    Status status = Ok{};
    ForEachTouch(program_, phase_, [&](const Touch& touch) {
      if (status.ok()) status = Visit(touch);
    });
    INTERLACE_TRY(status);
    LoadedMessages();
    for (ValueId id : phase_.Outgoing()) Touched(program_.RootOf(id), end_);
    for (ValueId id : residency.states) Touched(id, end_);  // what is in memory at the end stays there
    Summarize(with_deaths);
    return std::move(out_);
  }

 private:
  Status Persistent(const Residency& residency) {
    Status status = Ok{};
    ForEachPersistent(program_, residency, [&](const auto& entry) {
      const Result<int64_t> bytes = program_.StorageBytes(program_.value(entry.value).type);
      if (status.ok() && !bytes.ok()) status = bytes.error();
      if (bytes.ok()) out_.persistent_bytes += *bytes;
    });
    return status;
  }

  Status Begin(ValueId root, int32_t index) {
    if (!IsLocal(program_.value(root)) || storage_of_[root] >= 0) return Ok{};
    return Take(root, index);
  }

  // A stretch of life begins.
  Status Take(ValueId root, int32_t index) {
    Result<int64_t> bytes = program_.StorageBytes(program_.value(root).type);
    if (!bytes.ok()) {
      Error error = bytes.error();
      if (index >= 0) error.where = PrintOp(program_, program_.op(phase_.ops[index]));
      return error;
    }
    storage_of_[root] = static_cast<int32_t>(out_.storages.size());
    out_.storages.push_back({root, *bytes, index, std::max(index, 0)});
    released_.push_back(false);
    return Ok{};
  }

  void Touched(ValueId root, int32_t index) {
    const int32_t storage = storage_of_[root];
    if (storage >= 0 && !released_[storage]) out_.storages[storage].last = std::max(out_.storages[storage].last, index);
  }

  // A message that was loaded on its way out reads what was loaded with it until it is waited for.
  void LoadedMessages() {
    const auto loaded = [&](ValueId id) {
      return std::any_of(phase_.loads.begin(), phase_.loads.end(),
                         [&](const Carried& load) { return load.value == id; });
    };
    for (int32_t i = 0; i < end_ && !phase_.loads.empty(); ++i) {
      const Op& op = program_.op(phase_.ops[i]);
      if (op.kind != OpKind::kSendWait) continue;
      if (!AnyOperand(op, loaded)) continue;
      for (const Carried& load : phase_.loads) Touched(load.value, i);
    }
  }

  Status Visit(const Touch& touch) {
    const ValueId root = touch.root;
    if (touch.how == Touch::How::kMakes && touch.value == root) INTERLACE_TRY(Begin(root, touch.at));
    if (touch.how != Touch::How::kReads) return Touched(root, touch.at), Ok{};
    const Op& op = program_.op(phase_.ops[touch.at]);
    const Move* move = MoveOf(op);
    if (move != nullptr && move->to == Place::kComing) INTERLACE_TRY(Take(root, touch.at));
    Touched(root, touch.at);
    if (move != nullptr && move->to == Place::kOut) storage_of_[root] = -1;
    if (op.kind == OpKind::kRelease && storage_of_[root] >= 0) released_[storage_of_[root]] = true;
    return Ok{};
  }

  void Summarize(bool with_deaths) {
    std::vector<int64_t> change(end_ + 2, 0), results(end_ + 1, 0);
    if (with_deaths) out_.dies_after.assign(end_, {});
    for (const StorageLife& life : out_.storages) {
      // Alive before op i for first < i <= last.
      change[life.first + 1] += life.bytes;
      change[std::min(life.last, end_) + 1] -= life.bytes;
      if (life.first >= 0) results[life.first] += life.bytes;
      if (with_deaths && life.last < end_) out_.dies_after[life.last].push_back(life.root);
    }
    out_.live_before.assign(end_ + 1, 0);
    int64_t live = 0;
    for (int32_t i = 0; i <= end_; ++i) {
      live += change[i];
      out_.live_before[i] = live;
      out_.peak_bytes = std::max(out_.peak_bytes, live + results[i]);
    }
  }

  const Program& program_;
  const Phase& phase_;
  const int32_t end_;
  PhaseLiveness out_;
  std::vector<int32_t> storage_of_;  // by value id (roots): index in storages, or -1
  std::vector<bool> released_;
};

}  // namespace

Result<PhaseLiveness> ComputeLiveness(const Program& program, const Phase& phase) {
  return Analysis(program, phase).Run(ComputeResidency(program), true);
}

Result<PhaseLiveness> ComputeLiveness(const Program& program, const Phase& phase, const Residency& residency,
                                      bool with_deaths) {
  return Analysis(program, phase).Run(residency, with_deaths);
}

}  // namespace interlace
