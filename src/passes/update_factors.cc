#include "passes/update_factors.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "passes/update_ops.h"

namespace interlace {
namespace {

constexpr int64_t kRoundElements = int64_t{1} << 22;  // of this rank, whose updates are in memory at a time

// A parameter on its way.
struct Step {
  const FactoredUpdate* m = nullptr;
  UnitId row_unit = kNone, column_unit = kNone;
  ValueId row_state = kNone, column_state = kNone;  // of a matrix
  ValueId variance = kNone;                         // of a vector
  ValueId gradient = kNone, update = kNone;         // this rank's elements
  ValueId weight_square = kNone, row_squares = kNone, column_squares = kNone, update_square = kNone;  // sums
};

// How a rank's elements of a matrix lie in spans, which are rows, or matrices where there are several: from `lead` in
// the span `place` on, over at most `count` spans. All numbers are 0 and whole where a rank has everything.
struct Spans {
  int64_t count = 0, all = 0;               // all: that any rank's spans reach to
  int64_t batches = 0, rows = 0;            // of this rank's spans, as matrices
  int64_t rows_each = 0, columns_each = 0;  // sums over rows and columns that one span further is
  int64_t row_sums = 0, column_sums = 0;    // of all
  Dim lead = Dim(0), place = Dim(0);
};

class Factoring : UpdateOps {
 public:
  Factoring(Program& program, Phase& phase, ValueId coef) : UpdateOps(program, phase), coef_(coef) {}

  Status Run(std::span<const FactoredUpdate> updates, const std::function<void(const FactoredUpdate&)>& updated) {
    std::vector<Step> steps;
    for (const FactoredUpdate& m : updates) {
      for (const int32_t group : {HowOf(m).average, HowOf(m).apply}) {
        if (!HasRule(group))
          return MakeError("group ", m.param->group, " makes a part of its step by group ", group,
                           ", which has no rule");
      }
      steps.push_back(WithStates(m));
    }
    for (size_t begin = 0, end = 0; begin < steps.size(); begin = end) {
      for (int64_t elements = 0; end < steps.size() && (end == begin || elements <= kRoundElements) &&
                                 Travels(*steps[end].m) == Travels(*steps[begin].m) &&
                                 UnitOf(*steps[end].m).axis == UnitOf(*steps[begin].m).axis &&
                                 UnitOf(*steps[end].m).dtype == UnitOf(*steps[begin].m).dtype;
           ++end)
        elements += Count(*steps[end].m);
      const std::span<Step> round(steps.data() + begin, end - begin);
      for (Step& step : round) Squares(step);
      Reduce(round, {&Step::weight_square, &Step::row_squares, &Step::column_squares});
      for (Step& step : round) Divide(step);
      Reduce(round, {&Step::update_square});
      for (Step& step : round) {
        Apply(step);
        updated(*step.m);
      }
    }
    return Ok{};
  }

 private:
  const Factored& HowOf(const FactoredUpdate& m) const { return *program_.groups[m.param->group].factored; }
  const Unit& UnitOf(const FactoredUpdate& m) const { return program_.units[m.unit]; }
  int64_t Count(const FactoredUpdate& m) const { return program_.value(m.grad).type.sizes[0].value; }
  int64_t Elements(const FactoredUpdate& m) const { return m.batches * std::max<int64_t>(m.rows, 1) * m.columns; }
  bool Travels(const FactoredUpdate& m) const { return Count(m) != UnitOf(m).numel; }
  Type Flat(const FactoredUpdate& m, int64_t count) const { return FlatType(UnitOf(m).dtype, count); }
  Type Cube(const FactoredUpdate& m, int64_t a, int64_t b, int64_t c) const {
    Type type = Flat(m, a * b * c);
    type.sizes = {Dim(a), Dim(b), Dim(c)};
    type.strides = {Dim(b * c), Dim(c), Dim(1)};
    return type;
  }
  Type Plane(const FactoredUpdate& m, int64_t a, int64_t b) const {
    Type type = Flat(m, a * b);
    type.sizes = {Dim(a), Dim(b)};
    type.strides = {Dim(b), Dim(1)};
    return type;
  }

  // ---- states ----

  Step WithStates(const FactoredUpdate& m) {
    Step step{.m = &m};
    if (m.rows == 0) {
      step.variance = program_.AddState(m.unit, "variance", program_.value(m.grad).type, /*persistent=*/true);
      return step;
    }
    std::tie(step.row_unit, step.row_state) = Average(m, "row_var_of_u", m.batches * m.rows);
    std::tie(step.column_unit, step.column_state) = Average(m, "col_var_of_u", m.batches * m.columns);
    return step;
  }

  std::pair<UnitId, ValueId> Average(const FactoredUpdate& m, const std::string& role, int64_t count) {
    Unit unit = UnitOf(m);
    const int64_t step = kUnitAlignment * program_.AxisSize(unit.axis);
    unit.id = static_cast<UnitId>(program_.units.size());
    unit.numel = (count + step - 1) / step * step;
    unit.shard = unit.numel / program_.AxisSize(unit.axis);
    const Type type = FlatType(unit.dtype, unit.numel);
    program_.units.push_back(unit);
    return {unit.id, program_.AddState(unit.id, role + std::to_string(m.unit), type, /*persistent=*/true)};
  }

  // ---- ops ----

  // Zeros before and behind a flat value.
  ValueId Padded(const FactoredUpdate& m, ValueId value, int64_t length, Dim before = Dim(0)) {
    const int64_t count = program_.value(value).type.sizes[0].value;
    if (count == length) return value;
    const Arg pad = Arg::List({Arg::Int(before), Arg::Int(program_.dims.Sub(Dim(length - count), before))});
    return Aten("constant_pad_nd", {Arg::Of(value), pad, Arg::Float(0)}, Flat(m, length));
  }
  // Of a dimension, or of all.
  ValueId SumOfSquares(ValueId value, Type type, std::optional<int64_t> dim = std::nullopt) {
    std::vector<Arg> args = {Arg::Of(value)};
    if (dim) args.insert(args.end(), {Arg::Float(2), Arg::List({Arg::Int(Dim(*dim))})});
    const ValueId norm = Aten("linalg_vector_norm", std::move(args), type);
    return Aten("mul.Tensor", {Arg::Of(norm), Arg::Of(norm)}, type);
  }
  ValueId SumOfSquares(const FactoredUpdate& m, ValueId value) {
    Type scalar = Flat(m, 1);
    scalar.sizes.clear();
    scalar.strides.clear();
    return View(SumOfSquares(value, scalar), Flat(m, 1));
  }
  // 1 / sqrt(max(value, eps^2)), in the type that the value has.
  ValueId InverseRoot(const FactoredUpdate& m, ValueId value) {
    const Type type = program_.value(value).type;
    const double eps = HowOf(m).eps[0];
    value = Aten("clamp", {Arg::Of(value), Arg::Float(eps * eps)}, type);
    return Aten("rsqrt", {Arg::Of(value)}, type);
  }

  Spans SpansOf(const FactoredUpdate& m) {
    Spans s{.count = m.batches,
            .all = m.batches,
            .batches = m.batches,
            .rows = m.rows,
            .rows_each = m.rows,
            .columns_each = m.columns};
    if (Travels(m)) {
      const bool several = m.batches > 1;
      const int64_t span = several ? m.rows * m.columns : m.columns, count = Count(m);
      const int64_t ranks = program_.AxisSize(UnitOf(m).axis);
      s.count = (count + span - 1) / span + 1;
      s.all = (ranks - 1) * count / span + s.count;
      s.rows_each = several ? m.rows : 1;
      s.columns_each = several ? m.columns : 0;
      s.batches = several ? s.count : 1;
      s.rows = several ? m.rows : s.count;
      const Dim begin = program_.dims.Mul(Dim(count), program_.AxisRank(UnitOf(m).axis));
      s.lead = program_.dims.Mod(begin, Dim(span));
      s.place = program_.dims.FloorDiv(begin, Dim(span));
    }
    s.row_sums = std::max(s.all * s.rows_each, m.batches * m.rows);
    s.column_sums = std::max(s.all * s.columns_each, m.batches * m.columns);
    return s;
  }

  // ---- a parameter ----

  void Squares(Step& step) {
    const FactoredUpdate& m = *step.m;
    Op& copy = Add(OpKind::kCopy);
    copy.args = {Arg::Of(m.grad)};
    step.gradient = program_.AddResult(copy, Flat(m, Count(m)));
    std::vector<Arg> args = {Arg::Of(step.gradient), Arg::Of(m.grad)};
    if (coef_ != kNone) args.push_back(Arg::Of(coef_));
    Rule(m.unit, 0, Elements(m), m.param->group, std::move(args), m.scale);
    step.weight_square = SumOfSquares(m, m.weights);
    if (m.rows == 0) return;
    const Spans s = SpansOf(m);
    ValueId laid = step.gradient;
    if (Travels(m)) laid = Padded(m, laid, s.batches * s.rows * m.columns, s.lead);
    laid = View(laid, Cube(m, s.batches, s.rows, m.columns));
    const ValueId rows = SumOfSquares(laid, Plane(m, s.batches, s.rows), 2);
    const ValueId columns = SumOfSquares(laid, Plane(m, s.batches, m.columns), 1);
    const auto placed = [&](ValueId value, int64_t count, int64_t each, int64_t length) {
      return Padded(m, View(value, Flat(m, count)), length, program_.dims.Mul(s.place, Dim(each)));
    };
    step.row_squares = placed(rows, s.batches * s.rows, s.rows_each, Room(step.row_unit, s.row_sums));
    step.column_squares = placed(columns, s.batches * m.columns, s.columns_each, Room(step.column_unit, s.column_sums));
  }
  int64_t Room(UnitId unit, int64_t sums) const { return std::max(program_.units[unit].numel, sums); }

  // Adds up what the ranks have of these sums, of all parameters of a round at once.
  void Reduce(std::span<Step> round, std::initializer_list<ValueId Step::*> sums) {
    const FactoredUpdate& first = *round[0].m;
    if (!Travels(first)) return;
    std::vector<Arg> parts;
    int64_t total = 0;
    for (const Step& step : round) {
      for (const auto sum : sums) {
        if (step.*sum == kNone) continue;
        parts.push_back(Arg::Of(step.*sum));
        total += program_.value(step.*sum).type.sizes[0].value;
      }
    }
    ValueId all = Aten("cat", {Arg::List(std::move(parts))}, Flat(first, total));
    for (const std::string_view axis : AxesOf(std::string_view(UnitOf(first).axis))) {
      if (program_.AxisSize(axis) > 1) all = SumOver(axis, all);
    }
    int64_t at = 0;
    for (Step& step : round) {
      for (const auto sum : sums) {
        if (step.*sum == kNone) continue;
        const int64_t count = program_.value(step.*sum).type.sizes[0].value;
        step.*sum = View(all, Flat(first, count), Dim(at));
        at += count;
      }
    }
  }

  void Divide(Step& step) {
    const FactoredUpdate& m = *step.m;
    const ValueId inverse = m.rows == 0 ? OfVector(step) : OfMatrix(step);
    step.update = Aten("mul.Tensor", {Arg::Of(inverse), Arg::Of(step.gradient)}, Flat(m, Count(m)));
    step.update_square = SumOfSquares(m, step.update);
  }

  ValueId OfVector(const Step& step) {
    const FactoredUpdate& m = *step.m;
    const ValueId square = Aten("mul.Tensor", {Arg::Of(step.gradient), Arg::Of(step.gradient)}, Flat(m, Count(m)));
    Rule(m.unit, 0, Elements(m), HowOf(m).average, {Arg::Of(step.variance), Arg::Of(square)}, 1);
    return InverseRoot(m, step.variance);
  }

  ValueId OfMatrix(const Step& step) {
    const FactoredUpdate& m = *step.m;
    const auto average = [&](UnitId unit, ValueId state, ValueId sums, int64_t count, int64_t of) {
      const ValueId head = View(sums, Flat(m, program_.units[unit].numel));
      Rule(unit, 0, count, HowOf(m).average, {Arg::Of(state), Arg::Of(head)}, 1 / static_cast<double>(of));
    };
    average(step.row_unit, step.row_state, step.row_squares, m.batches * m.rows, m.columns);
    average(step.column_unit, step.column_state, step.column_squares, m.batches * m.columns, m.rows);
    const Type by_rows = Cube(m, m.batches, m.rows, 1), each = Cube(m, m.batches, 1, 1);
    ValueId rows = View(step.row_state, by_rows), columns = step.column_state;
    ValueId mean = Aten("mean.dim", {Arg::Of(rows), Arg::List({Arg::Int(Dim(1))}), Arg::Bool(true)}, each);
    mean = Aten("clamp", {Arg::Of(mean), Arg::Float(HowOf(m).eps[0])}, each);
    rows = View(Aten("div.Tensor", {Arg::Of(rows), Arg::Of(mean)}, by_rows), Flat(m, m.batches * m.rows));
    const Spans s = SpansOf(m);
    if (Travels(m)) {
      rows = Padded(m, rows, s.row_sums);
      if (m.batches > 1) columns = Padded(m, View(columns, Flat(m, m.batches * m.columns)), s.column_sums);
    }
    const auto part = [&](ValueId value, Type type, int64_t step_each) {
      return View(value, std::move(type), program_.dims.Mul(s.place, Dim(step_each)));
    };
    rows = part(rows, Cube(m, s.batches, s.rows, 1), s.rows_each);
    columns = part(columns, Cube(m, s.batches, 1, m.columns), s.columns_each);
    ValueId square = Aten("mul.Tensor", {Arg::Of(rows), Arg::Of(columns)}, Cube(m, s.batches, s.rows, m.columns));
    square = InverseRoot(m, square);
    if (Travels(m)) return View(square, Flat(m, Count(m)), s.lead);
    return Padded(m, View(square, Flat(m, Elements(m))), Count(m));
  }

  void Apply(Step& step) {
    const FactoredUpdate& m = *step.m;
    const double root = std::sqrt(static_cast<double>(Elements(m)));
    const auto rms = [&](ValueId square, double by, double least) {
      ValueId value = Aten("sqrt", {Arg::Of(square)}, Flat(m, 1));
      value = Aten("mul.Tensor", {Arg::Of(value), Arg::Float(1 / by)}, Flat(m, 1));
      return Aten("clamp", {Arg::Of(value), Arg::Float(least)}, Flat(m, 1));
    };
    const ValueId of_weights = rms(step.weight_square, root, HowOf(m).eps[1]);
    const ValueId of_update = rms(step.update_square, root * HowOf(m).clip, 1);
    const ValueId factor = Aten("div.Tensor", {Arg::Of(of_weights), Arg::Of(of_update)}, Flat(m, 1));
    const ValueId change = Aten("mul.Tensor", {Arg::Of(step.update), Arg::Of(factor)}, Flat(m, Count(m)));
    Rule(m.unit, 0, Elements(m), HowOf(m).apply, {Arg::Of(m.weights), Arg::Of(change)}, 1);
  }

  const ValueId coef_;
};

}  // namespace

Status AddFactoredUpdates(Program& program, Phase& phase, std::span<const FactoredUpdate> updates, ValueId coef,
                          const std::function<void(const FactoredUpdate&)>& updated) {
  return Factoring(program, phase, coef).Run(updates, updated);
}

}  // namespace interlace
