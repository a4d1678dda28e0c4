#include "ir/program.h"

#include <algorithm>

#include "base/check.h"

template class std::vector<interlace::Arg>;
template class std::vector<interlace::NamedArg>;

namespace interlace {

namespace {

template <typename T>
Arg With(Arg::Kind kind, T Arg::*member, T value) {
  Arg out;
  out.kind = kind;
  out.*member = std::move(value);
  return out;
}

}  // namespace

Arg::Arg() = default;
Arg::Arg(const Arg&) = default;
Arg::Arg(Arg&&) noexcept = default;
Arg& Arg::operator=(const Arg&) = default;
Arg& Arg::operator=(Arg&&) noexcept = default;
Arg::~Arg() = default;
Arg Arg::None() {
  return {};
}
Arg Arg::Of(ValueId v) {
  return With(Kind::kValue, &Arg::value, v);
}
Arg Arg::Int(Dim d) {
  return With(Kind::kInt, &Arg::integer, d);
}
Arg Arg::Float(double d) {
  return With(Kind::kFloat, &Arg::real, d);
}
Arg Arg::Bool(bool b) {
  return With(Kind::kBool, &Arg::boolean, b);
}
Arg Arg::String(std::string s) {
  return With(Kind::kString, &Arg::text, std::move(s));
}
Arg Arg::Word(std::string s) {
  return With(Kind::kWord, &Arg::text, std::move(s));
}
Arg Arg::List(std::vector<Arg> l) {
  return With(Kind::kList, &Arg::list, std::move(l));
}

Op::Op() = default;
Op::Op(const Op&) = default;
Op::Op(Op&&) noexcept = default;
Op& Op::operator=(const Op&) = default;
Op& Op::operator=(Op&&) noexcept = default;
Op::~Op() = default;

Program::Program() = default;
Program::Program(const Program&) = default;
Program::Program(Program&&) = default;
Program& Program::operator=(Program&&) = default;
Program::~Program() = default;

void Op::SetName(std::string new_name) {
  name = std::move(new_name);
  kind = KindOf(name);
}

const Arg* Op::Attr(std::string_view attr_name) const {
  for (const NamedArg& attr : attrs) {
    if (attr.name == attr_name) return &attr.arg;
  }
  return nullptr;
}

void Op::SetAttr(std::string_view attr_name, Arg arg) {
  for (NamedArg& attr : attrs) {
    if (attr.name == attr_name) {
      attr.arg = std::move(arg);
      return;
    }
  }
  attrs.push_back({std::string(attr_name), std::move(arg)});
}

Program Program::Clone() const {
  Program out = *this;
  out.tracks_ = false;
  out.changed_values_.clear(), out.changed_ops_.clear();
  out.value_noted_.clear(), out.op_noted_.clear();
  return out;
}

Value& Program::AddValue(ValueKind kind, Type type) {
  CHECK(num_values() < kMaxValues) << "too many values";
  if (type.strides.empty()) type.strides = ContiguousStrides(type.sizes);
  ValueId id = num_values();
  Value& value = values_.emplace_back();
  value.id = value.root = id;
  value.kind = kind;
  value.type = std::move(type);
  return value;
}

Result<ValueId> Program::AddValueWithId(ValueId id, ValueKind kind, Type type) {
  if (id < 0 || id >= kMaxValues) return MakeError("value id ", id, " is out of range");
  if (HasValue(id)) return MakeError("%", id, " is defined twice");
  if (type.strides.empty()) type.strides = ContiguousStrides(type.sizes);
  while (num_values() <= id) values_.emplace_back();  // gaps keep id kNone
  Value& value = values_[id];
  value.id = value.root = id;
  value.kind = kind;
  value.type = std::move(type);
  return id;
}

Op& Program::AddOp(std::string name) {
  OpId id = num_ops();
  Op& op = ops_.emplace_back();
  op.id = id;
  op.SetName(std::move(name));
  return op;
}

Op& Program::AddOp(OpKind kind) {
  OpId id = num_ops();
  Op& op = ops_.emplace_back();
  op.id = id;
  op.kind = kind;
  op.name = TraitsOf(kind).name;
  return op;
}

ValueId Program::AddResult(Op& op, Type type) {
  Value& value = AddValue(ValueKind::kResult, std::move(type));
  value.def = op.id;
  value.result_index = static_cast<int32_t>(op.results.size());
  op.results.push_back(value.id);
  return value.id;
}

ValueId Program::AddView(Op& op, Type type, ValueId root, Dim offset) {
  ValueId id = AddResult(op, std::move(type));
  values_[id].root = root;
  values_[id].offset = offset;
  return id;
}

ValueId Program::AddPlaced(Op& op, Type type, ValueId root, Dim offset) {
  ValueId id = AddView(op, std::move(type), root, offset);
  values_[id].placed = true;
  return id;
}

const std::string* Program::Meta(std::string_view key) const {
  for (const auto& [name, text] : meta) {
    if (name == key) return &text;
  }
  return nullptr;
}

void Program::SetMeta(std::string_view key, std::string text) {
  for (auto& [name, old] : meta) {
    if (name == key) {
      old = std::move(text);
      return;
    }
  }
  meta.emplace_back(std::string(key), std::move(text));
}

const Phase* Program::FindPhase(std::string_view name) const {
  for (const Phase& phase : phases) {
    if (phase.name == name) return &phase;
  }
  return nullptr;
}

Phase* Program::FindPhase(std::string_view name) {
  return const_cast<Phase*>(static_cast<const Program*>(this)->FindPhase(name));
}

const Param* Program::ParamOf(ValueId id) const {
  for (const Param& param : params) {
    if (param.value == id) return &param;
  }
  return nullptr;
}

ValueId Program::FindState(UnitId unit, std::string_view role) const {
  for (const State& state : states) {
    if (state.unit == unit && state.role == role) return state.value;
  }
  return kNone;
}

ValueId Program::AddState(UnitId unit, std::string role, Type type, bool persistent) {
  ValueId id = AddValue(ValueKind::kState, std::move(type)).id;
  states.push_back({id, std::move(role), unit, persistent});
  return id;
}

std::vector<Dim> Program::ContiguousStrides(const std::vector<Dim>& sizes) {
  std::vector<Dim> strides(sizes.size());
  Dim next = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = next;
    // As in PyTorch, a dimension of size 0 counts as 1; symbols stand for at least 1.
    if (!sizes[i].is_const() || sizes[i].value > 1) next = dims.Mul(next, sizes[i]);
  }
  return strides;
}

bool Program::IsContiguous(const Type& type) {
  Dim next = 1;
  for (const Dim& size : type.sizes) {
    if (size == Dim(0)) return true;
  }
  for (size_t i = type.sizes.size(); i-- > 0;) {
    if (type.sizes[i] == Dim(1)) continue;  // its stride is never used
    if (!(type.strides[i] == next)) return false;
    next = dims.Mul(next, type.sizes[i]);
  }
  return true;
}

Dim Program::NumElements(const Type& type) {
  Dim out = 1;
  for (const Dim& size : type.sizes) out = dims.Mul(out, size);
  return out;
}

Result<int64_t> Program::StorageBytes(const Type& type) const {
  int64_t last = 0;  // index of the last reachable element
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    const Dim& size = type.sizes[i];
    const Dim& stride = type.strides[i];
    for (const Dim& dim : {size, stride}) {
      if (!dim.is_const())
        return MakeError("the size ", dims.ToString(dim), " is not a number yet; bind its symbols first");
      if (dim.value < 0) return MakeError("the size or stride ", dim.value, " is negative");
    }
    if (size.value == 0) return int64_t{0};
    int64_t step;
    if (__builtin_mul_overflow(size.value - 1, stride.value, &step) || __builtin_add_overflow(last, step, &last)) {
      return MakeError("the storage does not fit in 64 bits");
    }
  }
  int64_t bytes;
  if (__builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, DTypeBytes(type.dtype), &bytes)) {
    return MakeError("the storage does not fit in 64 bits");
  }
  return bytes;
}

std::vector<OrderEntry> Program::DefaultOrder() const {
  std::vector<OrderEntry> out;
  for (const Phase& phase : phases) {
    if (phase.kind == PhaseKind::kMicroBatch) out.push_back({phase.name, 0, Runs()});
  }
  for (const Phase& phase : phases) {
    if (phase.kind == PhaseKind::kStep) out.push_back({phase.name, kNone, 1});
  }
  return out;
}

std::vector<Program::StepRun> Program::RunsOfStep() const {
  std::vector<StepRun> out;
  const auto add = [&](const std::vector<OrderEntry>& runs) {
    for (const OrderEntry& run : runs) {
      const Phase* phase = FindPhase(run.phase);
      if (phase != nullptr && run.count > 0) out.push_back({phase, run.first, run.count});
    }
  };
  order.empty() ? add(DefaultOrder()) : add(order);
  return out;
}

bool Program::Carries() const {
  return std::any_of(phases.begin(), phases.end(),
                     [](const Phase& phase) { return !phase.saves.empty() || !phase.loads.empty(); });
}

std::vector<ValueId> Phase::Incoming() const {
  std::vector<ValueId> out = takes;
  for (const Carried& load : loads) out.push_back(load.value);
  return out;
}

std::vector<ValueId> Phase::Outgoing() const {
  std::vector<ValueId> out = gives;
  for (const Carried& save : saves) out.push_back(save.value);
  return out;
}

std::vector<std::pair<const Phase*, int64_t>> Program::RunOrder() const {
  std::vector<std::pair<const Phase*, int64_t>> out;
  for (const StepRun& run : RunsOfStep()) out.emplace_back(run.phase, run.count);
  return out;
}

const Phase* Program::MicroBatchPhase() const {
  const Phase* found = nullptr;
  for (const Phase& phase : phases) {
    if (phase.kind != PhaseKind::kMicroBatch) continue;
    if (found != nullptr) return nullptr;
    found = &phase;
  }
  return found;
}

Phase* Program::MicroBatchPhase() {
  return const_cast<Phase*>(static_cast<const Program*>(this)->MicroBatchPhase());
}

const Phase* Program::UpdatePhase() const {
  const Phase* found = nullptr;
  for (const Phase& phase : phases) {
    if (phase.kind == PhaseKind::kStep) found = &phase;
  }
  return found;
}

Phase* Program::UpdatePhase() {
  return const_cast<Phase*>(static_cast<const Program*>(this)->UpdatePhase());
}

void Program::Track() {
  tracks_ = true;
  value_noted_.assign(values_.size(), false);
  op_noted_.assign(ops_.size(), false);
}

void Program::TakeBack(const Program& base) {
  CHECK(tracks_ && value_noted_.size() == base.values_.size() && op_noted_.size() == base.ops_.size())
      << "taken back to another program than it was cloned from";
  values_.resize(base.values_.size());
  ops_.resize(base.ops_.size());
  for (int32_t id : changed_values_) {
    values_[id] = base.values_[id];
    value_noted_[id] = false;
  }
  for (int32_t id : changed_ops_) {
    ops_[id] = base.ops_[id];
    op_noted_[id] = false;
  }
  changed_values_.clear();
  changed_ops_.clear();
  phases = base.phases;
}

void Program::Compact() {
  CHECK(!tracks_) << "a program whose changes are noted keeps its ids";
  std::vector<ValueId> new_value(values_.size(), kNone);
  std::vector<ValueId> order;  // old ids in text order
  auto keep = [&](ValueId id) {
    if (id == kNone || !HasValue(id) || new_value[id] != kNone) return;
    new_value[id] = static_cast<ValueId>(order.size());
    order.push_back(id);
  };
  for (const Param& p : params) keep(p.value);
  for (const Buffer& b : buffers) keep(b.value);
  for (const Input& i : inputs) keep(i.value);
  for (const Const& c : consts) keep(c.value);
  for (const State& s : states) keep(s.value);
  std::deque<Op> old_ops;
  old_ops.swap(ops_);
  for (Phase& phase : phases) {
    for (ValueId id : phase.Incoming()) keep(id);
    for (OpId& id : phase.ops) {
      Op& op = ops_.emplace_back(std::move(old_ops[id]));
      op.id = id = num_ops() - 1;
      for (ValueId result : op.results) keep(result);
    }
  }
  // What is used although nothing defines it stays, for the verifier to report.
  for (Op& op : ops_) {
    ForEachOperand(op, [&](ValueId& id) { keep(id); });
    for (ValueId id : op.writes) keep(id);
  }
  for (Phase& phase : phases) {
    for (ValueId id : phase.Outgoing()) keep(id);
  }
  for (size_t i = 0; i < order.size(); ++i) keep(values_[order[i]].root);

  auto renumber = [&](ValueId& id) {
    if (id != kNone && HasValue(id)) id = new_value[id];
  };
  auto renumber_declared = [&](auto& table) {
    for (auto& entry : table) renumber(entry.value);
  };
  for (Op& op : ops_) {
    for (ValueId& id : op.results) renumber(id);
    ForEachOperand(op, renumber);
    for (ValueId& id : op.writes) renumber(id);
  }
  for (Phase& phase : phases) {
    for (ValueId& id : phase.takes) renumber(id);
    for (ValueId& id : phase.gives) renumber(id);
    for (Carried& save : phase.saves) renumber(save.value);
    for (Carried& load : phase.loads) renumber(load.value);
  }
  renumber_declared(params);
  renumber_declared(buffers);
  renumber_declared(inputs);
  renumber_declared(consts);
  renumber_declared(states);
  std::deque<Value> kept;
  for (ValueId old : order) {
    Value& value = kept.emplace_back(std::move(values_[old]));
    value.id = new_value[old];
    value.root = HasValue(value.root) ? new_value[value.root] : value.id;
  }
  values_ = std::move(kept);
  // Definitions are renewed: op ids changed.
  for (Value& value : values_) {
    if (value.kind == ValueKind::kResult) value.def = kNone;
  }
  for (const Op& op : ops_) {
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (op.results[i] == kNone) continue;
      values_[op.results[i]].def = op.id;
      values_[op.results[i]].result_index = static_cast<int32_t>(i);
    }
  }
}

std::vector<ValueId> OperandValues(const Op& op) {
  std::vector<ValueId> values;
  ForEachOperand(op, [&](ValueId id) { values.push_back(id); });
  return values;
}

void ReplaceUses(Program& program, Phase& phase, ValueId from, ValueId to) {
  auto replace = [&](ValueId& id) {
    if (id == from) id = to;
  };
  for (OpId id : phase.ops) {
    Op& op = program.op(id);
    ForEachOperand(op, replace);
    for (ValueId& written : op.writes) replace(written);
  }
  for (ValueId& given : phase.gives) replace(given);
  for (Carried& save : phase.saves) replace(save.value);
}

}  // namespace interlace
