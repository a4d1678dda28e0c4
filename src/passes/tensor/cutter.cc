#include "passes/tensor/cutter.h"

#include <algorithm>
#include <limits>
#include <set>

#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/phase_editor.h"
#include "passes/tensor/plan.h"
#include "passes/tensor/special.h"

namespace interlace::tensor {
namespace {

using Kind = Placement::Kind;
constexpr double kImpossible = std::numeric_limits<double>::infinity();
constexpr double kParameter = 1e6;  // a parameter is cut to stay so: times its bytes to gather it for one op
constexpr double kColumns = 64;  // what products made is not gathered where rows that several need are gathered again
constexpr double kAgain = 1e-3;  // times the bytes of results that every rank makes whole, to break ties

}  // namespace

Cutter::Cutter(Program& program, Phase& phase, const CutterOptions& options, const Facts* facts)
    : program_(program),
      phase_(phase),
      options_(options),
      sizes_(program, options.axis, options.sample),
      ranks_(sizes_.ranks()),
      facts_(facts != nullptr
                 ? *facts
                 : own_facts_.emplace(FactsOf(program, phase, [&](Dim dim) { return sizes_.Number(dim); }))),
      geometry_(facts_.layout.geometry) {
  placement_.resize(facts_.layout.geometry.size());
  unseen_.resize(placement_.size());
}

const std::vector<ValueId>& Cutter::ViewsOf(ValueId root) const {
  static const std::vector<ValueId> none;
  const auto found = seen_as_.find(root);
  const auto at = static_cast<size_t>(found == seen_as_.end() ? root : found->second);
  return at < facts_.layout.views.size() ? facts_.layout.views[at] : none;
}

Status Cutter::CutParam(Param& param, int64_t dim, int64_t blocks) {
  const Geometry& geometry = geometry_[param.value];
  const auto rank = static_cast<int64_t>(geometry.sizes.size());
  if (dim >= rank)
    return MakeError("'", param.name, "' has ", rank, " dimensions, so there is no dimension ", dim, " to cut");
  const DimCut cut{static_cast<int32_t>(dim), blocks};
  const std::optional<int64_t> period = PeriodOf(geometry, cut, ranks_);
  if (!period || !IsDense(geometry) || program_.RootOf(param.value) != param.value) {
    return Error{DoesNotDivide(param.name, dim, geometry.sizes[dim], blocks, ranks_), ""};
  }
  placement_[param.value] = {Kind::kCut, *period};
  Apply(param.value);
  param.cuts.push_back({options_.axis, dim, blocks});
  return Ok{};
}

void Cutter::CutInput(ValueId input) {
  row_inputs_[input] = geometry_[input].numel();
}

Status Cutter::CutActivation(const std::string& name, int64_t dim) {
  activations_[name] = static_cast<int32_t>(dim);
  for (const Input& input : program_.inputs) {
    if (input.name != name) continue;
    const Geometry& geometry = geometry_[input.value];
    const bool has = dim < static_cast<int64_t>(geometry.sizes.size());
    const DimCut cut{static_cast<int32_t>(dim), 1};
    const std::optional<int64_t> period = has ? PeriodOf(geometry, cut, ranks_) : std::nullopt;
    if (!period || !IsDense(geometry))
      return MakeError("input '", name, "' cannot be cut along dimension ", dim, " into ", ranks_, " equal parts");
    placement_[input.value] = {Kind::kCut, *period};
    Apply(input.value);
  }
  return Ok{};
}

Status Cutter::Run() {
  for (OpId id : Begin()) INTERLACE_TRY(Step(id));
  return End();
}

std::vector<OpId> Cutter::Begin() {
  std::vector<OpId> old = std::move(phase_.ops);
  phase_.ops.clear();
  FindGradientsOfRows(old);
  return old;
}

Status Cutter::Step(OpId id) {
  const Op& op = Read(id);
  if (op.part == Part::kBackward && part_ != Part::kBackward) {
    part_ = Part::kBackward;
    if (options_.regather) ForgetGathered();
  }
  current_ = &op;
  Status done = Visit(id);
  if (done.ok()) return done;
  Error error = done.error();
  error.where = PrintOp(program_, program_.op(id));
  return error;
}

void Cutter::AppendState(ValueId root, std::vector<int64_t>& out) const {
  out.push_back(static_cast<int64_t>(placement_[root].kind));
  out.push_back(placement_[root].period);
  for (auto copy = copies_.lower_bound({root, 0}); copy != copies_.end() && copy->first.first == root; ++copy) {
    out.push_back(copy->first.second);
    AppendState(copy->second, out);
  }
  out.push_back(kNone);
}

// Sums stay: they would keep their parts.
void Cutter::ForgetGathered() {
  std::erase_if(copies_, [&](const auto& entry) { return !placement_[entry.first.first].is_sum(); });
}

// What is handed over as such a gradient, and what is added up to it.
void Cutter::FindGradientsOfRows(const std::vector<OpId>& ops) {
  rows_gradients_.assign(static_cast<size_t>(program_.num_values()), false);
  gradients_.assign(static_cast<size_t>(program_.num_values()), false);
  for (auto id = ops.rbegin(); id != ops.rend(); ++id) {
    const Op& op = Read(*id);
    if (op.kind == OpKind::kGrad) {
      const std::optional<DimCut> cut = CutOf(op.args[0].value);
      if (cut && cut->dim == 0 && cut->blocks == 1) rows_gradients_[op.args[1].value] = true;
      if (!cut) gradients_[program_.RootOf(op.args[1].value)] = true;
    } else if (BaseName(op.name) == "aten.add" && rows_gradients_[op.results[0]]) {
      ForEachOperand(op, [&](ValueId operand) { rows_gradients_[operand] = true; });
    }
  }
}

Status Cutter::Visit(OpId id) {
  const Op& op = Read(id);
  const bool views = op.kind == OpKind::kView || IsPureView(program_, op);
  if (views) return View(id), Ok{};
  if (op.kind == OpKind::kGrad) return Grad(id), Ok{};
  for (ValueId written : WrittenOperands(program_, op)) {
    if (!PlacementOf(written).is_whole())
      return MakeError("%", written, " is cut over the ranks of axis ", options_.axis, " and written in place");
  }
  const bool sent = op.kind == OpKind::kCopy && op.Attr("message") != nullptr;  // to another stage (pass `borders`)
  if (sent || (IsOwn(op) && op.kind != OpKind::kCopy)) {                        // output, assign, opaque modules
    const Arg* name = op.kind == OpKind::kOutput ? op.Attr("name") : nullptr;
    const auto cut = name == nullptr ? activations_.end() : activations_.find(name->text);
    ForEachOperand(program_.op(id), [&](ValueId& v) {
      v = cut == activations_.end() ? AsWhole(v) : AsPart(v, {cut->second, 1});
    });
    phase_.ops.push_back(id);
    return Ok{};
  }
  Special special(*this);
  INTERLACE_ASSIGN(const bool done, special.Visit(id));
  if (!done) INTERLACE_TRY(Generic(id));
  if (!options_.sums_behind) SumGradients(Read(id));
  return Ok{};
}

void Cutter::View(OpId id) {
  const Op& op = Read(id);
  bool any = false;
  for (ValueId result : op.results) {
    if (result == kNone) continue;
    Apply(result);
    any = any || !unseen_[result];
  }
  if (any) phase_.ops.push_back(id);
}

// Gives a value the geometry that a rank's part of its storage has.
void Cutter::Apply(ValueId id) {
  const Placement& placement = PlacementOf(id);
  if (!placement.is_cut()) return;
  const std::optional<DimCut> cut = CutOf(id);
  if (!cut) {
    unseen_[id] = true;
    return;
  }
  sizes_.WritePart(geometry_[id], *cut, placement.period, program_.value(id));
}

std::optional<DimCut> Cutter::CutOf(ValueId id) const {
  const Placement& placement = PlacementOf(id);
  if (!placement.is_cut()) return std::nullopt;
  return CutOfView(geometry_[id], placement.period, ranks_);
}

// Of all ways to cut the outer dimensions of a storage the coarsest that all its views can show.
int64_t Cutter::RowPeriod(ValueId root) const {
  const Geometry& own = geometry_[root];
  if (!options_.sequence || !IsDense(own)) return 0;
  std::set<int64_t, std::greater<>> periods;
  const std::vector<ValueId>& views = ViewsOf(root);
  for (ValueId view : views) {
    const Geometry& g = geometry_[view];
    for (size_t d = 0; d < g.sizes.size(); ++d) {
      if (g.sizes[d] > 1 && g.strides[d] > 1) periods.insert(g.sizes[d] * g.strides[d]);
    }
  }
  for (int64_t period : periods) {
    if (period % ranks_ != 0 || own.numel() % period != 0) continue;
    const bool shown = std::all_of(views.begin(), views.end(), [&](ValueId view) {
      const std::optional<DimCut> cut = CutOfView(geometry_[view], period, ranks_);
      return cut && geometry_[view].strides[cut->dim] > 1;
    });
    if (shown) return period;
  }
  return 0;
}

// ---- ways ----

std::optional<DimCut> Cutter::CutIn(const std::vector<int32_t>& dims, const Way& way) const {
  if (way.factor == kWholeDim) return std::nullopt;
  auto it = std::find(dims.begin(), dims.end(), way.factor);
  if (it == dims.end()) return std::nullopt;
  return DimCut{static_cast<int32_t>(it - dims.begin()), way.blocks};
}

std::vector<Cutter::Way> Cutter::WaysOf(const Op& op, const Rule& rule, const std::vector<ValueId>& operands) {
  std::vector<Way> ways;
  const bool looked_up = options_.regather && op.name == "aten.embedding" && operands.size() > 1 &&
                         std::as_const(program_).value(program_.RootOf(operands[1])).kind == ValueKind::kInput;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Placement& placement = PlacementOf(operands[i]);
    std::optional<DimCut> cut = CutOf(operands[i]);
    // A table that is whole would make all rows whole, which costs no transfer; but the backward part keeps them.
    if (looked_up && i == 1 && placement.is_whole()) {
      if (int64_t period = RowPeriod(op.results[0]); period > 0)
        cut = CutOfView(geometry_[op.results[0]], period, ranks_);
    }
    if (auto input = row_inputs_.find(program_.RootOf(operands[i])); input != row_inputs_.end())
      cut = CutOfView(geometry_[operands[i]], input->second, ranks_);
    const Geometry& own = geometry_[operands[i]];
    if (options_.rows > 1 && !own.sizes.empty() && own.sizes[0] == options_.rows && own.strides[0] == 0) cut = DimCut{};
    if (placement.is_sum()) {
      if (int64_t period = RowPeriod(program_.RootOf(operands[i])); period > 0)
        cut = CutOfView(geometry_[operands[i]], period, ranks_);
    }
    if (!cut || rule.operands[i].empty()) continue;
    const int32_t factor = rule.operands[i][cut->dim];
    if (factor == kWholeDim) continue;
    const bool known = std::any_of(ways.begin(), ways.end(),
                                   [&](const Way& w) { return w.factor == factor && w.blocks == cut->blocks; });
    if (!known) ways.push_back({factor, cut->blocks});
  }
  ways.push_back({});
  for (Way& way : ways) way.cost = CostOf(op, rule, operands, way);
  return ways;
}

double Cutter::CostOf(const Op& op, const Rule& rule, const std::vector<ValueId>& operands, const Way& way) {
  double cost = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const std::optional<DimCut> cut = CutIn(rule.operands[i], way);
    if (!cut && IsUnread(rule, operands[i])) continue;
    cost += CostOf(operands[i], cut ? &*cut : nullptr);
  }
  for (size_t i = 0; i < op.results.size(); ++i) {
    const ValueId result = op.results[i];
    if (result == kNone) continue;
    if (program_.RootOf(result) != result) return way.factor == kWholeDim ? cost : kImpossible;
    if (std::optional<DimCut> cut = CutIn(rule.results[i], way)) {
      cut->blocks *= rule.joins[way.factor];
      if (!IsDense(geometry_[result]) || !PeriodOf(geometry_[result], *cut, ranks_)) return kImpossible;
    } else if (way.factor == kWholeDim) {  // every rank computes all of it
      cost += kAgain * static_cast<double>(geometry_[result].bytes()) +
              (ranks_ - 1) * FlopsOf(op) / ranks_ / options_.flops_per_byte;
    } else if (options_.sums_cost) {  // a sum that is made later
      cost += static_cast<double>(geometry_[result].bytes()) * (ranks_ - 1) / ranks_;
    }
  }
  return cost;
}

// Whether an operand may be what it is: no element of it is read, nor its sizes.
bool Cutter::IsUnread(const Rule& rule, ValueId operand) const {
  const Placement& placement = PlacementOf(operand);
  return rule.shape_only && (placement.is_sum() || (rule.sizes.empty() && placement.is_cut() && !unseen_[operand]));
}

double Cutter::FlopsOf(const Op& op) const {
  const std::string_view name = BaseName(op.name);
  const bool biased = name == "aten.addmm";
  if (!biased && name != "aten.mm" && name != "aten.bmm") return 0;
  const Geometry& a = geometry_[op.args[biased ? 1 : 0].value];
  return 2.0 * static_cast<double>(geometry_[op.results[0]].numel()) * static_cast<double>(a.sizes.back());
}

// Bytes that a rank sends or receives to have an operand whole (nullptr) or cut so.
double Cutter::CostOf(ValueId operand, const DimCut* cut) {
  const ValueId root = program_.RootOf(operand);
  const Placement& placement = placement_[root];
  const double bytes = static_cast<double>(geometry_[root].bytes()) * (ranks_ - 1) / ranks_;
  const bool gathered = copies_.count({root, 0}) != 0;
  double times = std::as_const(program_).value(root).kind == ValueKind::kParam ? kParameter : 1;
  const std::optional<DimCut> columns = options_.regather ? CutOf(operand) : std::nullopt;
  if (columns && geometry_[operand].strides[columns->dim] == 1) times *= kColumns;
  if (cut == nullptr) {
    if (placement.is_whole() || gathered) return 0;
    return placement.is_sum() ? 2 * bytes : times * bytes;
  }
  const int64_t size = geometry_[operand].sizes[cut->dim];
  if (size % cut->blocks != 0 || size / cut->blocks % ranks_ != 0) return kImpossible;
  if (placement.is_whole()) return 0;
  if (geometry_[operand].strides[cut->dim] == 0 && placement.is_cut()) return CostOf(operand, nullptr);
  const std::optional<int64_t> period = PeriodOf(geometry_[operand], *cut, ranks_);
  if (placement.is_cut() && period == placement.period) return 0;
  if (period && copies_.count({root, *period}) != 0) return 0;
  if (gathered) return 0;
  if (placement.is_sum()) return period && IsDense(geometry_[root]) ? bytes : 2 * bytes;
  return times * bytes;
}

// ---- generic ops ----

Status Cutter::Generic(OpId id) {
  const Op& op = Read(id);
  const std::vector<ValueId> operands = OperandValues(op);
  const bool as_it_was = static_cast<size_t>(id) < facts_.rules.size() && op.name == facts_.names[id];
  std::optional<Rule> anew;
  const Rule& rule = as_it_was ? facts_.rules[id]
                               : anew.emplace(RuleOf(op, [&](ValueId v) -> const Geometry& { return geometry_[v]; }));
  const bool sums = std::any_of(rule.linear.begin(), rule.linear.end(),
                                [&](const std::vector<bool>& set) { return StaysSum(operands, set); });
  if (sums) {  // one sum over ranks for all of them
    phase_.ops.push_back(id);
    for (ValueId result : op.results) {
      if (result != kNone) placement_[result] = {Kind::kSum, 0};
    }
    return Ok{};
  }
  const std::vector<Way> ways = WaysOf(op, rule, operands);
  const Way way =
      *std::min_element(ways.begin(), ways.end(), [](const Way& a, const Way& b) { return a.cost < b.cost; });
  if (!rule.known) {
    for (ValueId operand : operands) {
      if (!PlacementOf(operand).is_whole()) made_whole_[op.name] += geometry_[operand].bytes();
    }
  }
  const bool biased = BaseName(op.name) == "aten.addmm" && way.factor != kWholeDim && !CutIn(rule.results[0], way);
  if (!biased) return Carry(id, rule, way), Ok{};
  // The bias is added once, to the sum: %p = mm(a, b), then add(%p, bias).
  Op& product = program_.op(id);
  const ValueId result = product.results[0];
  const Arg bias = product.args[0];
  product.SetName("aten.mm");
  product.args.erase(product.args.begin());
  const ValueId partial = program_.AddResult(product, sizes_.TypeOf(geometry_[result]));
  product.results = {partial};
  Know(partial, geometry_[result]);
  seen_as_[partial] = result;  // later on, as whom its rows are seen
  INTERLACE_TRY(Generic(id));
  Op& add = AddLike(program_, program_.op(id), "aten.add.Tensor");
  add.args = {Arg::Of(partial), bias};
  add.results = {result};
  program_.value(result).def = add.id;
  current_ = &add;
  return Generic(add.id);
}

void Cutter::Carry(OpId id, const Rule& rule, const Way& way) {
  size_t i = 0;
  std::vector<ValueId> fitted;
  const std::vector<ValueId> operands = OperandValues(Read(id));
  for (ValueId operand : operands) {
    const std::optional<DimCut> cut = CutIn(rule.operands[i++], way);
    if (cut) {
      fitted.push_back(AsPart(operand, *cut));
    } else if (IsUnread(rule, operand)) {
      fitted.push_back(operand);
    } else {
      fitted.push_back(AsWhole(operand));
    }
  }
  i = 0;
  if (fitted != operands) ForEachOperand(program_.op(id), [&](ValueId& v) { v = fitted[i++]; });
  PlaceResults(Read(id), rule, way);
  phase_.ops.push_back(id);
}

void Cutter::PlaceResults(const Op& op, const Rule& rule, const Way& way) {
  for (size_t i = 0; i < op.results.size(); ++i) {
    const ValueId result = op.results[i];
    if (result == kNone || program_.RootOf(result) != result || way.factor == kWholeDim) continue;
    if (std::optional<DimCut> cut = CutIn(rule.results[i], way)) {
      cut->blocks *= rule.joins[way.factor];
      placement_[result] = {Kind::kCut, *PeriodOf(geometry_[result], *cut, ranks_)};
      Apply(result);
    } else {
      placement_[result] = {Kind::kSum, 0};
    }
  }
  auto sizes = [&](int32_t argument, size_t result) {
    if (argument < 0 || static_cast<size_t>(argument) >= op.args.size() || op.results.size() <= result) return;
    if (op.results[result] == kNone || op.args[argument].kind != Arg::Kind::kList) return;
    std::vector<Arg> list;
    for (const Dim& size : std::as_const(program_).value(op.results[result]).type.sizes) list.push_back(Arg::Int(size));
    Arg sizes = Arg::List(std::move(list));
    if (!(op.args[argument] == sizes)) program_.op(op.id).args[argument] = std::move(sizes);
  };
  sizes(rule.sizes_argument, 0);
  sizes(rule.bias_sizes, 2);
}

}  // namespace interlace::tensor
