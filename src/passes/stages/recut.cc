#include "passes/stages/recut.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <set>

#include "base/scan.h"
#include "passes/tensor/cutter.h"

namespace interlace::stages {
namespace {

constexpr std::string_view kRowsAxis = "rows";  // while it exists

Result<int64_t> Number(std::string_view text) {
  int64_t number = -1;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size() || number < 0)
    return MakeError("'", text, "' stands where a number is expected");
  return number;
}

}  // namespace

Type Crossing::PieceOf(const Type& storage, int64_t pieces) const {
  int64_t count = 1;
  for (const Dim& size : storage.sizes) count *= size.value;
  const int64_t length = count / blocks / pieces;
  if (blocks == 1) return Type{storage.dtype, {Dim(length)}, {Dim(1)}};
  return Type{storage.dtype, {Dim(blocks), Dim(length)}, {Dim(length), Dim(1)}};
}

Result<Crossings> FindCrossings(const Program& program, const Phase& phase, const std::vector<ValueId>& roots) {
  int64_t rows = 0;
  if (const std::string* text = program.Meta("micro_batch")) {
    INTERLACE_ASSIGN(rows, Number(*text));
  }
  if (rows < 2)
    return MakeError("rows are followed through a micro-batch of several; begin with the stage whose is the largest");
  Program clone = program.Clone();
  clone.mesh.push_back({std::string(kRowsAxis), rows});
  Phase* copy = clone.FindPhase(phase.name);
  tensor::CutterOptions how;
  how.axis = std::string(kRowsAxis);
  how.sequence = false;
  how.sums_behind = true;
  how.flops_per_byte = 1e-6;  // what is cut stays cut,
  how.sums_cost = false;      // and what is a sum stays one: nothing travels
  how.rows = rows;
  tensor::Cutter cutter(clone, *copy, how);
  std::set<ValueId> of_rows;  // what knows the rows
  for (const Input& input : clone.inputs) {
    const std::vector<Dim>& sizes = clone.value(input.value).type.sizes;
    if (sizes.empty() || sizes[0] != Dim(rows)) continue;
    cutter.CutInput(input.value);
    of_rows.insert(input.value);
  }
  INTERLACE_TRY(cutter.Run());
  for (const OpId id : copy->ops) {
    const Op& op = std::as_const(clone).op(id);
    if (tensor::ReadsSizesOnly(op) || !AnyOperand(op, [&](ValueId v) { return of_rows.contains(clone.RootOf(v)); }))
      continue;
    for (const ValueId result : op.results) of_rows.insert(result == kNone ? kNone : clone.RootOf(result));
  }
  Crossings out;
  for (const ValueId root : roots) {
    const tensor::Placement& placement = cutter.PlacementOf(root);
    Crossing& crossing = out[root];
    if (placement.is_whole() && of_rows.contains(root)) {
      const Op& def = program.op(program.value(root).def);
      return MakeError("%", root, ", made by ", def.name, def.source == kNone ? "" : " at ",
                       def.source == kNone ? "" : program.sources[static_cast<size_t>(def.source)].place,
                       ", goes from stage to stage and mixes the rows of a micro-batch, which stages of unlike ranks "
                       "have different ones of; give all stages the same dp, or choose other borders");
    }
    if (placement.is_sum()) crossing.kind = Crossing::Kind::kSum;
    if (!placement.is_cut()) continue;
    crossing.kind = Crossing::Kind::kRows;
    int64_t elements = 1;
    for (const Dim& size : program.value(root).type.sizes) elements *= size.value;
    crossing.blocks = elements / placement.period;
  }
  return out;
}

std::map<ValueId, std::string> NamesOf(const Program& program, const Phase& phase, const std::vector<ValueId>& roots) {
  std::map<ValueId, std::string> out;
  for (const ValueId root : roots) out[root] = "";
  std::map<std::string, int64_t> count;  // by kind
  for (const OpId id : phase.ops) {
    const Op& op = program.op(id);
    if (std::none_of(op.results.begin(), op.results.end(),
                     [&](ValueId result) { return result != kNone && program.RootOf(result) == result; }))
      continue;
    std::string name = op.part == Part::kBackward ? "bwd " : "fwd ";
    if (const Arg* marked = op.Attr(kMark); marked != nullptr && op.kind == OpKind::kCopy) {  // by pass `borders`
      if (const auto found = out.find(op.results[0]); found != out.end()) found->second = marked->text;
      continue;
    }
    name += (op.module == kNone ? "" : program.modules[static_cast<size_t>(op.module)].path) + " " + op.name + " ";
    name += std::to_string(count[name]++);
    for (size_t i = 0; i < op.results.size(); ++i) {
      const auto found = out.find(op.results[i]);
      if (found != out.end()) found->second = i == 0 ? name : name + "." + std::to_string(i);
    }
  }
  return out;
}

std::string PrintCrossings(const Crossings& crossings, const std::map<ValueId, std::string>& names) {
  std::string out;
  for (const auto& [root, crossing] : crossings) {
    out += out.empty() ? "" : "\n";
    out += crossing.kind == Crossing::Kind::kRows  ? "rows " + std::to_string(crossing.blocks)
           : crossing.kind == Crossing::Kind::kSum ? "sum"
                                                   : "whole";
    out += " " + names.at(root);
  }
  return out;
}

Result<std::map<std::string, Crossing>> ReadCrossings(std::string_view text) {
  std::map<std::string, Crossing> out;
  if (text.empty()) return out;
  for (std::string_view line : Split(text, '\n')) {
    Crossing crossing;
    const std::string_view kind = line.substr(0, line.find(' '));
    std::string_view rest = line.substr(std::min(kind.size() + 1, line.size()));
    if (kind == "rows") {
      crossing.kind = Crossing::Kind::kRows;
      const std::string_view number = rest.substr(0, rest.find(' '));
      rest.remove_prefix(std::min(number.size() + 1, rest.size()));
      INTERLACE_ASSIGN(crossing.blocks, Number(number));
    } else if (kind == "sum") {
      crossing.kind = Crossing::Kind::kSum;
    } else if (kind != "whole") {
      return MakeError("meta \"", kStagesRows, "\" has '", line,
                       "'; expected 'rows N NAME', 'sum NAME' or 'whole NAME'");
    }
    if (crossing.blocks < 1) return MakeError("meta \"", kStagesRows, "\" has '", line, "', of no block");
    out[std::string(rest)] = crossing;
  }
  return out;
}

Result<Recut> Recut::Of(const StageOf& stage, std::vector<int64_t> data) {
  if (data.size() != stage.ranks.size())
    return MakeError("data= has ", data.size(), " numbers for ", stage.ranks.size(), " stages");
  for (size_t s = 0; s < data.size(); ++s) {
    if (stage.ranks[s] % data[s] != 0)
      return MakeError("stage ", s, " has ", stage.ranks[s], " ranks, which ", data[s], " do not divide");
  }
  Recut out;
  out.stage_ = stage;
  out.data_ = std::move(data);
  return out;
}

Result<Recut> Recut::Of(const Program& program) {
  const std::string* text = program.Meta(kStagesData);
  if (!program.stage || text == nullptr) return MakeError("the program has no meta line \"", kStagesData, "\"");
  std::vector<int64_t> data;
  for (std::string_view word : Split(*text, '+')) {
    INTERLACE_ASSIGN(const int64_t ranks, Number(word));
    if (ranks < 1) return MakeError("meta \"", kStagesData, "\" is ", *text);
    data.push_back(ranks);
  }
  return Of(*program.stage, std::move(data));
}

std::string Recut::Text() const {
  std::string out;
  for (const int64_t ranks : data_) out += (out.empty() ? "" : "+") + std::to_string(ranks);
  return out;
}

int64_t Recut::Pieces(int64_t mine, int64_t other) const {
  return std::lcm(data(mine), data(other)) / data(mine);
}

int64_t Recut::Finest() const {
  int64_t out = 1;
  for (const int64_t ranks : data_) out = std::lcm(out, ranks);
  return out;
}

Dim Recut::PartOf(DimTable& dims, int64_t mine) const {
  if (tensor(mine) == 1) return Dim(0);
  const Dim place = dims.Sub(dims.Symbol("rank_" + stage_.axis), Dim(stage_.First(mine)));
  return dims.Mod(place, Dim(tensor(mine)));
}

Dim Recut::Peer(DimTable& dims, int64_t mine, int64_t other, int64_t number) const {
  const int64_t width = Width(mine, other);
  const Dim place = dims.Sub(dims.Symbol("rank_" + stage_.axis), Dim(stage_.First(mine)));
  const Dim row = data(mine) == 1 ? Dim(0) : dims.FloorDiv(place, Dim(tensor(mine)));
  const Dim of_all = dims.Add(dims.Mul(row, Dim(Pieces(mine, other))), Dim(number / width));
  const Dim there = dims.Mul(dims.FloorDiv(of_all, Dim(Pieces(other, mine))), Dim(tensor(other)));
  const Dim within = tensor(mine) == tensor(other) ? PartOf(dims, mine) : Dim(number % width);
  return dims.Add(dims.Add(there, within), Dim(stage_.First(other)));
}

}  // namespace interlace::stages
