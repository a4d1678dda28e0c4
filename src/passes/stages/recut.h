// recut.h — what travels between stages of unlike ranks: which rank of the other stage has which part of it.
//
// A micro-batch of all data ranks of a stage has as many rows as that of another, so its rows fall into as many equal
// pieces as the ranks of both divide (the least common multiple). A rank sends each of its pieces straight to the rank
// that has it there:
//
//   stage 0, 2 ranks   | piece 0 | piece 1 |        stage 0, 2 ranks   | 0 1 2 | 3 4 5 |
//   stage 1, 1 rank    | piece 0   piece 1 |        stage 1, 3 ranks   | 0 1 | 2 3 | 4 5 |
//
// What is a sum over rows (the gradient of what all rows read) is sent whole to whoever has one of the pieces, and
// added up there; what does not depend on rows is taken from the first.
//
// Between stages that cut products over as many ranks each of these sends to its like. Otherwise what crosses is whole
// on all of them (borders.cc), and each sends its part of a piece to all that need it:
//
//   stage 0, tp 2, one piece   | part 0 by rank 0 | part 1 by rank 1 |   to each rank of stage 1
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace::stages {

// Of a storage that crosses.
struct Crossing {
  enum class Kind : uint8_t { kRows, kWhole, kSum };
  Kind kind = Kind::kWhole;
  int64_t blocks = 1;  // kRows: equal blocks of the storage, in each of which the rows lie one after the other
  // One of so many pieces of a storage of this type: elements in a row, or blocks of them.
  Type PieceOf(const Type& storage, int64_t pieces) const;
};
using Crossings = std::map<ValueId, Crossing>;  // by storage

// How `roots`, all of one captured micro-batch of more than one row, depend on its rows. The program is left as it is.
// Error: rows that nothing can follow.
Result<Crossings> FindCrossings(const Program& program, const Phase& phase, const std::vector<ValueId>& roots);
// What storages are called in all programs of one model, for micro-batches of whatever rows: by the op that makes them,
// "fwd model.layers.1 aten.add.Tensor 2": the third of its kind in a module's forward part.
std::map<ValueId, std::string> NamesOf(const Program& program, const Phase& phase, const std::vector<ValueId>& roots);

// Crossings by name, a line each: "rows 1 fwd model.layers.1 aten.add.Tensor 2", "sum NAME", "whole NAME".
std::string PrintCrossings(const Crossings& crossings, const std::map<ValueId, std::string>& names);
Result<std::map<std::string, Crossing>> ReadCrossings(std::string_view text);

// Who has what, of stages with unlike ranks.
class Recut {
 public:
  // `data`: ranks of each stage that have batches of their own. Error: they do not go with the ranks of `stage`.
  static Result<Recut> Of(const StageOf& stage, std::vector<int64_t> data);
  // As pass `pipeline` left it in the program's meta line.
  static Result<Recut> Of(const Program& program);
  std::string Text() const;

  // Equal pieces of what a rank of stage `mine` shares with stage `other`.
  int64_t Pieces(int64_t mine, int64_t other) const;
  // Messages of each piece, to or from as many ranks of stage `other`; and the parts that a rank of `from` sends one of.
  int64_t Width(int64_t mine, int64_t other) const { return tensor(mine) == tensor(other) ? 1 : tensor(other); }
  int64_t Parts(int64_t from, int64_t to) const { return tensor(from) == tensor(to) ? 1 : tensor(from); }
  // The set's rank that message `number` (of piece number / Width) of a rank of `mine` goes to, or comes from, on
  // `other`: an expression of the former's own.
  Dim Peer(DimTable& dims, int64_t mine, int64_t other, int64_t number) const;
  // Which part of a piece a rank of `mine` sends.
  Dim PartOf(DimTable& dims, int64_t mine) const;
  // Pieces that every stage's ranks divide.
  int64_t Finest() const;
  int64_t data(int64_t stage) const { return data_[static_cast<size_t>(stage)]; }
  // Ranks of a stage that cut the products of one batch.
  int64_t tensor(int64_t stage) const { return stage_.ranks[static_cast<size_t>(stage)] / data(stage); }
  bool SameRows() const { return std::count(data_.begin(), data_.end(), data_[0]) == std::ssize(data_); }

 private:
  StageOf stage_;
  std::vector<int64_t> data_;
};

// Attribute of a copy that pass `borders` adds: what is sent is called so in the programs of all stages.
inline constexpr std::string_view kMark = "message";
inline constexpr std::string_view kStagesData = "stages.data";  // meta line: Recut::Text
inline constexpr std::string_view kStagesMean = "stages.mean";  // meta line: data ranks whose losses are averaged
inline constexpr std::string_view kStagesRows = "stages.rows";  // meta line: PrintCrossings

}  // namespace interlace::stages
