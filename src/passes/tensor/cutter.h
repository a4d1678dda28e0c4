// cutter.h — rewrites a captured program as one of P ranks runs it: a placement for every storage, transfers where
// placements do not fit. tensor.cc has the pass; special.cc the operators that are cut along what they sum over.
//
// Ops are visited in order. Each has few ways to be run (whole, or cut along one factor of its rule that an operand is
// cut along, or could be after its sum over ranks is made); the one whose operands cost the fewest bytes to make fit is
// taken. What an operand is turned into is remembered, so a value is gathered or summed once.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/program.h"
#include "passes/tensor/placement.h"
#include "passes/tensor/rules.h"
#include "passes/tensor/sizes.h"

namespace interlace::tensor {

struct CutterOptions {
  std::string axis = "tp";
  bool sequence = true;  // a sum over ranks may be scattered along rows instead of made whole
  // Gradients of whole parameters that are smaller than this are summed last, all at once; the others, and all without
  // sums_behind, as soon as they are there.
  int64_t bucket = 256 << 10;  // bytes
  bool sums_behind = true;
  double flops_per_byte = 1000;  // of products, in the time that a byte travels: 600 (a PC) to 2500 (H100, NVLink)
  bool sums_cost = true;         // what a sum costs that is made later counts
  int64_t rows = 0;              // what is the same for so many rows, as an expanded bias is, may be cut along them
  bool regather = false;         // what was gathered in the forward part is gathered again for the backward part
  Binding sample = {};           // where sizes, or the axis's, are symbols: numbers to decide by (sizes.h)
};

// The geometries of a program's values, and of those that are added to it; they stay where they are.
class Geometries {
 public:
  explicit Geometries(const std::vector<Geometry>& before) : before_(before) {}
  const Geometry& operator[](ValueId id) const {
    const auto at = static_cast<size_t>(id);
    return at < before_.size() ? before_[at] : added_[at - before_.size()];
  }
  void Add(ValueId id, Geometry geometry) {
    added_.resize(std::max(added_.size(), static_cast<size_t>(id) + 1 - before_.size()));
    added_[static_cast<size_t>(id) - before_.size()] = std::move(geometry);
  }

 private:
  const std::vector<Geometry>& before_;
  std::deque<Geometry> added_;
};

class Cutter {
 public:
  // `facts`: of the program, where they are known; they must outlive the cutter.
  Cutter(Program& program, Phase& phase, const CutterOptions& options, const Facts* facts = nullptr);

  // A parameter that a rank holds a part of. Error: it cannot be cut so.
  Status CutParam(Param& param, int64_t dim, int64_t blocks);
  // An input of which a part of the rows may be used on each rank, though all have the whole.
  void CutInput(ValueId input);
  // An input that a rank gets a part of, an output that it hands on a part of, or both, by name. Error: as above.
  Status CutActivation(const std::string& name, int64_t dim);
  // The whole phase. Error: a size that is not a number, a value written in place that is cut.
  Status Run();
  // The same op by op: the phase's ops, each of which is then to be visited, and the sums that were left for the end.
  std::vector<OpId> Begin();
  Status Step(OpId id);
  Status End();

  // What a rank holds of a value's storage.
  const Placement& PlacementOf(ValueId id) const { return placement_[program_.RootOf(id)]; }
  const std::map<std::string, int64_t>& made_whole() const { return made_whole_; }  // bytes by operator without a rule
  const std::vector<std::pair<OpId, ValueId>>& sums_behind() const { return sums_behind_; }  // that End is to make
  // All that decides what an op does with a storage of before the rewrite: its placement, and the copies of it that
  // there are. And likewise with indices and losses (Special::Remembers).
  void AppendState(ValueId root, std::vector<int64_t>& out) const;
  void AppendRemembered(std::vector<int64_t>& out) const;

  // Of a loss by targets, what goes back to the cut logits.
  struct LossGradient {
    ValueId target = kNone, gradient = kNone, weight = kNone;
    Arg ignored;
    bool mean = true;
  };
  // Indices into a cut dimension of `rows`: `mine` counts from this rank's first, with `other` in place of those of
  // other ranks and of `ignored` (kNone: of none). `outside`: where that was.
  struct LocalIndex {
    ValueId of = kNone;
    int64_t rows = 0;
    Arg other, ignored;
    ValueId mine = kNone, outside = kNone;
  };
  // Of targets, which are not `ignored`.
  struct Counted {
    ValueId target = kNone;
    Arg ignored;
    ValueId which = kNone;
  };

 private:
  friend class Special;

  // One way to run an op: along a factor, or whole.
  struct Way {
    int32_t factor = kWholeDim;
    int64_t blocks = 1;
    double cost = 0;
  };

  // Without a note that it changes: what stays as it is need not be taken back (Program::TakeBack).
  const Op& Read(OpId id) const { return std::as_const(program_).op(id); }
  Status Visit(OpId id);
  void View(OpId id);
  Status Generic(OpId id);
  void Grad(OpId id);
  void SumGradients(const Op& op);

  std::vector<Way> WaysOf(const Op& op, const Rule& rule, const std::vector<ValueId>& operands);
  // Bytes to make everything fit; infinite: impossible.
  double CostOf(const Op& op, const Rule& rule, const std::vector<ValueId>& operands, const Way& way);
  double CostOf(ValueId operand, const DimCut* cut);
  double FlopsOf(const Op& op) const;
  void Carry(OpId id, const Rule& rule, const Way& way);
  void PlaceResults(const Op& op, const Rule& rule, const Way& way);
  std::optional<DimCut> CutIn(const std::vector<int32_t>& dims, const Way& way) const;

  // Whether a value is a part of the gradient of a parameter that is cut along its rows.
  bool IsGradientOfRows(ValueId id) const { return rows_gradients_[id]; }
  void FindGradientsOfRows(const std::vector<OpId>& ops);
  void ForgetGathered();
  bool IsUnread(const Rule& rule, ValueId operand) const;
  bool StaysSum(const std::vector<ValueId>& operands, const std::vector<bool>& linear) const;
  bool IsZero(ValueId root) const;

  std::optional<DimCut> CutOf(ValueId id) const;
  // Where rows of the sum in a storage would be cut; 0: nowhere.
  int64_t RowPeriod(ValueId root) const;

  // The value to use in place of `id` so that it is whole, or cut so.
  ValueId AsWhole(ValueId id);
  ValueId AsPart(ValueId id, DimCut cut);
  // A copy of a storage with another placement, made once.
  ValueId Storage(ValueId root, Placement wanted);
  // What `id` is of its root, of another storage of the same elements.
  ValueId SeenIn(ValueId root, ValueId id);
  ValueId Exchange(OpKind kind, ValueId operand, const Geometry& result, int64_t dim, Placement placement);
  void Apply(ValueId id);

  // Adds a value to an op: `geometry` on one device, of which a rank holds what `placement` says.
  ValueId AddResult(Op& op, const Geometry& geometry, Placement placement);
  ValueId AddView(Op& op, ValueId root, const Geometry& geometry);
  Op& NewOp(std::string name);
  ValueId Emit(std::string name, std::vector<Arg> args, const Geometry& geometry, Placement placement = {},
               std::vector<NamedArg> named = {});
  void Know(ValueId id, Geometry geometry);
  // Before the rewrite, of the storage or of what it is seen as.
  const std::vector<ValueId>& ViewsOf(ValueId root) const;

  Program& program_;
  Phase& phase_;
  CutterOptions options_;
  Sizes sizes_;
  int64_t ranks_ = 1;
  std::optional<Facts> own_facts_;
  const Facts& facts_;
  Geometries geometry_;                 // by value, before the rewrite
  std::vector<Placement> placement_;    // by root
  std::vector<bool> unseen_;            // by value: a view that a rank's part of the storage does not have
  std::map<ValueId, ValueId> seen_as_;  // by a storage that was added: the one before the rewrite whose views it has
  std::map<std::pair<ValueId, int64_t>, ValueId> copies_;  // root and period (0: whole) → root
  std::vector<std::pair<OpId, ValueId>> sums_behind_;      // gradients of whole parameters that are sums
  std::vector<bool> rows_gradients_;                       // by value
  std::vector<bool> gradients_;                            // by root: handed over as a gradient of a whole parameter
  std::map<ValueId, int64_t> row_inputs_;                  // their periods
  std::map<std::string, int32_t> activations_;             // dimension by name
  std::map<ValueId, LossGradient> loss_gradients_;
  std::vector<LocalIndex> local_indices_;  // made in the forward part, used again in the backward part
  std::vector<Counted> counted_;
  std::map<std::string, int64_t> made_whole_;
  const Op* current_ = nullptr;
  Part part_ = Part::kForward;
};

}  // namespace interlace::tensor
