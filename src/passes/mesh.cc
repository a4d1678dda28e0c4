// mesh.cc — declares the mesh: its axes and their sizes, the last fastest.
//   before: interlace 1 captured
//   after:  interlace 1 captured      mesh replica 2      mesh dp 2
// With stages=2+1 the program is one of stages of so many ranks: axes=pp:3+dp:2,stages=2+1,stage=0 is the first, of
// two. Runs before shard, replicate and zero1, which then take the sizes of their axes from it. Errors: a program that
// has a mesh already, a wrong axis (also one that does not lie beside what it is named with), two of one name.
#include <algorithm>
#include <optional>

#include "base/scan.h"
#include "ir/program.h"
#include "passes/passes.h"

namespace interlace {
namespace {

constexpr int64_t kMostRanks = 1 << 24;

Result<Axis> ReadAxis(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const int64_t size = colon == std::string_view::npos ? 0 : ParseNumber<int64_t>(text.substr(colon + 1)).value_or(0);
  if (!IsWord(name) || size < 1 || size > kMostRanks)
    return MakeError("option axes: '", text, "' is no axis; write NAME:RANKS, such as replica:2+dp:4");
  return Axis{std::string(name), size};
}

// Of stages with unlike ranks: which this is.
Result<std::optional<StageOf>> ReadStage(const PassOptions& options) {
  StageOf out{"pp", 0, {}};
  INTERLACE_ASSIGN(out.ranks, options.Counts("stages"));
  if (out.ranks.empty()) return std::optional<StageOf>();
  INTERLACE_ASSIGN(out.index, options.Int("stage", 0, 0));
  if (out.index >= static_cast<int64_t>(out.ranks.size()))
    return MakeError("stage=", out.index, " of ", out.ranks.size(), "; they count from 0");
  return std::optional<StageOf>(std::move(out));
}

}  // namespace

Result<bool> DeclareMesh(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const std::optional<StageOf> stage, ReadStage(options));
  std::vector<Axis> mesh;
  const std::string text = options.Text("axes", "");
  for (std::string_view part : Split(text, '+')) {
    INTERLACE_ASSIGN(Axis axis, ReadAxis(part));
    if (std::any_of(mesh.begin(), mesh.end(), [&](const Axis& a) { return a.name == axis.name; })) {
      return MakeError("option axes: '", axis.name, "' is named twice");
    }
    mesh.push_back(std::move(axis));
  }
  int64_t ranks = 1;
  for (const Axis& axis : mesh) ranks *= axis.size, ranks = std::min(ranks, kMostRanks + 1);
  if (ranks > kMostRanks) return MakeError("option axes: a mesh of more than ", kMostRanks, " ranks");
  const bool same = std::equal(mesh.begin(), mesh.end(), program.mesh.begin(), program.mesh.end(),
                               [](const Axis& a, const Axis& b) { return a.name == b.name && a.size == b.size; });
  if (same) return false;
  if (!program.mesh.empty()) return MakeError("the program has a mesh already; declare it once, before shard");
  if (stage &&
      (mesh.front().name != stage->axis || stage->First(static_cast<int64_t>(stage->ranks.size())) != mesh[0].size))
    return MakeError("option axes: with stages=, the first axis has as many ranks as all stages together");
  program.mesh = std::move(mesh);
  program.stage = stage;
  return true;
}

}  // namespace interlace
