// canonicalize.cc — the same computation with fewer ops: views by geometry, no identities, no repetition, nothing dead.
//   before: %1: f32[4,8]{1,4} in %0+0 = aten.t(%0)          after: %4: f32[8,8] = aten.mm(%0, %3)
//           %2: f32[8,4] in %0+0 = aten.t(%1)
//           %4: f32[8,8] = aten.mm(%2, %3)
// - A view becomes `view(%root)`; a view with the geometry of a value that exists is that value.
// - clone, contiguous, _to_copy, x * 1, x / 1, x - 0: gone when nobody writes either side later and no bit can change.
// - Equal pure ATen ops are one, within the forward or the backward part: never across, which would undo recomputation.
// - What is read of a tensor that was written part by part is the part (forward_writes.cc).
// - Ops without effect and without users go; a dead random op may go because streams are keyed, not consumed in order.
// Runs at any level, any number of times; a second run changes nothing. Time is linear in the ops.
//
// Returns whether the program changed. No options, no errors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "ir/op_table.h"
#include "passes/forward_writes.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// A byte string that is equal for equal things; cheaper to write than to hash field by field.
class Key {
 public:
  template <typename T>
  void Raw(const T& value) {
    size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  void Text(std::string_view text) {
    Raw(text.size());
    bytes_ += text;
  }
  void Number(const Dim& dim) {
    Raw(dim.expr);
    Raw(dim.is_const() ? dim.value : int64_t{0});
  }
  void Geometry(const Type& type) {
    Raw(type.dtype);
    Raw(type.sizes.size());
    for (const Dim& dim : type.sizes) Number(dim);
    for (const Dim& dim : type.strides) Number(dim);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

std::string PlaceKey(const Value& value) {
  Key key;
  key.Raw(value.root);
  key.Number(value.offset);
  key.Geometry(value.type);
  return key.Take();
}

bool IsNumber(const Arg& arg, double number) {
  if (arg.kind == Arg::Kind::kInt) return arg.integer == Dim(static_cast<int64_t>(number));
  return arg.kind == Arg::Kind::kFloat && arg.real == number && !std::signbit(arg.real);
}

class PhaseCanonicalizer {
 public:
  PhaseCanonicalizer(Program& program, Phase& phase, const std::unordered_map<std::string, ValueId>& declared)
      : program_(program), phase_(phase), facts_(program, phase), by_place_(declared) {
    for (ValueId id = 0; id < program.num_values(); ++id) stand_in_.push_back(id);
    version_.assign(program.num_values(), 0);
    released_.assign(program.num_values(), 0);
    for (OpId id : phase.ops) {
      if (program.op(id).kind != OpKind::kRelease) continue;
      ForEachOperand(std::as_const(program).op(id), [&](ValueId v) { released_[program.RootOf(v)] = 1; });
    }
    for (ValueId id : phase.Incoming()) by_place_.try_emplace(PlaceKey(program.value(id)), id);
  }

  bool Run() {
    for (size_t i = 0; i < phase_.ops.size(); ++i) Visit(program_.op(phase_.ops[i]), static_cast<int32_t>(i));
    for (ValueId& id : phase_.gives) Substitute(id);
    for (Carried& save : phase_.saves) Substitute(save.value);
    phase_.ops = std::move(ops_);
    DropDead();
    return changed_;
  }

 private:
  void Substitute(ValueId& id) {
    if (id == kNone || stand_in_[id] == id) return;
    id = stand_in_[id];
    changed_ = true;
  }

  void Visit(Op& op, int32_t index) {
    ForEachOperand(op, [&](ValueId& id) { Substitute(id); });
    for (ValueId& id : op.writes) Substitute(id);
    for (ValueId id : op.results) {
      // The owner of the storage may itself have been replaced by an equal value.
      if (id == kNone || program_.RootOf(id) == id) continue;
      ValueId& root = program_.value(id).root;
      root = program_.RootOf(stand_in_[root]);
    }
    if (IsPureView(program_, op)) return VisitView(op);
    if (!HasEffect(program_, op) && (IsIdentity(op, index) || IsRepetition(op))) {
      changed_ = true;
      return;
    }
    ops_.push_back(op.id);
    for (ValueId id : WrittenOperands(program_, op)) ++version_[program_.RootOf(id)];
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      const Value& value = program_.value(id);
      if (value.placed) {
        ++version_[value.root];
        by_place_[PlaceKey(value)] = id;  // later views name the op that wrote them
      } else {
        by_place_.try_emplace(PlaceKey(value), id);
      }
    }
  }

  void VisitView(Op& op) {
    std::vector<ValueId> fresh;
    for (ValueId id : op.results) {
      if (id == kNone) continue;
      auto [found, is_new] = by_place_.try_emplace(PlaceKey(program_.value(id)), id);
      if (is_new) {
        fresh.push_back(id);
      } else {
        stand_in_[id] = found->second;
      }
    }
    bool rooted = op.kind == OpKind::kView && fresh.size() == 1 && op.args.size() == 1 && op.named.empty() &&
                  op.args[0] == Arg::Of(program_.RootOf(fresh[0]));
    if (rooted) {
      ops_.push_back(op.id);
      return;
    }
    changed_ = true;
    for (ValueId id : fresh) {
      Op& view = AddLike(program_, op, OpKind::kView, {program_.RootOf(id)});
      view.results = {id};
      program_.value(id).def = view.id;
      program_.value(id).result_index = 0;
      ops_.push_back(view.id);
    }
  }

  // Whether a result's storage may be merged with another: nobody writes or releases it and it does not leave the
  // phase.
  bool IsPlainStorage(ValueId id) const {
    return program_.RootOf(id) == id && facts_.writes[id].empty() && !released_[id] && !facts_.leaves[id];
  }

  bool IsIdentity(const Op& op, int32_t index) {
    if (op.rng || op.results.size() != 1 || op.results[0] == kNone || op.args.empty() ||
        op.args[0].kind != Arg::Kind::kValue) {
      return false;
    }
    ValueId source = op.args[0].value, result = op.results[0];
    const Value& from = program_.value(source);
    const Value& root = program_.value(from.root);
    if (!IsCopying(op) && !IsNeutral(op, from.type.dtype)) return false;
    if (!(from.type == program_.value(result).type) || !IsPlainStorage(result)) return false;
    // A part of a larger storage would keep all of it alive.
    if (!(from.offset == Dim(0)) || !(program_.NumElements(from.type) == program_.NumElements(root.type))) return false;
    const std::vector<int32_t>& writes = facts_.writes[from.root];
    if (released_[from.root] || (!writes.empty() && writes.back() > index)) return false;
    stand_in_[result] = source;
    return true;
  }

  static bool IsCopying(const Op& op) {
    constexpr std::string_view kNames[] = {"aten.clone", "aten.contiguous",      "aten._to_copy",  "aten.detach",
                                           "aten.alias", "aten.lift_fresh_copy", "aten.lift_fresh"};
    if (std::find(std::begin(kNames), std::end(kNames), op.name) == std::end(kNames)) return false;
    // A device or a layout could say more than the types do.
    return std::all_of(op.named.begin(), op.named.end(), [](const NamedArg& named) {
      return named.name == "dtype" || named.name == "memory_format" || named.name == "non_blocking" ||
             named.arg.kind == Arg::Kind::kNone;
    });
  }

  // Multiplication by 1 and so on. Not for 16-bit types, where a NaN may come out with other bits, nor complex ones.
  static bool IsNeutral(const Op& op, DType dtype) {
    if (op.args.size() != 2 || !op.named.empty()) return false;
    if (dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 ||
        dtype == DType::kC64 || dtype == DType::kC128) {
      return false;
    }
    std::string_view name = op.name;
    if (name == "aten.mul.Tensor" || name == "aten.mul.Scalar" || name == "aten.div.Tensor" ||
        name == "aten.div.Scalar") {
      return IsNumber(op.args[1], 1);
    }
    return (name == "aten.sub.Tensor" || name == "aten.sub.Scalar") && IsNumber(op.args[1], 0);
  }

  bool IsRepetition(const Op& op) {
    if (op.rng || !op.name.starts_with("aten.") || op.results.empty()) return false;
    for (ValueId id : op.results) {
      if (id != kNone && !IsPlainStorage(id)) return false;
    }
    Key key;
    key.Text(op.name);
    key.Raw(op.part);
    for (const Arg& arg : op.args) AddArg(key, arg);
    for (const NamedArg& named : op.named) {
      key.Text(named.name);
      AddArg(key, named.arg);
    }
    for (const NamedArg& attr : op.attrs) {
      key.Text(attr.name);
      AddArg(key, attr.arg);
    }
    for (ValueId id : op.results) {
      key.Raw(id == kNone);
      if (id != kNone) key.Geometry(program_.value(id).type);
    }
    auto [found, is_new] = by_meaning_.try_emplace(key.Take(), op.id);
    if (is_new) return false;
    const Op& before = program_.op(found->second);
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (op.results[i] != kNone) stand_in_[op.results[i]] = before.results[i];
    }
    return true;
  }

  // An operand means its value and how often its storage has been written.
  void AddArg(Key& key, const Arg& arg) {
    key.Raw(arg.kind);
    switch (arg.kind) {
      case Arg::Kind::kNone:
        break;
      case Arg::Kind::kValue:
        key.Raw(arg.value);
        key.Raw(version_[program_.RootOf(arg.value)]);
        break;
      case Arg::Kind::kInt:
        key.Number(arg.integer);
        break;
      case Arg::Kind::kFloat:
        key.Raw(arg.real);
        break;
      case Arg::Kind::kBool:
        key.Raw(arg.boolean);
        break;
      case Arg::Kind::kString:
      case Arg::Kind::kWord:
        key.Text(arg.text);
        break;
      case Arg::Kind::kList:
        key.Raw(arg.list.size());
        for (const Arg& item : arg.list) AddArg(key, item);
        break;
    }
  }

  void DropDead() {
    std::vector<char> used(program_.num_values(), 0);
    auto use = [&](ValueId id) { used[id] = used[program_.RootOf(id)] = 1; };
    for (ValueId id : phase_.Outgoing()) use(id);
    std::vector<OpId> kept;
    for (size_t i = phase_.ops.size(); i-- > 0;) {
      const Op& op = std::as_const(program_).op(phase_.ops[i]);
      // What a library outside ATen or an op without results does is not known.
      bool keep = HasEffect(program_, op) || op.results.empty() ||
                  (op.kind == OpKind::kLibrary && !op.name.starts_with("aten."));
      for (ValueId id : op.results) keep = keep || (id != kNone && used[id]);
      if (!keep) continue;
      kept.push_back(op.id);
      ForEachOperand(op, use);
      for (ValueId id : op.writes) use(id);
      for (ValueId id : op.results) {
        if (id != kNone) used[program_.RootOf(id)] = 1;
      }
    }
    std::reverse(kept.begin(), kept.end());
    changed_ = changed_ || kept.size() != phase_.ops.size();
    phase_.ops = std::move(kept);
  }

  Program& program_;
  Phase& phase_;
  PhaseFacts facts_;                                   // positions in the old list
  std::unordered_map<std::string, ValueId> by_place_;  // storage, offset and type -> the first such value
  std::unordered_map<std::string, OpId> by_meaning_;
  std::vector<ValueId> stand_in_;  // by value; itself unless replaced
  std::vector<int32_t> version_;   // by root: writes so far
  std::vector<char> released_;     // by root
  std::vector<OpId> ops_;
  bool changed_ = false;
};

}  // namespace

Result<bool> Canonicalize(Program& program, const PassOptions&) {
  std::unordered_map<std::string, ValueId> declared;
  for (ValueId id = 0; id < program.num_values(); ++id) {
    if (!program.HasValue(id)) continue;
    const Value& value = program.value(id);
    if (value.kind == ValueKind::kResult || value.kind == ValueKind::kTake) continue;
    auto [found, is_new] = declared.try_emplace(PlaceKey(value), id);
    if (!is_new && value.root == id) found->second = id;  // the owner stands for what has the same geometry
  }
  bool changed = false;
  for (Phase& phase : program.phases) {
    changed = PhaseCanonicalizer(program, phase, declared).Run() || changed;
    if (ForwardWrites(program, phase)) changed = PhaseCanonicalizer(program, phase, declared).Run() || true;
  }
  return changed;
}

}  // namespace interlace
