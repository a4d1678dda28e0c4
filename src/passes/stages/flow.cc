#include "passes/stages/flow.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "ir/op_table.h"
#include "passes/phase_editor.h"
#include "passes/sharding.h"
#include "passes/stages/recut.h"

namespace interlace::stages {
namespace {

constexpr double kNever = 0x1p40;  // bytes; sums of thousands, and what is beside them, are exact

}  // namespace

Flow::Flow(const Program& program, const Phase& phase) : program_(program), phase_(phase) {
  const auto values = static_cast<size_t>(program.num_values());
  const auto ops = phase.ops.size();
  first_backward_ = static_cast<int32_t>(ops);
  repeats_.assign(ops, 0);
  def_.assign(values, -1);
  last_write_.assign(values, -1);
  param_of_.assign(values, kNone);
  readers_.resize(values);
  needs_.resize(ops);
  for (const Symbol& symbol : program.symbols) largest_[symbol.name] = symbol.max;
  for (const Axis& axis : program.mesh) largest_["rank_" + axis.name] = 0;
  for (const Param& param : program.params) param_of_[param.value] = param.value;
  for (int32_t i = size(); i-- > 0;) {
    if (op(i).part == Part::kBackward) first_backward_ = i;
  }
  for (int32_t i = 0; i < size(); ++i) {
    for (ValueId id : op(i).results) {
      if (id != kNone && program.RootOf(id) == id) def_[id] = last_write_[id] = i;
    }
    for (ValueId id : WrittenOperands(program, op(i))) last_write_[program.RootOf(id)] = i;
    if (IsWait(op(i))) {  // what travelled is there
      ForEachOperand(op(i), [&](ValueId id) { last_write_[program.RootOf(id)] = i; });
    }
    if (op(i).Attr(kOnShard) != nullptr) param_of_[op(i).results[0]] = program.RootOf(op(i).args[0].value);
  }
  FindRepeated();
  for (int32_t i = 0; i < size(); ++i) {
    if (Repeats(i)) continue;
    std::vector<ValueId>& needs = needs_[i];
    const auto need = [&](ValueId id) {
      const ValueId root = NeedOf(id);
      if (root != kNone && std::find(needs.begin(), needs.end(), root) == needs.end()) needs.push_back(root);
    };
    if (op(i).kind == OpKind::kGrad) {
      need(op(i).args[1].value);  // its first operand only names the parameter
    } else {
      ForEachOperand(op(i), need);
    }
    for (ValueId root : needs) readers_[root].push_back(i);
  }
  sums_for_.assign(ops, kNone);
  for (int32_t i = 0; i < size(); ++i) {
    if (op(i).kind == OpKind::kGrad) FindSums(i, program.RootOf(op(i).args[0].value));
  }
  const std::string* rows = program.Meta(kStagesRows);
  if (const auto crossings = ReadCrossings(rows == nullptr ? "" : *rows); crossings.ok() && !crossings->empty()) {
    std::vector<ValueId> roots(values);
    std::iota(roots.begin(), roots.end(), 0);
    for (const auto& [root, name] : NamesOf(program, phase, roots)) {
      if (crossings->contains(name)) known_.insert(root);
    }
  }
  FindPositions();
  FindCrossing();
}

void Flow::FindPositions() {
  std::vector<char> of_params(phase_.ops.size(), 0);
  for (int32_t i = 0; i < size(); ++i) position_.push_back(i);
  for (int32_t i = 0; i < first_backward_; ++i) {
    const Op& at = op(i);
    if (Repeats(i) || at.rng || HasEffect(program_, at) || IsStart(at) || IsWait(at) || Needs(i).empty()) continue;
    of_params[i] = 1;
    ForEachOperand(at, [&](ValueId id) {
      const ValueId root = program_.RootOf(id);
      const int32_t from = DefOf(root);
      const ValueKind kind = program_.value(root).kind;
      const bool of_param = from >= 0 ? of_params[from] != 0 || param_of_[root] != kNone
                                      : kind == ValueKind::kParam || kind == ValueKind::kConst;
      if (!of_param) of_params[i] = 0;
    });
  }
  for (int32_t i = first_backward_; i-- > 0;) {
    if (of_params[i] == 0) continue;
    int32_t first = first_backward_;
    for (ValueId id : op(i).results) {
      if (id == kNone || program_.RootOf(id) != id) continue;
      for (int32_t reader : readers_[id]) {
        if (reader < first_backward_) first = std::min(first, position_[reader]);
      }
    }
    if (first < first_backward_) position_[i] = std::max(first, i);
  }
}

// A gradient that is a sum which nothing else reads, of addends of its own sizes; these may be sums again.
void Flow::FindSums(int32_t index, ValueId param) {
  sums_for_[index] = param;
  const auto addends =
      op(index).kind == OpKind::kGrad ? std::span(op(index).args).subspan(1) : std::span(op(index).args);
  for (const Arg& arg : addends) {
    const ValueId value = arg.value;
    const int32_t def = program_.RootOf(value) == value ? DefOf(value) : -1;
    if (def < first_backward_ || Repeats(def) || Readers(value).size() != 1) continue;
    const Op& sum = op(def);
    const bool adds = sum.name == "aten.add.Tensor" && sum.named.empty() && sum.args.size() == 2 &&
                      std::all_of(sum.args.begin(), sum.args.end(), [&](const Arg& part) {
                        if (part.kind != Arg::Kind::kValue) return false;
                        const Type &a = program_.value(part.value).type, &b = program_.value(value).type;
                        return a.sizes == b.sizes && a.dtype == b.dtype;
                      });
    if (adds) FindSums(def, param);
  }
}

ValueId Flow::NeedOf(ValueId id) const {
  const ValueId root = program_.RootOf(id);
  if (param_of_[root] != kNone) return param_of_[root];
  if (def_[root] < 0) {
    // What the model changes is that of the stage that changes it.
    return last_write_[root] >= 0 ? root : kNone;
  }
  return repeats_[def_[root]] != 0 ? kNone : root;
}

// In the order of the ops, so that what a repeated op reads is known to be repeated or not.
void Flow::FindRepeated() {
  for (int32_t i = 0; i < size(); ++i) {
    const Op& at = op(i);
    if (at.Attr(kOnShard) != nullptr) {
      repeats_[i] = 1;
      continue;
    }
    const bool pure = (at.kind == OpKind::kView || at.kind == OpKind::kCopy || !IsOwn(at)) && !at.rng &&
                      !HasEffect(program_, at) && at.kind != OpKind::kCallPython;
    bool repeats = pure;
    ForEachOperand(at, [&](ValueId id) { repeats = repeats && NeedOf(id) == kNone; });
    for (ValueId id : at.results) {
      if (id == kNone) continue;
      const ValueId root = program_.RootOf(id);
      if (root == id) repeats = repeats && last_write_[id] == i;  // nobody changes it later
    }
    // A view lies where its storage does, and is made again where it is used.
    repeats_[i] = repeats || (IsPureView(program_, at) && !at.results.empty()) ? 1 : 0;
  }
}

double Flow::Bytes(ValueId root) const {
  const Type& type = program_.value(root).type;
  double bytes = static_cast<double>(DTypeBytes(type.dtype));
  for (const Dim& size : type.sizes) {
    const Result<int64_t> number = program_.dims.Evaluate(size, largest_);
    bytes *= number.ok() ? static_cast<double>(*number) : 1;
  }
  return bytes;
}

void Flow::FindCrossing() {
  std::vector<double> change(static_cast<size_t>(first_backward_) + 1, 0);
  for (ValueId root = 0; root < program_.num_values(); ++root) {
    int32_t from = def_[root];
    if (from < 0 || from >= first_backward_ || Repeats(from)) continue;
    const bool starts = IsStart(op(from));
    int32_t last = -1;
    for (int32_t reader : readers_[root]) {
      if (reader < first_backward_) last = std::max(last, position_[reader]);
    }
    from = position_[from];
    if (last <= from) continue;
    const double bytes = known_.empty() || known_.contains(root) ? Bytes(root) : kNever;
    if (const int32_t there = last_write_[root]; starts && there > from) {  // nothing is cut in flight
      change[static_cast<size_t>(from) + 1] += kNever;
      change[std::min(static_cast<size_t>(there) + 1, change.size() - 1)] -= kNever;
    }
    change[static_cast<size_t>(from) + 1] += bytes;
    change[static_cast<size_t>(last) + 1 < change.size() ? static_cast<size_t>(last) + 1 : change.size() - 1] -= bytes;
  }
  double sum = 0;
  for (double bytes : change) crossing_.push_back(sum += bytes);
}

std::vector<char> Flow::Above(int32_t border) const {
  std::vector<char> above(static_cast<size_t>(size()), 0);
  std::vector<char> there(static_cast<size_t>(program_.num_values()), 0);  // by root: known above without being sent
  std::vector<char> below(static_cast<size_t>(program_.num_values()), 0);  // by root: used below
  for (int32_t i = 0; i < first_backward_; ++i) {
    above[i] = position_[i] >= border ? 1 : 0;
    for (ValueId root : Needs(i)) (above[i] != 0 ? there : below)[root] = 1;
    for (ValueId id : op(i).results) {
      if (id != kNone && above[i] != 0) there[program_.RootOf(id)] = 1;
    }
  }
  for (int32_t i = first_backward_; i < size(); ++i) {
    if (Repeats(i)) continue;
    const Op& at = op(i);
    if (at.kind == OpKind::kGrad) {
      above[i] = below[program_.RootOf(at.args[0].value)] == 0 ? 1 : 0;
      continue;
    }
    bool up = true;
    for (ValueId root : Needs(i)) {
      const int32_t from = DefOf(root);
      up = up && (from >= first_backward_ ? above[from] != 0 : there[root] != 0);
      if (from >= first_backward_ && last_write_[root] > from && last_write_[root] < i)
        up = up && above[last_write_[root]] != 0;
    }
    above[i] = up ? 1 : 0;
  }
  while (MoveDown(above, there, below)) {
  }
  return above;
}

double Flow::Back(const std::vector<char>& above) const {
  double bytes = 0;
  for (int32_t i = first_backward_; i < size(); ++i) {
    if (above[i] == 0 || Repeats(i)) continue;
    for (ValueId id : op(i).results) {
      if (id == kNone || program_.RootOf(id) != id) continue;
      const auto& readers = Readers(id);
      if (std::any_of(readers.begin(), readers.end(), [&](int32_t reader) { return above[reader] == 0; }))
        bytes += Bytes(id);
    }
  }
  return bytes;
}

bool Flow::Fits(const std::vector<char>& above) const {
  for (int32_t i = first_backward_; i < size(); ++i) {
    if (op(i).kind != OpKind::kGrad || above[i] == 0) continue;
    const int32_t from = DefOf(program_.RootOf(op(i).args[1].value));
    if (from >= first_backward_ && above[from] == 0 && SumsFor(from) == kNone) return false;
  }
  return std::none_of(program_.buffers.begin(), program_.buffers.end(), [&](const Buffer& buffer) {
    const int32_t write = last_write_[buffer.value];
    return write >= 0 && std::any_of(readers_[buffer.value].begin(), readers_[buffer.value].end(),
                                     [&](int32_t reader) { return !Repeats(reader) && above[reader] != above[write]; });
  });
}

int32_t Flow::WaitOf(int32_t start) const {
  const std::vector<ValueId>& results = op(start).results;
  if (results.size() != 1) return -1;
  const ValueId root = program_.RootOf(results[0]);
  const int32_t wait = last_write_[root];
  return wait > start && IsWait(op(wait)) && Needs(wait) == std::vector{root} ? wait : -1;
}

// From the end: an op above, whose results are read below only, goes down when what it reads is less to send; a
// transfer goes with its wait. Part of the gradient of a parameter that is used above, too, stays: it is added up
// there.
bool Flow::MoveDown(std::vector<char>& above, const std::vector<char>& there, const std::vector<char>& below) const {
  bool moved = false;
  for (int32_t i = size(); i-- > first_backward_;) {
    const Op& at = op(i);
    if (above[i] == 0 || Repeats(i) || at.kind == OpKind::kGrad || at.kind == OpKind::kOutput || IsWait(at) ||
        !at.writes.empty()) {
      continue;
    }
    const int32_t end = IsStart(at) ? WaitOf(i) : i;  // when the results are there
    if (end < 0) continue;
    bool only_below = true, read = false;
    double sent = 0, instead = 0;
    for (ValueId id : at.results) {
      if (id == kNone || program_.RootOf(id) != id) continue;
      for (int32_t reader : readers_[id]) {
        if (reader == end) continue;
        const ValueId param = SumsFor(reader);
        read = true;
        only_below = only_below && above[reader] == 0 && (param == kNone || there[param] == 0);
      }
      if (last_write_[id] != end) only_below = false;
      sent += Bytes(id);
    }
    if (!only_below || !read) continue;
    for (ValueId root : Needs(i)) {
      const bool sent_anyway = std::any_of(readers_[root].begin(), readers_[root].end(), [&](int32_t reader) {
        return reader >= first_backward_ && above[reader] == 0;
      });
      const int32_t from = DefOf(root);
      const bool is_above = from >= 0 ? above[from] != 0 : below[root] == 0;  // a parameter is where it is used
      if (!sent_anyway && is_above) instead += Bytes(root);
    }
    const bool crosses =
        std::any_of(at.results.begin(), at.results.end(), [&](ValueId id) { return known_.contains(id); });
    if (known_.empty() ? instead <= sent : !crosses) above[i] = above[end] = 0, moved = true;
  }
  return moved;
}

}  // namespace interlace::stages
