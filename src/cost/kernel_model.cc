#include "cost/kernel_model.h"

#include <algorithm>
#include <cmath>

#include "ir/func.h"
#include "ir/op_table.h"
#include "ir/text.h"

namespace interlace {
namespace {

struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  DType dtype = DType::kF32;
  double elements = 1;
  double bytes = 0;  // touched: a dimension of stride 0 counts once
  double At(int from_end) const {
    size_t n = sizes.size();
    return static_cast<size_t>(from_end) <= n ? static_cast<double>(sizes[n - from_end]) : 1.0;
  }
};

Result<Shape> ShapeOf(const Program& program, ValueId id) {
  const Type& type = program.value(id).type;
  Shape out;
  out.dtype = type.dtype;
  double touched = 1;
  for (size_t i = 0; i < type.sizes.size(); ++i) {
    if (!type.sizes[i].is_const() || !type.strides[i].is_const()) {
      return MakeError("%", id, ": ", PrintType(program, type),
                       " has sizes that are not yet numbers; bind the symbols first");
    }
    out.sizes.push_back(type.sizes[i].value);
    out.strides.push_back(type.strides[i].value);
    out.elements *= static_cast<double>(type.sizes[i].value);
    if (type.strides[i].value != 0) touched *= static_cast<double>(type.sizes[i].value);
  }
  out.bytes = touched * static_cast<double>(DTypeBytes(type.dtype));
  return out;
}

// "aten.mm.out" is "aten.mm".
std::string_view BaseName(std::string_view name) {
  size_t first = name.find('.');
  return name.substr(0, first == std::string_view::npos ? first : name.find('.', first + 1));
}

class Worker {
 public:
  Worker(const Program& program, const Op& op) : program_(program), op_(op), name_(BaseName(op.name)) {}

  Result<KernelWork> Run() {
    if (Free()) {
      work_.kind = KernelWork::Kind::kFree;
      return work_;
    }
    INTERLACE_TRY(Operands());
    if (!shapes_.empty()) work_.dtype = shapes_[0].dtype;
    if (Product() || Convolution() || Attention()) return work_;
    MemoryBytes();
    return work_;
  }

 private:
  bool Free() const {
    if (TakesNoTime(op_) || IsStart(op_)) return true;
    if (op_.kind == OpKind::kGradBegin) {
      const Arg* zero = op_.Attr("zero");
      return zero == nullptr || !zero->boolean;
    }
    if (IsOwn(op_) || !op_.writes.empty() || op_.results.empty()) return false;
    // An operator all of whose results are views moves nothing.
    for (ValueId id : op_.results) {
      if (id == kNone || program_.value(id).root == id || program_.value(id).placed) return false;
    }
    return true;
  }

  Status Operands() {
    Status status = Ok{};
    ForEachOperand(op_, [&](ValueId id) {
      if (!status.ok()) return;
      Result<Shape> shape = ShapeOf(program_, id);
      if (!shape.ok()) {
        status = shape.error();
        return;
      }
      shapes_.push_back(std::move(*shape));
    });
    INTERLACE_TRY(status);
    for (ValueId id : op_.results) {
      if (id == kNone) continue;
      INTERLACE_ASSIGN(Shape shape, ShapeOf(program_, id));
      results_.push_back(std::move(shape));
    }
    return Ok{};
  }

  // Tensor cores read 16 bytes at once. Rows of odd length take twice as long (heads of vTrain's runs with 50257 words;
  // nanoGPT's step is a quarter faster with 50304); what lies between is assumed.
  static double Aligned(const Shape& s) {
    const size_t n = s.strides.size();
    if (n < 2 || DTypeBytes(s.dtype) != 2 || s.sizes[n - 1] == 1 || s.sizes[n - 2] == 1) return 1;
    const int64_t row = std::max(s.strides[n - 1], s.strides[n - 2]);
    return row % 8 == 0 ? 1 : row % 2 == 0 ? 0.75 : 0.5;
  }

  // Adds bias operands apart, the two factors are the last two operands (mm, bmm) or those after the bias (addmm).
  bool Product() {
    bool biased = name_ == "aten.addmm" || name_ == "aten.addmm_" || name_ == "aten.baddbmm";
    if (!biased && name_ != "aten.mm" && name_ != "aten.bmm" && name_ != "aten.linear" && name_ != "aten._grouped_mm")
      return false;
    size_t first = biased ? 1 : 0;
    if (shapes_.size() < first + 2 || results_.empty()) return false;
    const Shape& a = shapes_[first];
    const Shape& b = shapes_[first + 1];
    work_.kind = KernelWork::Kind::kProduct;
    work_.k = a.At(1);
    // Gradients of experts: their rows are the inner dimension, each expert has its share of them.
    if (name_ == "aten._grouped_mm" && a.sizes.size() == 2 && results_[0].sizes.size() == 3)
      work_.k /= std::max(results_[0].At(3), 1.0);
    work_.n = results_[0].At(1);
    work_.m = results_[0].At(2);
    work_.batch = results_[0].elements / std::max(work_.m * work_.n, 1.0);
    size_t rank = b.strides.size();
    work_.transposed = name_ == "aten.linear" || (rank >= 2 && b.strides[rank - 2] == 1 && b.strides[rank - 1] != 1);
    // The tokens of a layer go to experts in equal parts: a product each, of so many rows.
    if (name_ == "aten._grouped_mm" && b.sizes.size() == 3 && results_[0].sizes.size() == 2) {
      work_.batch = std::max(b.At(3), 1.0);
      work_.m /= work_.batch;
    }
    work_.flops = 2 * results_[0].elements * work_.k;
    work_.aligned = std::min({Aligned(a), Aligned(b), Aligned(results_[0])});
    AddAll();
    return true;
  }

  // As the product it is lowered to: output positions x output channels x (input channels x window).
  bool Convolution() {
    bool backward = name_ == "aten.convolution_backward";
    if ((name_ != "aten.convolution" && !backward) || shapes_.size() < 2 || results_.empty()) return false;
    const Shape& output = backward ? shapes_[0] : results_[0];
    const Shape& weight = shapes_[backward ? 2 : 1];
    if (weight.sizes.size() < 2 || weight.sizes[0] == 0) return false;
    work_.kind = KernelWork::Kind::kProduct;
    work_.n = static_cast<double>(weight.sizes[0]);
    work_.k = weight.elements / work_.n;
    work_.m = output.elements / work_.n;
    work_.flops = 2 * work_.m * work_.n * work_.k * (backward ? 2 : 1);
    AddAll();
    return true;
  }

  bool Attention() {
    if (name_.find("scaled_dot_product") == std::string_view::npos) return false;
    work_.backward = name_.find("_backward") != std::string_view::npos;
    size_t first = work_.backward ? 1 : 0;  // the gradient comes before query, key, value
    if (shapes_.size() < first + 3 || shapes_[first].sizes.size() < 4) return false;
    const Shape& query = shapes_[first];
    work_.kind = KernelWork::Kind::kAttention;
    work_.sequence = query.At(2);
    work_.head = query.At(1);
    double keys = shapes_[first + 1].At(2);
    bool causal = false;
    for (const Arg& arg : op_.args) causal = causal || (arg.kind == Arg::Kind::kBool && arg.boolean);
    for (const NamedArg& named : op_.named) causal = causal || (named.name == "is_causal" && named.arg.boolean);
    work_.flops = 4 * query.elements * keys * (causal ? 0.5 : 1.0) * (work_.backward ? 2.5 : 1.0);
    AddAll();
    return true;
  }

  void MemoryBytes() {
    work_.kind = KernelWork::Kind::kMemory;
    if (!results_.empty() && shapes_.empty()) work_.dtype = results_[0].dtype;
    bool picks =
        name_ == "aten.embedding" || name_ == "aten.index" || name_ == "aten.gather" || name_ == "aten.index_select";
    if (picks && !results_.empty()) {  // reads what it picks, not the whole table
      work_.bytes = 2 * results_[0].bytes;
      return;
    }
    AddAll();
    if (const int32_t func = FuncOf(program_, op_); func != kNone) PickedInside(program_.funcs[func]);
    for (ValueId id : WrittenOperands(program_, op_)) {
      Result<Shape> shape = ShapeOf(program_, id);
      if (shape.ok()) work_.bytes += shape->bytes;
    }
  }

  // A region's tables: what it picks is read, not the whole.
  void PickedInside(const Func& func) {
    const Program& body = *func.body;
    const std::vector<ValueId> operands = OperandsOf(func);
    for (OpId id : body.phases[0].ops) {
      const Op& op = body.op(id);
      if (BaseName(op.name) != "aten.embedding" || op.args.empty() || op.results[0] == kNone) continue;
      const auto table = std::find(operands.begin(), operands.end(), op.args[0].value);
      const Result<Shape> picked = ShapeOf(body, op.results[0]);
      if (table == operands.end() || !picked.ok()) continue;
      const Shape& whole = shapes_[static_cast<size_t>(table - operands.begin())];
      work_.bytes += std::min(picked->bytes, whole.bytes) - whole.bytes;
    }
  }

  void AddAll() {
    for (const Shape& s : shapes_) work_.bytes += s.bytes;
    for (const Shape& s : results_) work_.bytes += s.bytes;
  }

  const Program& program_;
  const Op& op_;
  const std::string_view name_;
  std::vector<Shape> shapes_, results_;
  KernelWork work_;
};

double FarUs(const ClusterSpec& c, double bytes) {
  return bytes / (c.memory_gb_per_s * 1e3 * c.memory_efficiency * c.step.memory);
}

// Of an op that reads what the op before it wrote, as elementwise ops do.
double NearUs(const ClusterSpec& c, double bytes) {
  double far = FarUs(c, bytes);
  if (c.cache_mib <= 0) return far;
  // All of it is in the cache up to its size, nothing from twice its size on (a stream pushes itself out).
  double cache = c.cache_mib * 1048576.0;
  double hit = std::clamp(2 - bytes / cache, 0.0, 1.0);
  return hit * bytes / (c.cache_gb_per_s * 1e3 * c.step.memory) + (1 - hit) * far;
}

// Rate of attention for a width of heads over that of 128: kernels exist for multiples of 32, and narrow ones feed the
// tensor cores less well.
double HeadShare(const ClusterSpec& c, double head) {
  if (c.cpu || c.stack == kStacks[0]) return 1;  // kernels alone are as in their tables, those of heads of 128
  const double padded = std::ceil(std::max(head, 1.0) / 32) * 32;
  const double rate = padded >= 128 ? 1 : 1 - (128 - padded) / 64 * (1 - c.attention_head_64);
  return std::max(rate, 0.1) * head / padded;
}

double PeakFlopsPerUs(const ClusterSpec& c, DType dtype) {
  if (DTypeBytes(dtype) <= 2) return c.tflops_half * 1e6;
  return (dtype == DType::kF64 || dtype == DType::kC128 ? c.tflops_double : c.tflops_single) * 1e6;
}

double ProductUs(const ClusterSpec& c, const KernelWork& w) {
  double efficiency = w.transposed ? c.mm_transposed_efficiency : c.mm_efficiency;
  double exponent = w.transposed ? c.mm_transposed_wave_exponent : c.mm_wave_exponent;
  double half_k = w.transposed ? c.mm_transposed_half_k : c.mm_half_k;
  double slow = 1;
  if (c.processors > 0) {
    // Tiles of the libraries, and their share of the peak rate (bench/fit_kernels.py has the same table).
    static constexpr double kTiles[][3] = {{128, 256, 1.0}, {256, 128, 1.0}, {128, 128, 0.95}, {64, 128, 0.8}};
    slow = INFINITY;
    for (const auto& [rows, columns, share] : kTiles) {
      double tiles = w.batch * std::ceil(w.m / rows) * std::ceil(w.n / columns);
      double waves = std::ceil(tiles / c.processors) * c.processors;
      slow = std::min(slow, std::pow(waves * rows * columns / std::max(w.batch * w.m * w.n, 1.0), exponent) / share);
    }
  }
  if (!c.cpu && c.stack != kStacks[0]) slow /= w.aligned;  // kernels alone are as in their tables
  return w.flops / (PeakFlopsPerUs(c, w.dtype) * efficiency * c.step.products) * slow *
         (1 + half_k / std::max(w.k, 1.0));
}

}  // namespace

Result<KernelWork> WorkOf(const Program& program, const Op& op) {
  Result<KernelWork> work = Worker(program, op).Run();
  if (work.ok()) return work;
  Error error = work.error();
  error.where = PrintOp(program, op);
  return error;
}

double KernelUs(const ClusterSpec& c, const KernelWork& w) {
  switch (w.kind) {
    case KernelWork::Kind::kFree:
      return 0;
    case KernelWork::Kind::kMemory:
      return c.shortest_us + NearUs(c, w.bytes);
    case KernelWork::Kind::kProduct:
      return c.shortest_us + std::max(ProductUs(c, w), FarUs(c, w.bytes));  // weights come from memory
    case KernelWork::Kind::kAttention: {
      double efficiency = w.backward ? c.attention_backward_efficiency : c.attention_efficiency;
      double half = w.backward ? c.attention_backward_half_sequence : c.attention_half_sequence;
      efficiency *= HeadShare(c, w.head) * c.step.attention;
      double us = w.flops / (PeakFlopsPerUs(c, w.dtype) * efficiency) * (1 + half / std::max(w.sequence, 1.0));
      return c.shortest_us + std::max(us, FarUs(c, w.bytes));
    }
  }
  return 0;
}

}  // namespace interlace
