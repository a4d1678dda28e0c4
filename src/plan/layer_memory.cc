#include "plan/layer_memory.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>

namespace interlace::plan {
namespace {

constexpr int64_t kTooLarge = std::numeric_limits<int64_t>::max();

// 1 + sum of (size - 1) * stride elements: from the first to the last reachable one (Program::StorageBytes, with symbols).
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
  explicit Counting(Program& program)
      : program_(program), phase_(*program.FindPhase("micro_batch")), lives_(program.num_values()) {}

  Result<LayerMemory> Run() {
    const auto end = static_cast<int32_t>(phase_.ops.size());
    const int32_t middle = FirstBackward(program_, phase_);
    if (middle == 0 || middle == end) return MakeError("a layer's program needs a forward and a backward part");
    Find(middle);
    Dim live = 0;
    std::vector<std::vector<ValueId>> begins(end + 1), ends(end + 1);
    LayerMemory out;
    for (ValueId id = 0; id < program_.num_values(); ++id) {
      const Life& life = lives_[id];
      if (!life.counted) continue;
      (life.first < 0 ? begins[0] : begins[life.first]).push_back(id);
      ends[std::max(life.last, 0)].push_back(id);
      if (life.first < middle && life.last >= middle) out.saved = program_.dims.Add(out.saved, life.bytes);
    }
    std::unordered_set<int64_t> seen;
    for (int32_t i = 0; i < end; ++i) {
      if (i == middle) {
        // The activation that leaves has become the next layer's; what follows counts it only if this layer reads it again.
        seen.clear();
      }
      for (ValueId id : begins[i]) live = program_.dims.Add(live, lives_[id].bytes);
      Candidates& part = i < middle ? out.forward : out.backward;
      if (live == Dim(kTooLarge)) return MakeError("the layer's memory overflows 64 bits or is too long an expression");
      if (seen.insert(live.is_const() ? live.value : -1 - int64_t{live.expr}).second) part.push_back(live);
      for (ValueId id : ends[i]) live = program_.dims.Sub(live, lives_[id].bytes);
    }
    out.shared = shared_;
    out.boundary = boundary_;
    return out;
  }

 private:
  void Find(int32_t middle) {
    for (const Input& input : program_.inputs) {
      Life& life = lives_[input.value];
      if (input.name == "hidden" || input.name == "hidden.grad") {
        life = {Bytes(program_, program_.value(input.value).type), input.name == "hidden" ? -1 : middle, -1, true};
        if (input.name == "hidden") boundary_ = life.bytes;
        life.last = std::max(life.first, 0);
      }
    }
    for (size_t i = 0; i < phase_.ops.size(); ++i) Visit(program_.op(phase_.ops[i]), static_cast<int32_t>(i), middle);
    for (const Input& input : program_.inputs) {
      const Life& life = lives_[input.value];
      bool batch = input.name == "input_ids" || input.name == "labels";
      if (!life.counted && !batch && life.last >= middle) {
        shared_ = program_.dims.Add(shared_, Bytes(program_, program_.value(input.value).type));
      }
    }
  }

  void Visit(const Op& op, int32_t index, int32_t middle) {
    for (ValueId id : op.results) {
      if (id != kNone && program_.RootOf(id) == id) {
        lives_[id] = {Bytes(program_, program_.value(id).type), index, index, true};
      }
    }
    ForEachOperand(op, [&](ValueId id) {
      Life& life = lives_[program_.RootOf(id)];
      // Being handed on is no use: the next layer counts the activation, the one before it the gradient.
      life.last = std::max(life.last, index);
    });
    for (ValueId id : op.writes) lives_[program_.RootOf(id)].last = std::max(lives_[program_.RootOf(id)].last, index);
    if (op.name == "grad" && op.args.size() == 2 && op.args[1].kind == Arg::Kind::kValue) {
      lives_[program_.RootOf(op.args[1].value)].counted = false;  // written into the stage's gradients
    }
    if (op.name == "output" && !op.args.empty() && op.args[0].kind == Arg::Kind::kValue) {
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
  std::vector<Life> lives_;  // by root
  Dim shared_, boundary_;
};

}  // namespace

int32_t FirstBackward(const Program& program, const Phase& phase) {
  auto is_backward = [&](OpId id) { return program.op(id).part == Part::kBackward; };
  return static_cast<int32_t>(std::find_if(phase.ops.begin(), phase.ops.end(), is_backward) - phase.ops.begin());
}

Result<LayerMemory> MemoryOfLayer(Program& program) {
  if (program.FindPhase("micro_batch") == nullptr) return MakeError("the layer's program has no phase micro_batch");
  return Counting(program).Run();
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
