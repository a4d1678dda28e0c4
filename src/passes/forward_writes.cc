// forward_writes.cc — what is read of a tensor that was written part by part is the part itself; part of canonicalize.
//   before: %3: f32[4,8] = aten.as_strided_scatter(%0, %2, [4,4], [8,1], 0)      after:
//           %4: f32[4,4]{8,1} in %3+0 = view(%3)
//           %5: f32[4,4]{8,1} in %3+4 = view(%3)                                 %5: f32[4,4]{8,1} in %0+4 = view(%0)
//           %6: f32[4,4] = aten.mul.Tensor(%4, %5)                               %6: f32[4,4] = aten.mul.Tensor(%2, %5)
// The gates of a recurrent cell are so written, one after the other, each by a copy of all of them. Where every reader
// of the copy reads what was written or what was not, none is made. No bit changes.
#include "passes/forward_writes.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

#include "ir/op_table.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

// Along each dimension of a whole tensor, where a part begins and ends.
using Box = std::vector<std::pair<int64_t, int64_t>>;

bool IsConst(const Type& type) {
  const auto is_const = [](const Dim& dim) { return dim.is_const(); };
  return std::all_of(type.sizes.begin(), type.sizes.end(), is_const) &&
         std::all_of(type.strides.begin(), type.strides.end(), is_const);
}

bool IsContiguous(const Type& type) {
  int64_t step = 1;
  for (size_t i = type.sizes.size(); i-- > 0; step *= type.sizes[i].value) {
    if (type.strides[i].value != step) return false;
  }
  return step > 0;
}

std::optional<Box> BoxOf(const Type& whole, const Type& part, const Dim& offset) {
  if (!IsConst(part) || !offset.is_const()) return std::nullopt;
  Box box;
  size_t at = 0;
  int64_t rest = offset.value;
  for (size_t i = 0; i < whole.sizes.size(); ++i) {
    const int64_t step = whole.strides[i].value, begin = rest / step;
    const bool along = at < part.sizes.size() && part.strides[at].value == step;
    const int64_t count = along ? part.sizes[at++].value : 1;
    if (count < 1 || begin + count > whole.sizes[i].value) return std::nullopt;
    box.emplace_back(begin, begin + count);
    rest %= step;
  }
  return rest == 0 && at == part.sizes.size() ? std::optional(box) : std::nullopt;
}

bool AreApart(const Box& a, const Box& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].second <= b[i].first || b[i].second <= a[i].first) return true;
  }
  return false;
}

// One overwriting op: `base` is the tensor, `part` what it writes over it, of `type` at `offset`.
struct Write {
  ValueId base, part;
  Type type;
  Dim offset;
  Box box;
  bool stays = false;  // the copy is made
};

class WriteForwarder {
 public:
  WriteForwarder(Program& program, Phase& phase) : program_(program), phase_(phase), facts_(program, phase) {}

  bool Run() {
    for (OpId id : phase_.ops) Note(program_.op(id));
    if (writes_.empty()) return false;
    for (OpId id : phase_.ops) Read(program_.op(id));
    for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
      const Write& write = writes_.at(*at);
      if (!write.stays) continue;
      const auto base = writes_.find(write.base);
      if (base != writes_.end()) base->second.stays = true;
    }
    bool changed = false;
    for (OpId id : phase_.ops) changed = Replace(program_.op(id)) || changed;
    return changed;
  }

 private:
  // Of a value that nobody writes after it was made.
  bool IsKept(ValueId id) const { return facts_.writes[program_.RootOf(id)].empty(); }

  void Note(const Op& op) {
    if (op.name != "aten.as_strided_scatter" || op.args.size() != 5 || !op.named.empty()) return;
    const ValueId result = op.results[0], base = op.args[0].value, part = op.args[1].value;
    Write write{base, part, {}, op.args[4].integer, {}};
    if (op.args[4].kind != Arg::Kind::kInt) return;
    for (const Arg& size : op.args[2].list) write.type.sizes.push_back(size.integer);
    for (const Arg& stride : op.args[3].list) write.type.strides.push_back(stride.integer);
    const Type &whole = program_.value(result).type, &given = program_.value(part).type;
    write.type.dtype = whole.dtype;
    if (!IsConst(whole) || !IsContiguous(whole) || !(program_.value(base).type == whole)) return;
    if (!IsConst(given) || !IsContiguous(given) || given.sizes != write.type.sizes || given.dtype != whole.dtype)
      return;
    if (program_.RootOf(base) != base || program_.RootOf(result) != result || facts_.leaves[result]) return;
    if (!IsKept(result) || !IsKept(base) || !IsKept(part)) return;
    const std::optional<Box> box = BoxOf(whole, write.type, write.offset);
    if (!box) return;
    write.box = *box;
    writes_.emplace(result, std::move(write));
    order_.push_back(result);
  }

  // Follows a view down to what it shows: the part that was written there, or the tensor before it. `stop(write)`:
  // where it can be followed no further. Gives the part, else kNone; `root`: whose view it is then.
  template <typename Stop>
  ValueId Follow(const Value& view, ValueId& root, const Stop& stop) {
    for (auto at = writes_.find(root); at != writes_.end(); at = writes_.find(root)) {
      Write& write = at->second;
      const Type& whole = program_.value(root).type;
      const std::optional<Box> box = BoxOf(whole, view.type, view.offset);
      if (stop(write, box.has_value() && (AreApart(*box, write.box) || IsAll(view, write)))) return kNone;
      if (!AreApart(*box, write.box)) return write.part;
      root = write.base;
    }
    return kNone;
  }

  static bool IsAll(const Value& view, const Write& write) {
    return view.type == write.type && view.offset == write.offset;
  }

  // What reads a copy otherwise keeps it.
  void Read(const Op& op) {
    if (IsPureView(program_, op)) return;
    const bool overwrites = writes_.contains(op.results.empty() ? kNone : op.results[0]);
    size_t place = 0;
    ForEachOperand(op, [&](ValueId id) {
      const bool is_base = overwrites && place++ == 0;
      ValueId root = program_.RootOf(id);
      const auto known = writes_.find(root);
      if (known == writes_.end() || is_base) return;
      if (root == id) {
        known->second.stays = true;
        return;
      }
      Follow(program_.value(id), root, [](Write& write, bool clear) {
        write.stays = write.stays || !clear;
        return !clear;
      });
    });
  }

  bool Replace(Op& op) {
    bool changed = false;
    if (op.kind == OpKind::kView) {
      const ValueId result = op.results[0];
      ValueId root = program_.RootOf(result);
      const ValueId before = root;
      const ValueId part =
          Follow(program_.value(result), root, [](Write& write, bool clear) { return write.stays || !clear; });
      if (part != kNone) {
        const auto known = stand_in_.find(part);
        stand_in_[result] = known == stand_in_.end() ? part : known->second;
      } else if (root != before) {
        op.args = {Arg::Of(root)};
        program_.value(result).root = root;
        return true;
      }
      return false;
    }
    ForEachOperand(op, [&](ValueId& id) {
      const auto found = stand_in_.find(id);
      if (found == stand_in_.end()) return;
      id = found->second;
      changed = true;
    });
    return changed;
  }

  Program& program_;
  Phase& phase_;
  PhaseFacts facts_;
  std::unordered_map<ValueId, Write> writes_;  // by result
  std::vector<ValueId> order_;
  std::unordered_map<ValueId, ValueId> stand_in_;
};

}  // namespace

bool ForwardWrites(Program& program, Phase& phase) {
  return program.level == Level::kCaptured && WriteForwarder(program, phase).Run();
}

}  // namespace interlace
