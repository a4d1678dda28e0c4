#include "ir/testing/aten_kernels.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

namespace interlace::testing {
namespace {

using Kernel = Result<Dense> (*)(const AtenCall&);

bool IsValue(const AtenCall& call, size_t i) {
  return i < call.op.args.size() && call.op.args[i].kind == Arg::Kind::kValue;
}
double NumberOf(const AtenCall& call, const Arg& arg, double fallback) {
  if (arg.kind == Arg::Kind::kFloat) return arg.real;
  if (arg.kind == Arg::Kind::kInt && arg.integer.is_const()) return static_cast<double>(arg.integer.value);
  if (arg.kind == Arg::Kind::kInt && call.integer) return static_cast<double>(call.integer(arg.integer));
  if (arg.kind == Arg::Kind::kBool) return arg.boolean ? 1 : 0;
  return fallback;
}
// A positional number, a named one, or the fallback.
double Number(const AtenCall& call, size_t i, std::string_view name, double fallback) {
  if (i < call.op.args.size()) return NumberOf(call, call.op.args[i], fallback);
  for (const NamedArg& named : call.op.named) {
    if (named.name == name) return NumberOf(call, named.arg, fallback);
  }
  return fallback;
}
std::vector<int64_t> Integers(const AtenCall& call, size_t i) {
  std::vector<int64_t> out;
  if (i >= call.op.args.size()) return out;
  const Arg& arg = call.op.args[i];
  if (arg.kind == Arg::Kind::kInt) out.push_back(arg.integer.value);
  for (const Arg& item : arg.list) out.push_back(item.integer.value);
  return out;
}
int64_t AxisOf(int64_t axis, size_t rank) {
  return axis < 0 ? axis + static_cast<int64_t>(rank) : axis;
}

const std::vector<int64_t>& OutSizes(const AtenCall& call) {
  return call.result_sizes[0];
}
// Operand i (a value or a number) at the sizes of the result.
Dense Operand(const AtenCall& call, size_t i) {
  if (IsValue(call, i)) return Broadcast(call.read(call.op.args[i].value), OutSizes(call));
  return Dense{OutSizes(call), std::vector<double>(Count(OutSizes(call)), Number(call, i, "", 0))};
}
template <typename F>
Result<Dense> Unary(const AtenCall& call, F f) {
  Dense out = Operand(call, 0);
  for (double& x : out.data) x = f(x);
  return out;
}
template <typename F>
Result<Dense> Binary(const AtenCall& call, F f) {
  Dense out = Operand(call, 0), other = Operand(call, 1);
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = f(out.data[i], other.data[i]);
  return out;
}

// The product of the operands `first` and `first` + 1.
Result<Dense> Mm(const AtenCall& call, size_t first = 0) {
  Dense a = call.read(call.op.args[first].value), b = call.read(call.op.args[first + 1].value);
  if (a.sizes.size() != 2 || b.sizes.size() != 2 || a.sizes[1] != b.sizes[0])
    return MakeError(call.op.name, " needs n x k and k x m");
  int64_t n = a.sizes[0], k = a.sizes[1], m = b.sizes[1];
  Dense out{{n, m}, std::vector<double>(n * m, 0.0)};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      for (int64_t l = 0; l < k; ++l) out.data[i * m + j] += a.data[i * k + l] * b.data[l * m + j];
    }
  }
  return out;
}

// addmm(sum, a, b) without alpha and beta, rounded as mm and add would: libraries round as they like.
Result<Dense> AddMm(const AtenCall& call) {
  Dense out = Operand(call, 0);
  INTERLACE_ASSIGN(const Dense product, Mm(call, 1));
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] += RoundTo(call.dtype, product.data[i]);
  return out;
}

Result<Dense> Permuted(const Dense& x, const std::vector<int64_t>& order) {
  Dense out;
  std::vector<int64_t> strides(x.sizes.size(), 1), moved;
  for (size_t i = x.sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * x.sizes[i];
  for (int64_t axis : order) {
    if (axis < 0 || axis >= static_cast<int64_t>(x.sizes.size())) return MakeError("a dimension is out of range");
    out.sizes.push_back(x.sizes[axis]);
    moved.push_back(strides[axis]);
  }
  std::vector<int64_t> index(order.size(), 0);
  for (size_t n = 0; n < x.data.size(); ++n) {
    int64_t from = 0;
    for (size_t i = 0; i < index.size(); ++i) from += index[i] * moved[i];
    out.data.push_back(x.data[from]);
    for (size_t i = index.size(); i-- > 0;) {
      if (++index[i] < out.sizes[i]) break;
      index[i] = 0;
    }
  }
  return out;
}
Result<Dense> Transpose(const AtenCall& call) {
  Dense x = call.read(call.op.args[0].value);
  std::vector<int64_t> order(x.sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  if (order.size() < 2) return x;
  int64_t a = AxisOf(static_cast<int64_t>(Number(call, 1, "dim0", 0)), order.size());
  int64_t b = AxisOf(static_cast<int64_t>(Number(call, 2, "dim1", 1)), order.size());
  if (std::min(a, b) < 0 || std::max(a, b) >= static_cast<int64_t>(order.size()))
    return MakeError("a dimension is out of range");
  std::swap(order[a], order[b]);
  return Permuted(x, order);
}
Result<Dense> Permute(const AtenCall& call) {
  Dense x = call.read(call.op.args[0].value);
  std::vector<int64_t> order = Integers(call, 1);
  for (int64_t& axis : order) axis = AxisOf(axis, x.sizes.size());
  return Permuted(x, order);
}
Result<Dense> Reshape(const AtenCall& call) {
  Dense x = call.read(call.op.args[0].value);
  x.sizes = OutSizes(call);
  return x;
}

// Sum over the listed dimensions (all when there are none), in row-major order of the input.
Result<Dense> Sum(const AtenCall& call) {
  Dense x = call.read(call.op.args[0].value);
  size_t rank = x.sizes.size();
  std::vector<bool> reduced(rank, false);
  std::vector<int64_t> axes = Integers(call, 1);
  for (int64_t axis : axes) {
    axis = AxisOf(axis, rank);
    if (axis < 0 || axis >= static_cast<int64_t>(rank)) return MakeError("a dimension of sum is out of range");
    reduced[axis] = true;
  }
  if (axes.empty()) reduced.assign(rank, true);
  std::vector<int64_t> strides(rank, 0), index(rank, 0);
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    if (reduced[i]) continue;
    strides[i] = stride;
    stride *= x.sizes[i];
  }
  Dense out{OutSizes(call), std::vector<double>(stride, 0.0)};
  int64_t to = 0;
  for (double value : x.data) {
    out.data[to] += value;
    for (size_t i = rank; i-- > 0;) {
      to += strides[i];
      if (++index[i] < x.sizes[i]) break;
      to -= strides[i] * x.sizes[i];
      index[i] = 0;
    }
  }
  return out;
}
Result<Dense> Mean(const AtenCall& call) {
  INTERLACE_ASSIGN(Dense out, Sum(call));
  double inputs = static_cast<double>(Count(call.read(call.op.args[0].value).sizes));
  for (double& x : out.data) x /= inputs / static_cast<double>(out.data.size());
  return out;
}

// embedding(weight, indices)
Result<Dense> Embedding(const AtenCall& call) {
  Dense weight = call.read(call.op.args[0].value), indices = call.read(call.op.args[1].value);
  int64_t width = weight.sizes[1];
  Dense out{OutSizes(call), {}};
  for (double index : indices.data) {
    auto row = static_cast<int64_t>(index);
    if (row < 0 || row >= weight.sizes[0]) return MakeError("index ", row, " is out of range of the embedding");
    out.data.insert(out.data.end(), weight.data.begin() + row * width, weight.data.begin() + (row + 1) * width);
  }
  return out;
}
// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale)
Result<Dense> EmbeddingBackward(const AtenCall& call) {
  Dense grad = call.read(call.op.args[0].value), indices = call.read(call.op.args[1].value);
  Dense out{OutSizes(call), std::vector<double>(Count(OutSizes(call)), 0.0)};
  int64_t width = OutSizes(call)[1], padding = static_cast<int64_t>(Number(call, 3, "padding_idx", -1));
  for (size_t i = 0; i < indices.data.size(); ++i) {
    auto row = static_cast<int64_t>(indices.data[i]);
    if (row < 0 || row >= OutSizes(call)[0]) return MakeError("index ", row, " is out of range of the embedding");
    if (row == padding) continue;
    for (int64_t j = 0; j < width; ++j) out.data[row * width + j] += grad.data[i * width + j];
  }
  return out;
}
// What a row along a dimension runs over: calls f(first element, step) for each of `rows` rows of `size` elements.
template <typename F>
void EachRow(const std::vector<int64_t>& sizes, int64_t dim, F f) {
  int64_t step = 1, outer = 1;
  for (size_t d = static_cast<size_t>(dim) + 1; d < sizes.size(); ++d) step *= sizes[d];
  for (int64_t d = 0; d < dim; ++d) outer *= sizes[static_cast<size_t>(d)];
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < step; ++i) f(o * step * sizes[static_cast<size_t>(dim)] + i, step);
  }
}
double LogSumExp(const Dense& x, int64_t first, int64_t step, int64_t size) {
  double most = x.data[first], sum = 0;
  for (int64_t k = 1; k < size; ++k) most = std::max(most, x.data[first + k * step]);
  for (int64_t k = 0; k < size; ++k) sum += std::exp(x.data[first + k * step] - most);
  return most + std::log(sum);
}
// logsumexp(x, [dim], keepdim)
Result<Dense> LogSumExp(const AtenCall& call) {
  const Dense x = call.read(call.op.args[0].value);
  const std::vector<int64_t> dims = Integers(call, 1);
  if (dims.size() != 1) return MakeError("logsumexp of one dimension only");
  const int64_t dim = AxisOf(dims[0], x.sizes.size());
  Dense out{OutSizes(call), {}};
  EachRow(x.sizes, dim,
          [&](int64_t first, int64_t step) { out.data.push_back(LogSumExp(x, first, step, x.sizes[dim])); });
  return out;
}
// _log_softmax(x, dim, half_to_float)
Result<Dense> LogSoftmax(const AtenCall& call) {
  Dense x = call.read(call.op.args[0].value);
  const int64_t dim = AxisOf(static_cast<int64_t>(Number(call, 1, "dim", -1)), x.sizes.size());
  EachRow(x.sizes, dim, [&](int64_t first, int64_t step) {
    const double sum = LogSumExp(x, first, step, x.sizes[dim]);
    for (int64_t k = 0; k < x.sizes[dim]; ++k) x.data[first + k * step] -= sum;
  });
  return x;
}
// _log_softmax_backward_data(g, y, dim, dtype)
Result<Dense> LogSoftmaxBackward(const AtenCall& call) {
  Dense g = Operand(call, 0), y = Operand(call, 1);
  const int64_t dim = AxisOf(static_cast<int64_t>(Number(call, 2, "dim", -1)), y.sizes.size());
  EachRow(y.sizes, dim, [&](int64_t first, int64_t step) {
    double sum = 0;
    for (int64_t k = 0; k < y.sizes[dim]; ++k) sum += g.data[first + k * step];
    for (int64_t k = 0; k < y.sizes[dim]; ++k) g.data[first + k * step] -= std::exp(y.data[first + k * step]) * sum;
  });
  return g;
}
// addcmul(x, a, b, value)
Result<Dense> AddCMul(const AtenCall& call) {
  Dense x = Operand(call, 0), a = Operand(call, 1), b = Operand(call, 2);
  const double value = Number(call, 3, "value", 1);
  for (size_t i = 0; i < x.data.size(); ++i) x.data[i] += value * a.data[i] * b.data[i];
  return x;
}
Result<Dense> MaskedFill(const AtenCall& call) {
  Dense x = Operand(call, 0), mask = Operand(call, 1), value = Operand(call, 2);
  for (size_t i = 0; i < x.data.size(); ++i) x.data[i] = mask.data[i] != 0 ? value.data[i] : x.data[i];
  return x;
}
Result<Dense> Where(const AtenCall& call) {
  Dense mask = Operand(call, 0), yes = Operand(call, 1), no = Operand(call, 2);
  for (size_t i = 0; i < yes.data.size(); ++i) yes.data[i] = mask.data[i] != 0 ? yes.data[i] : no.data[i];
  return yes;
}
// cat(list, dim)
Result<Dense> Cat(const AtenCall& call) {
  auto dim = static_cast<size_t>(Number(call, 1, "dim", 0));
  Dense out{OutSizes(call), {}};
  std::vector<Dense> parts;
  for (const Arg& arg : call.op.args[0].list) parts.push_back(call.read(arg.value));
  int64_t rows = 1;
  for (size_t d = 0; d < dim; ++d) rows *= out.sizes[d];
  for (int64_t row = 0; row < rows; ++row) {
    for (const Dense& part : parts) {
      const int64_t each = rows == 0 ? 0 : static_cast<int64_t>(part.data.size()) / rows;
      out.data.insert(out.data.end(), part.data.begin() + row * each, part.data.begin() + (row + 1) * each);
    }
  }
  return out;
}
Result<Dense> Full(const AtenCall& call) {
  return Dense{OutSizes(call), std::vector<double>(Count(OutSizes(call)), Number(call, 1, "fill_value", 0))};
}
Result<Dense> Filled(const AtenCall& call, double value) {
  return Dense{OutSizes(call), std::vector<double>(Count(OutSizes(call)), value)};
}
Result<Dense> Bernoulli(const AtenCall& call) {
  if (!call.op.rng) return MakeError("aten.bernoulli needs rng=K");
  double p = Number(call, 1, "p", 0.5);
  Dense out{OutSizes(call), std::vector<double>(Count(OutSizes(call)))};
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = Uniform(Mix(call.random_key, i)) < p ? 1.0 : 0.0;
  return out;
}

// nll_loss_forward(y, target, no weights, reduction, ignored) → loss, weight; 1: mean, 2: sum
Result<std::vector<Dense>> Nll(const AtenCall& call) {
  const Dense y = call.read(call.op.args[0].value), target = call.read(call.op.args[1].value);
  const auto reduction = static_cast<int64_t>(Number(call, 3, "", 1)),
             ignored = static_cast<int64_t>(Number(call, 4, "", -100));
  double loss = 0, count = 0;
  for (size_t i = 0; i < target.data.size(); ++i) {
    const auto row = static_cast<int64_t>(target.data[i]);
    if (row == ignored) continue;
    if (row < 0 || row >= y.sizes[1]) return MakeError("target ", row, " is out of range of the loss");
    loss -= y.data[static_cast<int64_t>(i) * y.sizes[1] + row];
    count += 1;
  }
  return std::vector<Dense>{{{}, {reduction == 1 ? loss / count : loss}}, {{}, {count}}};
}
// nll_loss_backward(g, y, target, no weights, reduction, ignored, weight)
Result<Dense> NllBackward(const AtenCall& call) {
  const Dense g = call.read(call.op.args[0].value), y = call.read(call.op.args[1].value),
              target = call.read(call.op.args[2].value), weight = call.read(call.op.args[6].value);
  const auto reduction = static_cast<int64_t>(Number(call, 4, "", 1)),
             ignored = static_cast<int64_t>(Number(call, 5, "", -100));
  Dense out{OutSizes(call), std::vector<double>(Count(OutSizes(call)), 0.0)};
  for (size_t i = 0; i < target.data.size(); ++i) {
    const auto row = static_cast<int64_t>(target.data[i]);
    if (row == ignored) continue;
    if (row < 0 || row >= y.sizes[1]) return MakeError("target ", row, " is out of range of the loss");
    out.data[static_cast<int64_t>(i) * y.sizes[1] + row] = -g.data[0] / (reduction == 1 ? weight.data[0] : 1.0);
  }
  return out;
}

const std::unordered_map<std::string_view, Kernel>& Kernels() {
  static const std::unordered_map<std::string_view, Kernel> kernels = {
      {"mm", [](const AtenCall& c) { return Mm(c); }},
      {"addmm", AddMm},
      {"t", Transpose},
      {"transpose", Transpose},
      {"permute", Permute},
      {"view", Reshape},
      {"reshape", Reshape},
      {"_unsafe_view", Reshape},
      {"unsqueeze", Reshape},
      {"squeeze", Reshape},
      {"expand", [](const AtenCall& c) { return Unary(c, [](double x) { return x; }); }},
      {"clone", [](const AtenCall& c) { return Unary(c, [](double x) { return x; }); }},
      {"_to_copy", [](const AtenCall& c) { return Unary(c, [](double x) { return x; }); }},
      {"alias", [](const AtenCall& c) { return Unary(c, [](double x) { return x; }); }},
      {"detach", [](const AtenCall& c) { return Unary(c, [](double x) { return x; }); }},
      {"neg", [](const AtenCall& c) { return Unary(c, [](double x) { return -x; }); }},
      {"exp", [](const AtenCall& c) { return Unary(c, [](double x) { return std::exp(x); }); }},
      {"tanh", [](const AtenCall& c) { return Unary(c, [](double x) { return std::tanh(x); }); }},
      {"relu", [](const AtenCall& c) { return Unary(c, [](double x) { return x > 0 ? x : 0; }); }},
      {"sigmoid", [](const AtenCall& c) { return Unary(c, [](double x) { return 1 / (1 + std::exp(-x)); }); }},
      {"sqrt", [](const AtenCall& c) { return Unary(c, [](double x) { return std::sqrt(x); }); }},
      {"mul", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a * b; }); }},
      {"div", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a / b; }); }},
      {"maximum", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a > b ? a : b; }); }},
      {"eq", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a == b ? 1.0 : 0.0; }); }},
      {"ne", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a != b ? 1.0 : 0.0; }); }},
      {"lt", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a < b ? 1.0 : 0.0; }); }},
      {"ge", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a >= b ? 1.0 : 0.0; }); }},
      {"logical_or",
       [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a != 0 || b != 0 ? 1.0 : 0.0; }); }},
      {"gt", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a > b ? 1.0 : 0.0; }); }},
      {"le", [](const AtenCall& c) { return Binary(c, [](double a, double b) { return a <= b ? 1.0 : 0.0; }); }},
      {"add",
       [](const AtenCall& c) {
         double alpha = Number(c, 2, "alpha", 1);
         return Binary(c, [alpha](double a, double b) { return a + alpha * b; });
       }},
      {"sub",
       [](const AtenCall& c) {
         double alpha = Number(c, 2, "alpha", 1);
         return Binary(c, [alpha](double a, double b) { return a - alpha * b; });
       }},
      {"copy", [](const AtenCall& c) -> Result<Dense> { return Operand(c, 1); }},
      {"threshold_backward",
       [](const AtenCall& c) {
         double limit = Number(c, 2, "threshold", 0);
         return Binary(c, [limit](double g, double x) { return x > limit ? g : 0; });
       }},
      {"tanh_backward",
       [](const AtenCall& c) { return Binary(c, [](double g, double y) { return g * (1 - y * y); }); }},
      {"sum", Sum},
      {"mean", Mean},
      {"logsumexp", [](const AtenCall& c) { return LogSumExp(c); }},
      {"_log_softmax", LogSoftmax},
      {"_log_softmax_backward_data", LogSoftmaxBackward},
      {"nll_loss_backward", NllBackward},
      {"addcmul", AddCMul},
      {"masked_fill", MaskedFill},
      {"where", Where},
      {"cat", Cat},
      {"embedding", Embedding},
      {"embedding_dense_backward", EmbeddingBackward},
      {"full", Full},
      {"full_like", Full},
      {"zeros", [](const AtenCall& c) { return Filled(c, 0); }},
      {"zeros_like", [](const AtenCall& c) { return Filled(c, 0); }},
      {"ones", [](const AtenCall& c) { return Filled(c, 1); }},
      {"ones_like", [](const AtenCall& c) { return Filled(c, 1); }},
      {"bernoulli", Bernoulli},
  };
  return kernels;
}

}  // namespace

Result<std::vector<Dense>> RunAten(const AtenCall& call) {
  std::string_view name = call.op.name;
  if (!name.starts_with("aten.")) return MakeError("the interpreter knows aten ops only, not ", name);
  name.remove_prefix(5);
  name = name.substr(0, name.find('.'));
  if (name == "nll_loss_forward") return Nll(call);
  auto found = Kernels().find(name);
  // An in-place op is its functional form, stored over the operand.
  if (found == Kernels().end() && name.ends_with('_')) found = Kernels().find(name.substr(0, name.size() - 1));
  if (found == Kernels().end()) return MakeError("the interpreter lacks ", call.op.name);
  if (call.result_sizes.empty()) return MakeError(call.op.name, " has neither a result nor writes=[..]");
  INTERLACE_ASSIGN(Dense out, found->second(call));
  if (Count(call.result_sizes[0]) != static_cast<int64_t>(out.data.size())) {
    return MakeError(call.op.name, " gives ", out.data.size(), " elements; its type says ",
                     Count(call.result_sizes[0]));
  }
  out.sizes = call.result_sizes[0];
  std::vector<Dense> results;
  results.push_back(std::move(out));
  return results;
}

}  // namespace interlace::testing
