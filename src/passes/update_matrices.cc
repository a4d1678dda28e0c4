#include "passes/update_matrices.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "passes/update_ops.h"

namespace interlace {
namespace {

// Matrices of one form, at most one for each rank.
struct Round {
  std::vector<const MatrixUpdate*> matrices;
  ValueId stack = kNone;  // [ranks, part]: momentum on its way, or here, in bf16
  ValueId back = kNone;   // [ranks, part]: what the iterations gave, on its way or here
};

class Dealer : UpdateOps {
 public:
  Dealer(Program& program, Phase& phase, ValueId coef) : UpdateOps(program, phase), coef_(coef) {}

  Status Run(std::span<const MatrixUpdate> matrices, const std::function<void(const MatrixUpdate&)>& updated) {
    for (const MatrixUpdate& m : matrices) {
      const Orthogonal& how = HowOf(m);
      if (!HasRule(how.apply))
        return MakeError("group ", m.param->group, " applies its matrices by group ", how.apply, ", which has no rule");
    }
    std::vector<Round> rounds = Deal(matrices);
    if (!rounds.empty()) Send(rounds[0]);
    for (size_t i = 0; i < rounds.size(); ++i) {
      if (i + 1 < rounds.size()) Send(rounds[i + 1]);
      Iterate(rounds[i]);
      if (i > 0) Apply(rounds[i - 1], updated);
    }
    if (!rounds.empty()) Apply(rounds.back(), updated);
    return Ok{};
  }

 private:
  const Orthogonal& HowOf(const MatrixUpdate& m) const { return *program_.groups[m.param->group].orthogonal; }
  const Unit& UnitOf(const MatrixUpdate& m) const { return program_.units[m.unit]; }
  int64_t Count(const MatrixUpdate& m) const { return program_.value(m.grad).type.sizes[0].value; }
  int64_t Ranks(const MatrixUpdate& m) const { return program_.AxisSize(UnitOf(m).axis); }
  bool IsWhole(const MatrixUpdate& m) const { return Count(m) == UnitOf(m).numel; }

  bool Alike(const MatrixUpdate& a, const MatrixUpdate& b) const {
    const Orthogonal &x = HowOf(a), &y = HowOf(b);
    return a.rows == b.rows && a.columns == b.columns && UnitOf(a).axis == UnitOf(b).axis && Count(a) == Count(b) &&
           UnitOf(a).numel == UnitOf(b).numel && x.steps == y.steps && x.by == y.by && x.eps == y.eps;
  }

  std::vector<Round> Deal(std::span<const MatrixUpdate> matrices) const {
    std::vector<Round> rounds;
    for (const MatrixUpdate& m : matrices) {
      auto open = std::find_if(rounds.begin(), rounds.end(), [&](const Round& r) {
        return Alike(*r.matrices[0], m) && std::ssize(r.matrices) < Ranks(m);
      });
      if (open == rounds.end()) open = rounds.insert(rounds.end(), Round{});
      open->matrices.push_back(&m);
    }
    return rounds;
  }

  // ---- ops ----

  ValueId Cast(ValueId value, DType dtype) {
    Type type = program_.value(value).type;
    if (type.dtype == dtype) return value;
    type.dtype = dtype;
    return Aten("_to_copy", {Arg::Of(value)}, type, {{"dtype", Arg::Word(std::string(DTypeName(dtype)))}});
  }
  static Type Matrix(int64_t rows, int64_t columns, bool transposed = false) {
    Type type = FlatType(DType::kBF16, rows);
    type.sizes = {Dim(rows), Dim(columns)};
    type.strides = transposed ? std::vector<Dim>{Dim(1), Dim(rows)} : std::vector<Dim>{Dim(columns), Dim(1)};
    return type;
  }
  Op& Exchange(OpKind kind, ValueId value, const Unit& unit) {
    Op& start = Add(kind);
    start.args = {Arg::Of(value)};
    start.SetAttr("axis", Arg::Word(unit.axis));
    start.SetAttr("dim", Arg::Int(Dim(0)));
    if (kind == OpKind::kAllToAllStart) start.SetAttr("to", Arg::Int(Dim(0)));
    return start;
  }
  void Rule(const MatrixUpdate& m, int32_t group, std::vector<Arg> args, double scale) {
    const int64_t begin = m.param->unit_offset;
    UpdateOps::Rule(m.unit, begin, begin + m.rows * m.columns, group, std::move(args), scale);
  }

  // ---- a round ----

  // Momentum of all, and where ranks have parts, off to the rank that makes the matrix orthogonal.
  void Send(Round& round) {
    const MatrixUpdate& first = *round.matrices[0];
    const int64_t ranks = Ranks(first), count = Count(first);
    std::vector<Arg> rows;
    for (const MatrixUpdate* m : round.matrices) {
      Op& copy = Add(OpKind::kCopy);
      copy.args = {Arg::Of(m->grad)};
      const ValueId direction = program_.AddResult(copy, FlatType(UnitOf(*m).dtype, count));
      std::vector<Arg> args = {Arg::Of(direction), Arg::Of(m->grad), Arg::Of(m->momentum)};
      if (coef_ != kNone) args.push_back(Arg::Of(coef_));
      Rule(*m, m->param->group, std::move(args), m->scale);
      rows.push_back(Arg::Of(View(Cast(direction, DType::kBF16), Matrix(1, count))));
    }
    rows.resize(static_cast<size_t>(ranks), rows.back());
    round.stack = ranks == 1 ? rows[0].value : Aten("cat", {Arg::List(rows)}, Matrix(ranks, count));
    if (IsWhole(first)) return;
    Op& start = Exchange(OpKind::kAllToAllStart, round.stack, UnitOf(first));
    round.stack = program_.AddResult(start, Matrix(ranks, count));
  }

  // This rank's matrix, and off with the result.
  void Iterate(Round& round) {
    const MatrixUpdate& first = *round.matrices[0];
    const int64_t ranks = Ranks(first), count = Count(first);
    const bool whole = IsWhole(first);
    Dim own(0);
    if (!whole) {
      Add(OpKind::kAllToAllWait).args = {Arg::Of(round.stack)};
    } else if (ranks > 1) {
      own = program_.dims.Mul(Dim(count), program_.AxisRank(UnitOf(first).axis));
    }
    const ValueId matrix = View(round.stack, Matrix(first.rows, first.columns), own);
    const int64_t padded = whole ? count : ranks * count, elements = first.rows * first.columns;
    ValueId flat = View(Orthogonalized(matrix, first), FlatType(DType::kBF16, elements));
    if (padded > elements) {
      const Arg pad = Arg::List({Arg::Int(Dim(0)), Arg::Int(Dim(padded - elements))});
      flat = Aten("constant_pad_nd", {Arg::Of(flat), pad, Arg::Float(0)}, FlatType(DType::kBF16, padded));
    }
    round.back = View(flat, whole ? Matrix(1, count) : Matrix(ranks, count));
    if (ranks == 1) return;
    Op& start = Exchange(whole ? OpKind::kAllGatherStart : OpKind::kAllToAllStart, round.back, UnitOf(first));
    round.back = program_.AddResult(start, Matrix(ranks, count));
  }

  // torch.optim's, which works on the wider of a matrix and its transpose.
  ValueId Orthogonalized(ValueId matrix, const MatrixUpdate& m) {
    const Orthogonal& how = HowOf(m);
    const bool tall = m.rows > m.columns;
    const int64_t rows = std::min(m.rows, m.columns), columns = std::max(m.rows, m.columns);
    if (tall) matrix = View(matrix, Matrix(rows, columns, true));
    Type scalar = FlatType(DType::kBF16, 1);
    scalar.sizes.clear();
    scalar.strides.clear();
    ValueId norm = Aten("linalg_vector_norm", {Arg::Of(matrix)}, scalar);
    norm = Aten("clamp", {Arg::Of(norm), Arg::Float(how.eps)}, scalar);
    ValueId x = Aten("div.Tensor", {Arg::Of(matrix), Arg::Of(norm)}, Matrix(rows, columns, tall));
    bool transposed = tall;
    for (int64_t i = 0; i < how.steps; ++i) {
      const ValueId turned = View(x, Matrix(columns, rows, !transposed));
      const ValueId gram = Aten("mm", {Arg::Of(x), Arg::Of(turned)}, Matrix(rows, rows));
      const ValueId update = Aten("addmm", {Arg::Of(gram), Arg::Of(gram), Arg::Of(gram)}, Matrix(rows, rows),
                                  {{"beta", Arg::Float(how.by[1])}, {"alpha", Arg::Float(how.by[2])}});
      x = Aten("addmm", {Arg::Of(x), Arg::Of(update), Arg::Of(x)}, Matrix(rows, columns),
               {{"beta", Arg::Float(how.by[0])}});
      transposed = false;
    }
    if (transposed || !tall) return x;
    x = View(x, Matrix(columns, rows, true));
    return Aten("clone", {Arg::Of(x)}, Matrix(columns, rows), {{"memory_format", Arg::Word("contiguous")}});
  }

  void Apply(Round& round, const std::function<void(const MatrixUpdate&)>& updated) {
    const MatrixUpdate& first = *round.matrices[0];
    const int64_t count = Count(first);
    if (Ranks(first) > 1) {
      Add(IsWhole(first) ? OpKind::kAllGatherWait : OpKind::kAllToAllWait).args = {Arg::Of(round.back)};
    }
    for (size_t i = 0; i < round.matrices.size(); ++i) {
      const MatrixUpdate& m = *round.matrices[i];
      const DType dtype = UnitOf(m).dtype;
      ValueId step = View(round.back, FlatType(DType::kBF16, count), Dim(static_cast<int64_t>(i) * count));
      step = Cast(step, dtype);
      if (const double ratio = Ratio(m); ratio != 1)
        step = Aten("mul.Tensor", {Arg::Of(step), Arg::Float(ratio)}, FlatType(dtype, count));
      Rule(m, HowOf(m).apply, {Arg::Of(m.weights), Arg::Of(step)}, 1);
      updated(m);
    }
  }

  double Ratio(const MatrixUpdate& m) const {
    const auto rows = static_cast<double>(m.rows), columns = static_cast<double>(m.columns);
    const std::string& ratio = HowOf(m).ratio;
    if (ratio == "original") return std::sqrt(std::max(1.0, rows / columns));
    return ratio == "match_rms_adamw" ? 0.2 * std::sqrt(std::max(rows, columns)) : 1;
  }

  const ValueId coef_;
};

}  // namespace

Status AddMatrixUpdates(Program& program, Phase& phase, std::span<const MatrixUpdate> matrices, ValueId coef,
                        const std::function<void(const MatrixUpdate&)>& updated) {
  return Dealer(program, phase, coef).Run(matrices, updated);
}

}  // namespace interlace
