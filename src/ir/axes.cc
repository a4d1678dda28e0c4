// Axes of the mesh: the ranks along some, this rank among them, and along which what a unit holds differs.
#include <algorithm>
#include <set>

#include "base/scan.h"
#include "ir/op_table.h"
#include "ir/program.h"

namespace interlace {

std::vector<std::string_view> AxesOf(std::string_view axes) {
  std::vector<std::string_view> out;
  while (!axes.empty()) {
    const size_t comma = std::min(axes.find(','), axes.size());
    out.push_back(axes.substr(0, comma));
    axes.remove_prefix(std::min(comma + 1, axes.size()));
  }
  return out;
}

bool NamesAxis(std::string_view axes, std::string_view axis) {
  const std::vector<std::string_view> names = AxesOf(axes);
  return std::find(names.begin(), names.end(), axis) != names.end();
}

Binding FirstRank(const std::vector<Axis>& mesh) {
  Binding ranks;
  for (const Axis& axis : mesh) ranks["rank_" + axis.name] = 0;
  return ranks;
}

AxisGroup GroupOf(const std::vector<Axis>& mesh, std::string_view axes) {
  AxisGroup group;
  bool within = false;
  for (size_t i = mesh.size(); i-- > 0;) {
    if (NamesAxis(axes, mesh[i].name)) group.size *= mesh[i].size, within = true;
    if (!within) group.stride *= mesh[i].size;
  }
  if (!within) group.stride = 1;
  return group;
}

int64_t RowOf(const std::vector<Axis>& mesh, std::string_view axes) {
  int64_t row = 0, others = 1;
  const std::vector<std::string_view> names = AxesOf(axes);
  for (size_t i = names.size(); i-- > 0;) {
    const int64_t size = GroupOf(mesh, names[i]).size;
    if (size > 1) (row == 0 ? row : others) = size;
  }
  return others > 1 ? row : 0;
}

AxisGroup Program::GroupAlong(std::string_view axes) const {
  if (!stage || !stage->unlike()) return GroupOf(mesh, axes);
  if (axes == stage->axis) return {AxisSize(axes), 1, 0};
  std::vector<Axis> own;
  for (const Axis& axis : mesh) {
    if (axis.name != stage->axis) own.push_back(axis);
  }
  AxisGroup group = GroupOf(own, axes);
  group.first = stage->First(stage->index);
  return group;
}

int64_t Program::Ranks() const {
  if (stage && stage->unlike()) return AxisSize(stage->axis);
  int64_t ranks = 1;
  for (const Axis& axis : mesh) {
    if (__builtin_mul_overflow(ranks, axis.size, &ranks)) return 0;
  }
  return ranks;
}

int64_t Program::Stages() const {
  if (!stage) return 1;
  return stage->unlike() ? static_cast<int64_t>(stage->ranks.size()) : AxisSize(stage->axis);
}

std::string Program::DataAxes(const Unit& unit) const {
  std::string out;
  for (const Axis& axis : mesh) {
    bool named = false;
    for (const std::string* axes : {&unit.axis, &unit.replicas}) {
      for (std::string_view name : AxesOf(*axes)) named = named || name == axis.name;
    }
    if (named) out += (out.empty() ? "" : ",") + axis.name;
  }
  return out;
}

std::vector<std::string> Program::TransferAxes(bool grids) const {
  std::set<std::string> found;
  for (const Unit& unit : units) {
    found.insert(unit.axis);
    if (!unit.replicas.empty()) found.insert(grids ? DataAxes(unit) : unit.replicas);
    if (unit.parted()) found.insert(unit.replicas);
  }
  for (const Phase& phase : phases) {
    for (OpId id : phase.ops) {
      const Arg* axis = op(id).Attr("axis");
      if (axis != nullptr && axis->kind == Arg::Kind::kWord) found.insert(axis->text);
    }
  }
  std::erase_if(found, [&](const std::string& axes) { return AxisSize(axes) < 2; });
  return {found.begin(), found.end()};
}

std::map<std::string, int64_t> Program::MessageAxes() const {
  std::map<std::string, int64_t> found;
  for (const Phase& phase : phases) {
    for (OpId id : phase.ops) {
      if (TraitsOf(op(id)).family != OpFamily::kPeer || !IsStart(op(id))) continue;
      int64_t& channels = found[std::string(AxisOf(*this, op(id)))];
      channels = std::max(channels, ChannelOf(op(id)) + 1);
    }
  }
  if (const std::string* text = Meta(kStagesChannels); text != nullptr && stage) {
    const int64_t channels =
        std::min(ParseNumber<int64_t>(*text).value_or(0), kMostChannels);  // a text may say anything
    if (const auto of = found.find(stage->axis); of != found.end()) of->second = std::max(of->second, channels);
  }
  std::erase_if(found, [&](const auto& entry) { return AxisSize(entry.first) < 2; });
  return found;
}

Dim Program::AxisRank(std::string_view axes) {
  Dim out = 0;
  for (std::string_view axis : AxesOf(axes)) {
    out = dims.Add(dims.Mul(out, Dim(AxisSize(axis))), dims.Symbol("rank_" + std::string(axis)));
  }
  return out;
}

std::vector<std::string_view> Program::AxesOfElements(const Unit& unit, std::optional<int64_t> elements) const {
  std::vector<std::string_view> differ;
  if (elements != unit.numel) differ = AxesOf(unit.axis);
  if (unit.parted() && elements == unit.part) {
    for (std::string_view axis : AxesOf(unit.replicas)) differ.push_back(axis);
  }
  for (const Param& param : params) {
    if (param.unit != unit.id) continue;
    for (const Cut& cut : param.cuts) differ.push_back(cut.axis);
  }
  std::vector<std::string_view> out;
  for (const Axis& axis : mesh) {
    if (axis.size > 1 && std::find(differ.begin(), differ.end(), axis.name) != differ.end()) out.push_back(axis.name);
  }
  return out;
}

}  // namespace interlace
