#include "passes/tensor/rules.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "base/scan.h"

namespace interlace::tensor {
namespace {

enum class Form : uint8_t {
  kSpec,       // letters are factors, "_" a whole dimension; an operand with fewer dimensions has the last letters
  kPointwise,  // with broadcasting, dimensions counted from the back
  kReduce,     // of the dimensions in argument `at`; keepdim behind it
  kAllBut,     // pointwise but for the dimension in argument `at`
  kNorm,       // layer norm and its backward: leading dimensions; weights are whole
  kCat,
  kPad,
  kSelectBackward,
  kRows,  // whole rows are moved along one dimension: (x[n,...], [index], ...); the others
  kEmbedding,
  kEmbeddingBackward,
  kNoOperands  // operands are not read and results have sizes of their own
};

struct Row {
  Form form;
  std::string_view spec = "";
  int32_t at = 1;
  std::string_view linear = "";  // sets of arguments: "0|1" in either, "12" in both together
  bool shape_only = false;
  int32_t sizes_argument = -1, bias_sizes = -1;
};

constexpr std::string_view kPointwiseNames =
    "pow rsqrt sqrt exp log log1p expm1 abs sign reciprocal square relu gelu silu sigmoid "
    "tanh elu leaky_relu softplus hardtanh hardswish hardsigmoid mish erf sin cos tan atan maximum "
    "minimum clamp clamp_min clamp_max eq ne lt le gt ge logical_and logical_or logical_not "
    "logical_xor bitwise_and bitwise_or bitwise_not fill addcmul addcdiv lerp remainder "
    "fmod floor_divide floor ceil round trunc isnan isinf _to_copy rsub atan2 threshold "
    "log_sigmoid_forward logit copy gelu_backward silu_backward tanh_backward sigmoid_backward "
    "threshold_backward elu_backward leaky_relu_backward softplus_backward hardtanh_backward "
    "hardswish_backward hardsigmoid_backward mish_backward log_sigmoid_backward "
    "native_dropout_backward";

const std::unordered_map<std::string_view, Row>& Table() {
  using enum Form;
  static const std::unordered_map<std::string_view, Row> table = [] {
    std::unordered_map<std::string_view, Row> rows = {
        {"aten.mm", {.form = kSpec, .spec = "ik,kj->ij", .linear = "0|1"}},
        {"aten.addmm", {kSpec, "ij,ik,kj->ij"}},
        {"aten.bmm", {.form = kSpec, .spec = "bik,bkj->bij", .linear = "0|1"}},
        {"aten.nll_loss_backward", {kSpec, ",n_,n,->n_"}},
        {"aten.convolution", {kSpec, "n___,o___,o->no__"}},
        {"aten.convolution_backward", {.form = kSpec, .spec = "no__,n___,o___->n___,o___,o", .bias_sizes = 3}},
        {"aten._scaled_dot_product_flash_attention_for_cpu", {kSpec, "bh__,bh__,bh__,bh__->bh__,bh_"}},
        {"aten._scaled_dot_product_flash_attention_for_cpu_backward",
         {kSpec, "bh__,bh__,bh__,bh__,bh__,bh_,bh__->bh__,bh__,bh__"}},
        {"aten.sum", {.form = kReduce, .linear = "0"}},
        {"aten.mean", {.form = kReduce, .linear = "0"}},
        {"aten.amax", {kReduce}},
        {"aten._softmax", {kAllBut}},
        {"aten._safe_softmax", {kAllBut}},
        {"aten._log_softmax", {kAllBut}},
        {"aten._softmax_backward_data", {.form = kAllBut, .at = 2, .linear = "0"}},
        {"aten._log_softmax_backward_data", {.form = kAllBut, .at = 2, .linear = "0"}},
        {"aten.cumsum", {.form = kAllBut, .linear = "0"}},
        {"aten.slice_backward", {.form = kAllBut, .at = 2, .linear = "0", .sizes_argument = 1}},
        {"aten.select_backward", {.form = kSelectBackward, .at = 2, .linear = "0", .sizes_argument = 1}},
        {"aten.native_layer_norm", {kNorm}},
        {"aten.native_layer_norm_backward", {.form = kNorm, .linear = "0"}},
        {"aten.cat", {.form = kCat, .linear = "0"}},
        {"aten.constant_pad_nd", {.form = kPad, .linear = "02"}},
        {"aten.index", {.form = kRows, .linear = "0"}},
        {"aten.index_put", {.form = kRows, .linear = "02"}},
        {"aten.embedding", {.form = kEmbedding, .linear = "0"}},
        {"aten.embedding_dense_backward", {.form = kEmbeddingBackward, .linear = "0"}},
        {"aten._grouped_mm", {kSpec, ""}},  // by its sizes, below
        {"aten.new_zeros", {.form = kNoOperands, .shape_only = true}},
        {"aten.new_ones", {.form = kNoOperands, .shape_only = true}},
        {"aten.new_full", {.form = kNoOperands, .shape_only = true}},
        {"aten.new_empty", {.form = kNoOperands, .shape_only = true}},
    };
    for (std::string_view name : {"add", "sub"}) rows.emplace(name, Row{.form = kPointwise, .linear = "01"});
    for (std::string_view name : {"neg", "clone", "alias", "detach", "div"})
      rows.emplace(name, Row{.form = kPointwise, .linear = "0"});
    rows.emplace("mul", Row{.form = kPointwise, .linear = "0|1"});
    rows.emplace("where", Row{.form = kPointwise, .linear = "12"});
    rows.emplace("masked_fill", Row{.form = kPointwise, .linear = "02"});
    for (std::string_view name : {"ones_like", "zeros_like", "empty_like", "full_like"})
      rows.emplace(name, Row{.form = kPointwise, .shape_only = true});
    for (std::string_view name : Split(kPointwiseNames, ' ')) {
      const bool backward = name.ends_with("_backward");  // linear in the gradient, which comes first
      rows.emplace(name, Row{.form = kPointwise, .linear = backward ? "0" : ""});
    }
    return rows;
  }();
  return table;
}

const Row* Find(const Op& op) {
  std::string_view name = BaseName(op.name);
  if (op.kind == OpKind::kCopy) name = "copy";
  const auto& table = Table();
  if (auto it = table.find(name); it != table.end()) return &it->second;
  if (!name.starts_with("aten.")) return nullptr;
  auto it = table.find(name.substr(5));
  return it == table.end() ? nullptr : &it->second;
}

// Counted from the front. -1: no number, or out of range.
int64_t DimOf(const Arg& arg, size_t rank) {
  if (arg.kind != Arg::Kind::kInt || !arg.integer.is_const()) return -1;
  const int64_t dim = arg.integer.value < 0 ? arg.integer.value + static_cast<int64_t>(rank) : arg.integer.value;
  return dim >= 0 && dim < static_cast<int64_t>(rank) ? dim : -1;
}

class Builder {
 public:
  Builder(const Op& op, const GeometryOfValue& geometry) : op_(op) {
    ForEachOperand(op, [&](ValueId id) { operands_.push_back(&geometry(id)); });
    for (ValueId id : op.results) results_.push_back(id == kNone ? nullptr : &geometry(id));
    for (const Geometry* g : operands_) rule_.operands.emplace_back(g->sizes.size(), kWholeDim);
    for (const Geometry* g : results_) rule_.results.emplace_back(g == nullptr ? 0 : g->sizes.size(), kWholeDim);
  }

  Rule Build() {
    const Row* row = op_.rng || !op_.writes.empty() ? nullptr : Find(op_);
    if (row == nullptr || results_.empty()) return rule_;
    rule_.known = true;
    if (!row->linear.empty()) {
      for (std::string_view set : Split(row->linear, '|')) Linear(set);
    }
    rule_.shape_only = row->shape_only;
    rule_.sizes_argument = row->sizes_argument;
    rule_.bias_sizes = row->bias_sizes;
    switch (row->form) {
      case Form::kSpec:
        Spec(row->spec.empty() ? GroupedProduct() : row->spec);
        break;
      case Form::kPointwise:
        Pointwise({});
        break;
      case Form::kReduce:
        Reduce(BaseName(op_.name) == "aten.sum");
        break;
      case Form::kAllBut:
        AllBut(row->at);
        break;
      case Form::kNorm:
        Norm();
        break;
      case Form::kCat:
        Cat();
        break;
      case Form::kPad:
        Pad();
        break;
      case Form::kSelectBackward:
        SelectBackward();
        break;
      case Form::kRows:
        Rows();
        break;
      case Form::kEmbedding:
        Embedding(false);
        break;
      case Form::kEmbeddingBackward:
        Embedding(true);
        break;
      case Form::kNoOperands:
        break;
    }
    if (BaseName(op_.name) == "aten.convolution" || BaseName(op_.name) == "aten.convolution_backward") OneGroup();
    rule_.joins.resize(rule_.sizes.size(), 1);
    return rule_;
  }

 private:
  int32_t Factor(int64_t size) {
    rule_.sizes.push_back(size);
    return static_cast<int32_t>(rule_.sizes.size()) - 1;
  }

  // A number that is added, other than zero, would be added by every rank.
  void Linear(std::string_view arguments) {
    std::vector<bool> set;
    for (size_t i = 0; i < op_.args.size(); ++i) {
      const Arg& arg = op_.args[i];
      const bool within = arguments.find(static_cast<char>('0' + i)) != std::string_view::npos;
      const bool number = arg.kind == Arg::Kind::kInt || arg.kind == Arg::Kind::kFloat || arg.kind == Arg::Kind::kBool;
      if (within && number && !IsZero(arg)) return;
      auto add = [&](ValueId) { set.push_back(within); };
      internal::WalkArg(arg, add);
    }
    if (std::any_of(op_.named.begin(), op_.named.end(), [](const NamedArg& n) { return n.name == "rounding_mode"; }))
      return;
    set.resize(operands_.size());
    rule_.linear.push_back(std::move(set));
  }

  // A dimension of length 1 that is broadcast along a factor does not walk along it.
  void Walk(std::vector<int32_t>& dims, const Geometry& geometry, size_t dim, int32_t factor) {
    if (factor >= 0 && geometry.sizes[dim] != 1) dims[dim] = factor;
  }

  void Spec(std::string_view spec) {
    if (spec.empty()) return;
    std::unordered_map<char, int32_t> factors;
    const size_t arrow = spec.find("->");
    const std::vector<std::string_view> left = Split(spec.substr(0, arrow), ',');
    const std::vector<std::string_view> right = Split(spec.substr(arrow + 2), ',');
    auto each = [&](auto&& f) {
      for (size_t i = 0; i < operands_.size() && i < left.size(); ++i) f(rule_.operands[i], operands_[i], left[i]);
      for (size_t i = 0; i < results_.size() && i < right.size(); ++i) f(rule_.results[i], results_[i], right[i]);
    };
    auto letters = [](const Geometry& g, std::string_view spec_of) {
      return spec_of.size() > g.sizes.size() ? spec_of.substr(spec_of.size() - g.sizes.size()) : spec_of;
    };
    each([&](std::vector<int32_t>&, const Geometry* g, std::string_view spec_of) {
      if (g == nullptr) return;
      const std::string_view text = letters(*g, spec_of);
      for (size_t d = 0; d < text.size() && d < g->sizes.size(); ++d) {
        if (text[d] == '_') continue;
        auto [it, fresh] = factors.emplace(text[d], 0);
        if (fresh) it->second = Factor(g->sizes[d]);
        rule_.sizes[it->second] = std::max(rule_.sizes[it->second], g->sizes[d]);
      }
    });
    each([&](std::vector<int32_t>& dims, const Geometry* g, std::string_view spec_of) {
      if (g == nullptr) return;
      const std::string_view text = letters(*g, spec_of);
      for (size_t d = 0; d < text.size() && d < g->sizes.size(); ++d) {
        if (text[d] != '_') Walk(dims, *g, d, factors[text[d]]);
      }
    });
  }

  // A product of each group of rows with a matrix of its own; which group a row is of, data says.
  std::string_view GroupedProduct() const {
    if (operands_.size() < 2) return "";
    const size_t a = operands_[0]->sizes.size(), b = operands_[1]->sizes.size();
    if (a == 2 && b == 3) return "_k,_kj->_j";
    if (a == 2 && b == 2) return "i_,_j->_ij";
    return "";
  }

  // One factor a dimension of the result, but for those in `without`.
  void Pointwise(const std::vector<size_t>& without) {
    const Geometry& out = *results_[0];
    const size_t rank = out.sizes.size();
    for (size_t d = 0; d < rank; ++d) {
      if (std::find(without.begin(), without.end(), d) != without.end()) continue;
      const int32_t factor = Factor(out.sizes[d]);
      const size_t from_back = rank - d;
      for (size_t i = 0; i < operands_.size(); ++i) {
        const size_t own = operands_[i]->sizes.size();
        if (own >= from_back) Walk(rule_.operands[i], *operands_[i], own - from_back, factor);
      }
      for (size_t i = 0; i < results_.size(); ++i) {
        if (results_[i] != nullptr && results_[i]->sizes.size() == rank)
          Walk(rule_.results[i], *results_[i], d, factor);
      }
    }
  }

  void AllBut(int32_t at) {
    const int64_t dim = DimArgument(op_, at, results_[0]->sizes.size());
    if (dim < 0 || (op_.args.size() > 0 && !SameRank())) return Unknown();
    Pointwise({static_cast<size_t>(dim)});
  }

  bool SameRank() const {
    return std::all_of(operands_.begin(), operands_.end(),
                       [&](const Geometry* g) { return g->sizes.size() == results_[0]->sizes.size(); });
  }

  void Reduce(bool sums) {
    if (operands_.size() != 1 || results_.size() != 1) return Unknown();
    const size_t rank = operands_[0]->sizes.size();
    std::vector<bool> reduced(rank,
                              op_.args.size() < 2 || op_.args[1].kind != Arg::Kind::kList || op_.args[1].list.empty());
    if (op_.args.size() >= 2 && op_.args[1].kind == Arg::Kind::kList) {
      for (const Arg& item : op_.args[1].list) {
        const int64_t dim = DimOf(item, rank);
        if (dim < 0) return Unknown();
        reduced[dim] = true;
      }
    }
    const bool keeps = results_[0]->sizes.size() == rank;
    size_t at = 0;
    for (size_t d = 0; d < rank; ++d) {
      const bool whole = reduced[d] && !sums;
      const int32_t factor = whole ? kWholeDim : Factor(operands_[0]->sizes[d]);
      Walk(rule_.operands[0], *operands_[0], d, factor);
      if (!reduced[d]) Walk(rule_.results[0], *results_[0], keeps ? d : at++, factor);
    }
  }

  // (x, [normalized], w, b, eps) → y, mean, rstd, and (g, x, [normalized], mean, rstd, w, b, mask) → gx, gw, gb.
  void Norm() {
    const size_t rank = operands_[0]->sizes.size();
    const size_t list = op_.args.size() > 1 && op_.args[1].kind == Arg::Kind::kList ? 1 : 2;
    if (op_.args.size() <= list || op_.args[list].kind != Arg::Kind::kList) return Unknown();
    const size_t normalized = op_.args[list].list.size();
    for (size_t d = 0; d + normalized < rank; ++d) {
      const int32_t factor = Factor(operands_[0]->sizes[d]);
      auto walk = [&](std::vector<int32_t>& dims, const Geometry* g) {
        if (g != nullptr && g->sizes.size() == rank) Walk(dims, *g, d, factor);
      };
      for (size_t i = 0; i < operands_.size(); ++i) walk(rule_.operands[i], operands_[i]);
      for (size_t i = 0; i < results_.size(); ++i) walk(rule_.results[i], results_[i]);
    }
  }

  void Cat() {
    const size_t rank = results_[0]->sizes.size();
    int64_t dim = op_.args.size() > 1 ? DimArgument(op_, 1, rank) : 0;
    if (dim < 0) return Unknown();
    bool alike = true;
    for (const Geometry* g : operands_) {
      if (g->sizes.size() != rank) continue;  // an empty one, which counts for nothing
      alike = alike && g->sizes[dim] == operands_[0]->sizes[dim];
    }
    for (size_t d = 0; d < rank; ++d) {
      if (static_cast<int64_t>(d) == dim && (!alike || !SameRank())) continue;
      const int32_t factor = Factor(results_[0]->sizes[d]);
      for (size_t i = 0; i < operands_.size(); ++i) {
        if (operands_[i]->sizes.size() == rank) Walk(rule_.operands[i], *operands_[i], d, factor);
      }
      Walk(rule_.results[0], *results_[0], d, factor);
      rule_.joins.resize(rule_.sizes.size(), 1);
      if (static_cast<int64_t>(d) == dim) rule_.joins[factor] = static_cast<int64_t>(operands_.size());
    }
  }

  void Pad() {
    std::vector<size_t> padded;
    const size_t rank = results_[0]->sizes.size();
    if (op_.args.size() < 2 || op_.args[1].kind != Arg::Kind::kList) return Unknown();
    for (size_t i = 0; i < op_.args[1].list.size() / 2 && i < rank; ++i) padded.push_back(rank - 1 - i);
    Pointwise(padded);
  }

  void SelectBackward() {
    const size_t rank = results_[0]->sizes.size();
    const int64_t dim = DimArgument(op_, 2, rank);
    if (dim < 0 || operands_[0]->sizes.size() + 1 != rank) return Unknown();
    for (size_t d = 0, from = 0; d < rank; ++d) {
      if (static_cast<int64_t>(d) == dim) continue;
      const int32_t factor = Factor(results_[0]->sizes[d]);
      Walk(rule_.operands[0], *operands_[0], from++, factor);
      Walk(rule_.results[0], *results_[0], d, factor);
    }
  }

  // (x[..., n, ...], [none, ..., index][, values[..., m, ...]]): one index, of one dimension.
  void Rows() {
    const size_t rank = operands_[0]->sizes.size();
    if (op_.args.size() < 2 || op_.args[1].kind != Arg::Kind::kList) return Unknown();
    const std::vector<Arg>& indices = op_.args[1].list;
    const size_t at = indices.empty() ? 0 : indices.size() - 1;
    const bool one = at < indices.size() && indices[at].kind == Arg::Kind::kValue &&
                     std::all_of(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(at),
                                 [](const Arg& arg) { return arg.kind == Arg::Kind::kNone; });
    if (!one || operands_.size() < 2 || operands_[1]->sizes.size() != 1 || results_[0]->sizes.size() != rank)
      return Unknown();
    for (size_t d = 0; d < rank; ++d) {
      if (d == at) continue;
      const int32_t factor = Factor(results_[0]->sizes[d]);
      for (size_t i = 0; i < operands_.size(); ++i) {
        if (i != 1 && operands_[i]->sizes.size() == rank) Walk(rule_.operands[i], *operands_[i], d, factor);
      }
      Walk(rule_.results[0], *results_[0], d, factor);
    }
  }

  // (w[v,f], ids) → [ids..., f], and (g[ids..., f], ids, v, ...) → [v,f], a sum over the ids.
  void Embedding(bool backward) {
    const size_t ids = operands_[1]->sizes.size();
    const size_t table_dim = 1;
    std::vector<int32_t>& rows = backward ? rule_.operands[0] : rule_.results[0];
    const Geometry& rows_geometry = backward ? *operands_[0] : *results_[0];
    std::vector<int32_t>& table = backward ? rule_.results[0] : rule_.operands[0];
    const Geometry& table_geometry = backward ? *results_[0] : *operands_[0];
    if (rows_geometry.sizes.size() != ids + 1 || table_geometry.sizes.size() != 2) return Unknown();
    for (size_t d = 0; d < ids; ++d) {
      const int32_t factor = Factor(operands_[1]->sizes[d]);
      Walk(rule_.operands[1], *operands_[1], d, factor);
      Walk(rows, rows_geometry, d, factor);
    }
    const int32_t factor = Factor(table_geometry.sizes[table_dim]);
    Walk(rows, rows_geometry, ids, factor);
    Walk(table, table_geometry, table_dim, factor);
  }

  void OneGroup() {
    const size_t groups = BaseName(op_.name) == "aten.convolution" ? 8 : 9, transposed = groups - 2;
    if (op_.args.size() <= groups || !(op_.args[groups] == Arg::Int(1)) || operands_[0]->sizes.size() != 4 ||
        !(op_.args[transposed] == Arg::Bool(false)))  // else the weight's first dimension is the input's
      Unknown();
  }

  void Unknown() {
    rule_.known = false;
    rule_.sizes.clear();
    rule_.joins.clear();
    for (auto* side : {&rule_.operands, &rule_.results}) {
      for (std::vector<int32_t>& dims : *side) std::fill(dims.begin(), dims.end(), kWholeDim);
    }
  }

  const Op& op_;
  std::vector<const Geometry*> operands_, results_;
  Rule rule_;
};

}  // namespace

Rule RuleOf(const Op& op, const GeometryOfValue& geometry) {
  return Builder(op, geometry).Build();
}

Facts FactsOf(const Program& program, const Phase& phase, const NumberOf& number) {
  Facts out{LayoutOf(program, number), {}, {}};
  out.names.resize(static_cast<size_t>(program.num_ops()));
  out.rules.resize(out.names.size());
  const GeometryOfValue geometry = [&](ValueId id) -> const Geometry& { return out.layout.geometry[id]; };
  for (OpId id : phase.ops) {
    out.names[id] = program.op(id).name;
    out.rules[id] = RuleOf(program.op(id), geometry);
  }
  return out;
}

bool IsZero(const Arg& arg) {
  return arg == Arg::Int(0) || arg == Arg::Float(0) || arg == Arg::Float(-0.0) || arg == Arg::Bool(false);
}

bool ReadsSizesOnly(const Op& op) {
  const Row* row = Find(op);
  return row != nullptr && row->shape_only;
}

std::string_view BaseName(std::string_view name) {
  const size_t first = name.find('.');
  return name.substr(0, first == std::string_view::npos ? first : name.find('.', first + 1));
}

int64_t DimArgument(const Op& op, size_t index, size_t rank) {
  return index < op.args.size() ? DimOf(op.args[index], rank) : -1;
}

}  // namespace interlace::tensor
