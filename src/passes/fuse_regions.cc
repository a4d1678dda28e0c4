#include "passes/fuse_regions.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/scan.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

// ATen ops, without overloads, of which code generation makes loops.
constexpr std::string_view kFusible =
    "abs add sub rsub mul div neg pow exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu silu gelu "
    "erf square maximum minimum clamp clamp_min where eq ne lt le gt ge logical_and logical_not "
    "logical_or bitwise_and bitwise_not bitwise_or masked_fill silu_backward gelu_backward tanh_backward "
    "sigmoid_backward threshold_backward sum mean _softmax _softmax_backward_data _log_softmax "
    "_log_softmax_backward_data native_layer_norm native_layer_norm_backward nll_loss_forward "
    "nll_loss_backward embedding cat clone _to_copy slice_backward select_backward addcmul "
    "constant_pad_nd ones_like zeros_like full_like";

const std::unordered_set<std::string_view>& Fusible() {
  static const auto& names = *new std::unordered_set<std::string_view>([] {
    const auto list = Split(kFusible, ' ');
    return std::unordered_set<std::string_view>(list.begin(), list.end());
  }());
  return names;
}

bool IsNumeric(const Type& type) {
  const auto number = [](const Dim& dim) { return dim.is_const(); };
  return std::all_of(type.sizes.begin(), type.sizes.end(), number) &&
         std::all_of(type.strides.begin(), type.strides.end(), number);
}

bool IsNumeric(const Arg& arg) {
  if (arg.kind == Arg::Kind::kInt && !arg.integer.is_const()) return false;
  return std::all_of(arg.list.begin(), arg.list.end(), [](const Arg& item) { return IsNumeric(item); });
}

}  // namespace

FuseRegions::FuseRegions(const Program& program, const Phase& phase, const FuseOptions& options)
    : facts(program, phase),
      count(static_cast<int32_t>(phase.ops.size())),
      program_(program),
      phase_(phase),
      options_(options) {
  kind.resize(count);
  for (int32_t i = 0; i < count; ++i)
    kind[i] = MayFuse(At(i)) ? Kind::kFuse : IsPureView(program_, At(i)) ? Kind::kView : Kind::kOther;
  FindLevels();
  FindComponents();
  FindRegions();
  FindGives();
  JoinReaders();
  FindGives();
}

std::string_view AtenName(const Op& op) {
  if (op.kind != OpKind::kLibrary || !op.name.starts_with("aten.")) return {};
  const std::string_view name = std::string_view(op.name).substr(5);
  return name.substr(0, name.find('.'));
}

bool FuseRegions::IsChosen(const Op& op) const {
  if (options_.modules.empty()) return true;
  if (op.module == kNone) return false;
  const std::string& path = program_.modules[op.module].path;
  return std::any_of(options_.modules.begin(), options_.modules.end(),
                     [&](const std::string& begin) { return path.starts_with(begin); });
}

bool FuseRegions::MayFuse(const Op& op) const {
  if (!Fusible().contains(AtenName(op)) || op.rng || HasEffect(program_, op)) return false;
  if (!op.attrs.empty() || op.lane || !IsChosen(op)) return false;
  bool fits = !op.results.empty();
  for (ValueId id : op.results) {
    if (id == kNone) continue;
    fits = fits && program_.RootOf(id) == id && IsNumeric(program_.value(id).type) && facts.writes[id].empty();
  }
  ForEachOperand(op, [&](ValueId id) {
    fits = fits && IsNumeric(program_.value(id).type) && program_.value(id).offset.is_const() &&
           facts.writes[program_.RootOf(id)].empty();
  });
  for (const Arg& arg : op.args) fits = fits && IsNumeric(arg);
  for (const NamedArg& named : op.named) fits = fits && IsNumeric(named.arg);
  return fits;
}

void FuseRegions::FindLevels() {
  level.assign(count, 0);
  std::vector<std::vector<int32_t>> users(count);
  int32_t ordered = -1;
  for (int32_t i = 0; i < count; ++i) {
    const auto after = [&](int32_t def) {
      if (def < 0 || def >= i) return;
      level[i] = std::max(level[i], level[def]);
      users[def].push_back(i);
    };
    ForEachOperand(At(i), [&](ValueId id) {
      after(facts.def[id]);
      after(MakerOf(id));
    });
    if (IsOrdered(i)) after(std::exchange(ordered, i));
    if (kind[i] == Kind::kOther) ++level[i];
  }
  for (int32_t i = count - 1; i >= 0; --i) {
    if (kind[i] == Kind::kOther || At(i).part != Part::kBackward || users[i].empty()) continue;
    int32_t latest = INT32_MAX;
    for (int32_t user : users[i]) latest = std::min(latest, level[user] - (kind[user] == Kind::kOther ? 1 : 0));
    level[i] = std::max(level[i], latest);
  }
}

int32_t FuseRegions::Find(int32_t i) {
  while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
  return i;
}

void FuseRegions::FindComponents() {
  parent_.resize(count);
  for (int32_t i = 0; i < count; ++i) parent_[i] = i;
  for (int32_t i = 0; i < count; ++i) {
    if (kind[i] != Kind::kFuse) continue;
    ForEachOperand(At(i), [&](ValueId id) {
      const int32_t maker = MakerOf(id);
      if (maker < 0 || kind[maker] != Kind::kFuse || level[maker] != level[i] || At(maker).part != At(i).part) return;
      parent_[std::max(Find(i), Find(maker))] = std::min(Find(i), Find(maker));
    });
  }
}

void FuseRegions::FindRegions() {
  std::vector<Region> all(count);
  for (int32_t i = 0; i < count; ++i) {
    if (kind[i] == Kind::kFuse) all[Find(i)].ops.push_back(i);
  }
  region_of.assign(count, -1);
  for (Region& region : all) {
    if (static_cast<int64_t>(region.ops.size()) < options_.least) continue;
    for (int32_t i : region.ops) region_of[i] = static_cast<int32_t>(regions.size());
    regions.push_back(std::move(region));
  }
}

void FuseRegions::FindGives() {
  outside.assign(program_.num_values(), 0);
  for (int32_t i = count - 1; i >= 0; --i) {
    const Op& op = At(i);
    if (kind[i] == Kind::kView) continue;  // roots stand for their views
    ForEachOperand(op, [&](ValueId id) {
      const ValueId root = program_.RootOf(id);
      const int32_t maker = facts.def[root];
      if (maker >= 0 && (region_of[i] < 0 || region_of[maker] != region_of[i])) outside[root] = 1;
    });
    for (ValueId id : op.results) {
      if (id != kNone && program_.RootOf(id) != id) outside[program_.RootOf(id)] = 1;
    }
  }
  for (ValueId id : phase_.Outgoing()) outside[program_.RootOf(id)] = 1;
  for (Region& region : regions) {
    for (int32_t i : region.ops) {
      for (ValueId id : At(i).results) {
        if (id != kNone && outside[id]) region.gives.push_back(id);
      }
    }
  }
}

void FuseRegions::JoinReaders() {
  struct Sizes {
    int64_t largest = 0, full = 0;  // elements of the largest value that is made; values given that have as many
  };
  const auto elements = [&](ValueId id) {
    int64_t out = 1;
    for (const Dim& size : program_.value(id).type.sizes) out *= size.is_const() ? size.value : 0;
    return out;
  };
  std::vector<Sizes> sizes(regions.size());
  std::map<std::tuple<int32_t, Part, ValueId>, size_t> reader;  // the first region that reads it
  for (size_t r = 0; r < regions.size(); ++r) {
    Region& region = regions[r];
    Sizes& own = sizes[r];
    for (int32_t i : region.ops)
      for (ValueId id : At(i).results) own.largest = std::max(own.largest, id == kNone ? 0 : elements(id));
    for (ValueId id : region.gives) own.full += elements(id) == own.largest;
    size_t with = r;
    std::vector<std::tuple<int32_t, Part, ValueId>> keys;
    for (int32_t i : region.ops) {
      ForEachOperand(At(i), [&](ValueId id) {
        const ValueId root = program_.RootOf(id);
        const int32_t maker = facts.def[root];
        if ((maker >= 0 && region_of[maker] == static_cast<int32_t>(r)) || elements(root) != own.largest) return;
        keys.emplace_back(level[i], At(i).part, root);
        const auto found = reader.find(keys.back());
        if (with == r && found != reader.end() && sizes[found->second].largest == own.largest &&
            sizes[found->second].full + own.full <= 2)
          with = found->second;
      });
    }
    for (const auto& key : keys) reader.try_emplace(key, with);
    if (with == r) continue;
    sizes[with].full += own.full;
    std::vector<int32_t> both;
    std::merge(regions[with].ops.begin(), regions[with].ops.end(), region.ops.begin(), region.ops.end(),
               std::back_inserter(both));
    regions[with].ops = std::move(both);
    region.ops.clear();
  }
  std::erase_if(regions, [](const Region& region) { return region.ops.empty(); });
  for (size_t r = 0; r < regions.size(); ++r) {
    Region& region = regions[r];
    region.gives.clear();
    for (int32_t i : region.ops) region_of[i] = static_cast<int32_t>(r);
  }
}

bool FuseRegions::IsInside(int32_t index) const {
  if (kind[index] != Kind::kView) return false;
  return std::all_of(At(index).results.begin(), At(index).results.end(), [&](ValueId id) {
    const int32_t maker = id == kNone ? -1 : MakerOf(id);
    return maker >= 0 && region_of[maker] >= 0 && !outside[program_.RootOf(id)];
  });
}

}  // namespace interlace
