// Axes of the mesh: the ranks along some, this rank among them, and along which what a unit holds differs.
#include <algorithm>

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

AxisGroup GroupOf(const std::vector<Axis>& mesh, std::string_view axes) {
  const std::vector<std::string_view> wanted = AxesOf(axes);
  AxisGroup group;
  bool within = false;
  for (size_t i = mesh.size(); i-- > 0;) {
    const bool member = std::find(wanted.begin(), wanted.end(), mesh[i].name) != wanted.end();
    if (member) group.size *= mesh[i].size, within = true;
    if (!within) group.stride *= mesh[i].size;
  }
  if (!within) group.stride = 1;
  return group;
}

Dim Program::AxisRank(std::string_view axes) {
  Dim out = 0;
  for (std::string_view axis : AxesOf(axes)) {
    out = dims.Add(dims.Mul(out, Dim(AxisSize(axis))), dims.Symbol("rank_" + std::string(axis)));
  }
  return out;
}

std::vector<std::string_view> Program::AxesOfElements(const Unit& unit, bool shard) const {
  std::vector<std::string_view> differ;
  if (shard) differ = AxesOf(unit.axis);
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
