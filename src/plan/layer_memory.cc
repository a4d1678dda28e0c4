#include "plan/layer_memory.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "ir/memory_plan.h"
#include "ir/touches.h"

namespace interlace::plan {
namespace {

constexpr int64_t kTooLarge = std::numeric_limits<int64_t>::max();

// 1 + sum of (size - 1) * stride elements: from the first to the last reachable one (Program::StorageBytes, with
// symbols).
Dim Bytes(Program& program, const Type& type) {
  DimTable& dims = program.dims;
  Dim last = 0;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (type.sizes[i] == Dim(0)) return 0;
    last = dims.Add(last, dims.Mul(dims.Sub(type.sizes[i], 1), type.strides[i]));
  }
  return dims.Mul(dims.Add(last, 1), DTypeBytes(type.dtype));
}

struct Life {
  Dim bytes;
  int32_t first = -1, last = -1;  // ops; first -1: alive when the part it enters begins
  bool counted = false;
};

class Counting {
 public:
  Counting(Program& program, const Phase& phase, bool receives)
      : program_(program), phase_(phase), receives_(receives), lives_(program.num_values()) {}

  Result<LiveBytes> Run() {
    const auto end = static_cast<int32_t>(phase_.ops.size());
    LiveBytes out;
    out.middle = FirstBackward(program_, phase_);
    if (out.middle == 0 || out.middle == end) return MakeError("a layer's program needs a forward and a backward part");
    Find(out.middle);
    std::vector<std::vector<Dim>> begins(end + 1), ends(end + 1);
    for (const Life& life : lives_) {
      if (!life.counted) continue;
      begins[std::max(life.first, 0)].push_back(life.bytes);
      ends[std::max(life.last, 0)].push_back(life.bytes);
      if (life.first < out.middle && life.last >= out.middle) out.saved = program_.dims.Add(out.saved, life.bytes);
    }
    Dim live = 0;
    for (int32_t i = 0; i < end; ++i) {
      for (Dim bytes : begins[i]) live = program_.dims.Add(live, bytes);
      if (live == Dim(kTooLarge)) return MakeError("the layer's memory overflows 64 bits or is too long an expression");
      out.at.push_back(live);
      for (Dim bytes : ends[i]) live = program_.dims.Sub(live, bytes);
    }
    out.shared = shared_;
    out.boundary = boundary_;
    return out;
  }

 private:
  void Find(int32_t middle) {
    for (const Input& input : program_.inputs) {
      Life& life = lives_[input.value];
      if (input.name == "hidden" || input.name.ends_with(".grad")) {
        life = {Bytes(program_, program_.value(input.value).type), input.name == "hidden" ? -1 : middle, -1, true};
        if (input.name == "hidden") boundary_ = life.bytes;
        life.last = std::max(life.first, 0);
      }
    }
    std::unordered_map<int32_t, size_t> received;  // by index of a start: the memory that it receives into
    for (size_t i = 0; i < phase_.ops.size() && receives_; ++i) {
      const int64_t bytes = ReceiveBytes(program_, program_.op(phase_.ops[i]));
      if (bytes == 0) continue;
      received[static_cast<int32_t>(i)] = lives_.size();
      lives_.push_back({Dim(bytes), static_cast<int32_t>(i), static_cast<int32_t>(i), true});
    }
    ForEachTouch(program_, phase_, [&](const Touch& touch) {
      if (touch.how == Touch::How::kLeaves) return;
      Life& life = lives_[touch.root];
      if (touch.how == Touch::How::kMakes && touch.root == touch.value)
        life = {Bytes(program_, program_.value(touch.root).type), touch.at, touch.at, true};
      life.last = std::max(life.last, touch.at);
      const auto found = touch.how == Touch::How::kWaits ? received.find(touch.since) : received.end();
      if (found != received.end()) lives_[found->second].last = touch.at;
    });
    for (size_t i = 0; i < phase_.ops.size(); ++i) HandOn(program_.op(phase_.ops[i]), static_cast<int32_t>(i), middle);
    for (const Input& input : program_.inputs) {
      const Life& life = lives_[input.value];
      bool batch = input.name == "input_ids" || input.name == "labels";
      if (!life.counted && !batch && life.last >= middle) {
        shared_ = program_.dims.Add(shared_, Bytes(program_, program_.value(input.value).type));
      }
    }
  }

  // What an output hands on lives to the end of its part, and no longer: the next layer counts the activation, the one
  // before it the gradient.
  void HandOn(const Op& op, int32_t index, int32_t middle) {
    if (op.kind == OpKind::kGrad && op.args.size() == 2 && op.args[1].kind == Arg::Kind::kValue) {
      lives_[program_.RootOf(op.args[1].value)].counted = false;  // written into the stage's gradients
    }
    if (op.kind == OpKind::kOutput && !op.args.empty() && op.args[0].kind == Arg::Kind::kValue) {
      Life& life = lives_[program_.RootOf(op.args[0].value)];
      if (index < middle) {
        life.last = std::max(life.last, middle - 1);  // handed on when the forward part ends
        if (boundary_ == Dim(0)) boundary_ = life.bytes;
      } else {
        life.last = static_cast<int32_t>(phase_.ops.size()) - 1;
      }
    }
  }

  Program& program_;
  const Phase& phase_;
  const bool receives_;
  std::vector<Life> lives_;  // by root, then what is received into
  Dim shared_, boundary_;
};

}  // namespace

int32_t FirstBackward(const Program& program, const Phase& phase) {
  auto is_backward = [&](OpId id) { return program.op(id).part == Part::kBackward; };
  return static_cast<int32_t>(std::find_if(phase.ops.begin(), phase.ops.end(), is_backward) - phase.ops.begin());
}

Result<LiveBytes> CountLive(Program& program, const Phase& phase, bool receives) {
  return Counting(program, phase, receives).Run();
}

Result<LayerMemory> MemoryOfLayer(Program& program) {
  const Phase* phase = program.MicroBatchPhase();
  if (phase == nullptr) return MakeError("the layer's program has no phase micro_batch");
  INTERLACE_ASSIGN(LiveBytes live, CountLive(program, *phase, false));
  LayerMemory out{live.saved, live.shared, live.boundary, {}, {}};
  std::unordered_set<int64_t> seen;
  for (size_t i = 0; i < live.at.size(); ++i) {
    // The activation that leaves has become the next layer's; what follows counts it only if this layer reads it again.
    if (i == static_cast<size_t>(live.middle)) seen.clear();
    const Dim at = live.at[i];
    if (!seen.insert(at.is_const() ? at.value : -1 - int64_t{at.expr}).second) continue;
    (i < static_cast<size_t>(live.middle) ? out.forward : out.backward).push_back(at);
  }
  return out;
}

Result<int64_t> Largest(const DimTable& dims, const Candidates& candidates, const Binding& binding) {
  int64_t largest = 0;
  for (Dim candidate : candidates) {
    INTERLACE_ASSIGN(int64_t bytes, dims.Evaluate(candidate, binding));
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace interlace::plan
