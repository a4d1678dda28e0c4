#include "ir/testing/random_program.h"

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>

namespace interlace::testing {
namespace {

class Generator {
 public:
  explicit Generator(const RandomProgramOptions& options) : options_(options), random_(options.seed) {}

  Program Run() {
    program_.SetMeta("model", "random-" + std::to_string(options_.seed));
    program_.groups = {{0, "adamw"}, {1, "sgd"}, {2, "adam"}};
    program_.modules.push_back({0, "", "Random"});
    program_.sources = {{0, "random.py:1"}, {1, "random.py:2"}};
    program_.phases.push_back({"micro_batch", {}, {}, {}});
    rows_ = options_.multiple > 1 ? options_.multiple * Between(1, 2) : Between(1, 5);
    Begin();
    for (int i = 0; i < options_.layers; ++i) {
      module_ = static_cast<int32_t>(program_.modules.size());
      program_.modules.push_back({module_, "layers." + std::to_string(i), "Layer"});
      Layer();
    }
    if (Chance(2)) NewParam({Width()}, "unused", true);
    if (Chance(3)) NewParam({Width()}, "unused_frozen", false);
    Loss();
    part_ = Part::kBackward;
    for (size_t i = tape_.size(); i-- > 0;) tape_[i]();
    Finish();
    program_.Compact();
    return std::move(program_);
  }

 private:
  // ---- randomness ----
  int64_t Between(int64_t low, int64_t high) { return low + static_cast<int64_t>(random_() % (high - low + 1)); }
  int64_t Width() {
    return options_.multiple * Between(1, std::max<int64_t>(options_.max_width / options_.multiple, 1));
  }
  bool Chance(int one_in) { return random_() % one_in == 0; }

  // ---- building ----
  Type Contiguous(std::vector<int64_t> sizes, DType dtype) {
    Type type{dtype, {sizes.begin(), sizes.end()}, {}};
    type.strides = program_.ContiguousStrides(type.sizes);
    return type;
  }
  Type Contiguous(std::vector<int64_t> sizes) { return Contiguous(std::move(sizes), options_.dtype); }
  Type Strided(std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    return {options_.dtype, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}};
  }
  std::vector<int64_t> Sizes(ValueId id) {
    std::vector<int64_t> sizes;
    for (const Dim& size : program_.value(id).type.sizes) sizes.push_back(size.value);
    return sizes;
  }
  Op& NewOp(std::string name, std::vector<Arg> args) {
    Op& op = program_.AddOp(std::move(name));
    op.args = std::move(args);
    op.part = part_;
    op.module = module_;
    op.source = static_cast<int32_t>(random_() % 2);
    program_.phases[0].ops.push_back(op.id);
    return op;
  }
  ValueId Emit(std::string name, std::vector<Arg> args, Type type) {
    return program_.AddResult(NewOp(std::move(name), std::move(args)), std::move(type));
  }
  // A view of what `of` views or owns, `offset` elements further.
  ValueId View(std::string name, std::vector<Arg> args, ValueId of, Type type) {
    const Value& value = program_.value(of);
    ValueId root = value.root;
    Dim offset = value.offset;
    return program_.AddView(NewOp(std::move(name), std::move(args)), std::move(type), root, offset);
  }
  static Arg V(ValueId id) { return Arg::Of(id); }
  Arg Ints(std::vector<int64_t> list) {
    std::vector<Arg> items;
    for (int64_t i : list) items.push_back(Arg::Int(i));
    return Arg::List(std::move(items));
  }
  // aten.t as a view with swapped strides.
  ValueId T(ValueId x) {
    const Type& type = program_.value(x).type;
    Type swapped{type.dtype, {type.sizes[1], type.sizes[0]}, {type.strides[1], type.strides[0]}};
    return View("aten.t", {V(x)}, x, std::move(swapped));
  }
  ValueId Mul(ValueId a, Arg b) { return Emit("aten.mul.Tensor", {V(a), std::move(b)}, Contiguous(Sizes(a))); }
  ValueId Mm(ValueId a, ValueId b) { return Emit("aten.mm", {V(a), V(b)}, Contiguous({Sizes(a)[0], Sizes(b)[1]})); }
  ValueId SumRows(ValueId x) { return Emit("aten.sum.dim_IntList", {V(x), Ints({0})}, Contiguous({Sizes(x)[1]})); }

  ValueId NewParam(std::vector<int64_t> sizes, const std::string& role, bool trainable) {
    ValueId id = program_.AddValue(ValueKind::kParam, Contiguous(std::move(sizes))).id;
    Param param;
    param.value = id;
    param.name = "layers." + std::to_string(program_.params.size()) + "." + role;
    param.trainable = trainable;
    if (trainable) param.group = Chance(3) ? static_cast<int32_t>(Between(0, 2)) : 0;
    if (Chance(8)) param.aliases.push_back(param.name + ".tied");
    program_.params.push_back(std::move(param));
    return id;
  }
  ValueId NewParam(std::vector<int64_t> sizes, const std::string& role) {
    return NewParam(std::move(sizes), role, !Chance(7));
  }
  bool Trains(ValueId id) const {
    const Param* param = program_.ParamOf(id);
    return param != nullptr ? param->trainable : program_.value(id).kind == ValueKind::kResult;
  }

  // ---- backward ----
  void AddGrad(ValueId of, ValueId grad) {
    if (!Trains(of)) return;
    auto [place, fresh] = grad_.emplace(of, grad);
    if (!fresh) place->second = Emit("aten.add.Tensor", {V(place->second), V(grad)}, Contiguous(Sizes(of)));
  }
  // The closure gets the gradient of y when there is one.
  void OnBackward(ValueId y, std::function<void(ValueId)> f) {
    int32_t module = module_;
    tape_.push_back([this, y, f = std::move(f), module] {
      auto found = grad_.find(y);
      if (found == grad_.end()) return;
      module_ = module;
      f(found->second);
    });
  }

  // ---- forward ----
  void Begin() {
    int64_t width = Width();
    if (Chance(2)) {
      Type type = Contiguous({rows_}, DType::kI64);
      ValueId tokens = program_.AddValue(ValueKind::kInput, type).id;
      program_.inputs.push_back({tokens, "tokens"});
      int64_t entries = options_.multiple > 1 ? 12 : Between(8, 12);
      ValueId table = NewParam({entries, width}, "embedding", true);
      x_ = Emit("aten.embedding", {V(table), V(tokens)}, Contiguous({rows_, width}));
      OnBackward(x_, [=, this](ValueId g) {
        AddGrad(table, Emit("aten.embedding_dense_backward",
                            {V(g), V(tokens), Arg::Int(entries), Arg::Int(-1), Arg::Bool(false)},
                            Contiguous({entries, width})));
      });
    } else {
      x_ = program_.AddValue(ValueKind::kInput, Contiguous({rows_, width})).id;
      program_.inputs.push_back({x_, "x"});
      Linear();
    }
  }

  void Layer() {
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
        return Linear();
      case 3:
        return Elementwise();
      case 4:
        return Scale();
      case 5:
        return Residual();
      case 6:
        return Tied();
      case 7:
        return Reshape();
      case 8:
        return Transposed();
      case 9:
        return Dropout();
      case 10:
        return BufferUse();
      case 11:
        return Scalar();
      case 12:
        return Shift();
      case 13:
        return Masked();
      case 14:
        return Positions();
      default:
        return TwoBiases();
    }
  }

  void Linear() { Linear(Width()); }
  void Linear(int64_t out) {
    ValueId x = x_;
    int64_t in = Sizes(x)[1];
    ValueId weight = NewParam({out, in}, "weight");
    weights_.push_back(weight);
    x_ = Mm(x, T(weight));
    bool transposed = Chance(2);
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, Mm(g, weight));
      if (!Trains(weight)) return;
      AddGrad(weight, transposed ? T(Mm(T(x), g)) : Mm(T(g), x));
    });
    if (Chance(2)) Bias();
    if (Chance(6)) (void)Mul(x_, Arg::Float(0.5));  // dead
    seen_.push_back(x_);
  }

  void Bias() {
    ValueId x = x_, bias = NewParam({Sizes(x)[1]}, "bias");
    x_ = Emit("aten.add.Tensor", {V(x), V(bias)}, Contiguous(Sizes(x)));
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, g);
      if (Trains(bias)) AddGrad(bias, SumRows(g));
    });
  }

  // The gradient of what is behind is the parameter's own, handed on.
  void Positions() {
    ValueId x = x_, positions = NewParam(Sizes(x), "positions", true);
    x_ = Emit("aten.add.Tensor", {V(x), V(positions)}, Contiguous(Sizes(x)));
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, g);
      AddGrad(positions, g);
    });
  }

  // One value that is the gradient of two parameters.
  void TwoBiases() {
    ValueId x = x_, first = NewParam({Sizes(x)[1]}, "bias", true), second = NewParam({Sizes(x)[1]}, "bias2", true);
    ValueId sum = Emit("aten.add.Tensor", {V(first), V(second)}, Contiguous(Sizes(first)));
    x_ = Emit("aten.add.Tensor", {V(x), V(sum)}, Contiguous(Sizes(x)));
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, g);
      ValueId both = SumRows(g);
      AddGrad(first, both);
      AddGrad(second, both);
    });
  }

  void Elementwise() {
    ValueId x = x_;
    bool relu = Chance(2);
    ValueId y = x_ = Emit(relu ? "aten.relu" : "aten.tanh", {V(x)}, Contiguous(Sizes(x)));
    OnBackward(y, [=, this](ValueId g) {
      if (relu) {
        AddGrad(x, Emit("aten.threshold_backward", {V(g), V(y), Arg::Int(0)}, Contiguous(Sizes(x))));
      } else {
        AddGrad(x, Emit("aten.tanh_backward", {V(g), V(y)}, Contiguous(Sizes(x))));
      }
    });
  }

  void Scale() {
    ValueId x = x_, scale = NewParam({Sizes(x)[1]}, "scale");
    x_ = Mul(x, V(scale));
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, Mul(g, V(scale)));
      if (Trains(scale)) AddGrad(scale, SumRows(Mul(g, V(x))));
    });
  }

  void Scalar() {
    ValueId x = x_, scalar = NewParam({}, "scalar", true);
    x_ = Mul(x, V(scalar));
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, Mul(g, V(scalar)));
      AddGrad(scalar, Emit("aten.sum", {V(Mul(g, V(x)))}, Contiguous({})));
    });
  }

  // A number is added, which is no part of a sum over ranks.
  void Shift() {
    ValueId x = x_;
    x_ = Emit(Chance(2) ? "aten.add.Tensor" : "aten.sub.Tensor", {V(x), Arg::Float(0.25)}, Contiguous(Sizes(x)));
    OnBackward(x_, [=, this](ValueId g) { AddGrad(x, g); });
  }

  // Zero in some places, as attention's masks make it.
  void Masked() {
    ValueId x = x_, first = NewParam({Sizes(x)[1]}, "mask", false);
    ValueId mask = Emit("aten.gt.Scalar", {V(first), Arg::Int(0)}, Contiguous(Sizes(first), DType::kB8));
    auto kept = [=, this](ValueId of) {
      ValueId zero = Emit("aten.full", {Ints({}), Arg::Int(0)}, Contiguous({}));
      program_.op(program_.value(zero).def).named = {{"dtype", Arg::Word(std::string(DTypeName(options_.dtype)))}};
      return Emit("aten.where.self", {V(mask), V(of), V(zero)}, Contiguous(Sizes(x)));
    };
    x_ = kept(x);
    OnBackward(x_, [=, this](ValueId g) { AddGrad(x, kept(g)); });
  }

  void Residual() {
    for (size_t i = seen_.size(); i-- > 0;) {
      ValueId x = x_, other = seen_[i];
      if (Sizes(other) != Sizes(x)) continue;
      x_ = Emit("aten.add.Tensor", {V(x), V(other)}, Contiguous(Sizes(x)));
      OnBackward(x_, [=, this](ValueId g) {
        AddGrad(x, g);
        AddGrad(other, g);
      });
      return;
    }
    Elementwise();
  }

  // An earlier weight again, from the other side.
  void Tied() {
    for (ValueId weight : weights_) {
      ValueId x = x_;
      if (Sizes(weight)[0] != Sizes(x)[1]) continue;
      x_ = Mm(x, weight);
      OnBackward(x_, [=, this](ValueId g) {
        AddGrad(x, Mm(g, T(weight)));
        if (Trains(weight)) AddGrad(weight, Mm(T(x), g));
      });
      return;
    }
    Linear();
  }

  void Reshape() {
    ValueId x = x_;
    std::vector<int64_t> sizes = Sizes(x);
    int64_t count = sizes[0] * sizes[1];
    ValueId flat = View("aten.view", {V(x), Ints({count})}, x, Contiguous({count}));
    ValueId scaled = Mul(flat, Arg::Float(1.5));
    x_ = View("view", {V(scaled)}, scaled, Contiguous(sizes));
    OnBackward(x_, [=, this](ValueId g) {
      // A broadcast or transposed gradient cannot be viewed as one row of elements.
      ValueId whole = Emit("aten.clone", {V(g)}, Contiguous(sizes));
      ValueId row = View("aten.view", {V(whole), Ints({count})}, whole, Contiguous({count}));
      ValueId back = Mul(row, Arg::Float(1.5));
      AddGrad(x, View("aten.view", {V(back), Ints(sizes)}, back, Contiguous(sizes)));
    });
  }

  // Works on the transpose, whose results keep its strides, as in PyTorch.
  void Transposed() {
    ValueId x = x_;
    int64_t n = Sizes(x)[0], d = Sizes(x)[1];
    ValueId column = NewParam({d, 1}, "column");
    ValueId moved = Emit("aten.add.Tensor", {V(T(x)), V(column)}, Strided({d, n}, {1, d}));
    x_ = T(moved);
    OnBackward(x_, [=, this](ValueId g) {
      AddGrad(x, g);
      if (!Trains(column)) return;
      AddGrad(column, Emit("aten.sum.dim_IntList", {V(T(g)), Ints({1}), Arg::Bool(true)}, Contiguous({d, 1})));
    });
  }

  void Dropout() {
    if (!options_.random_ops) return Elementwise();
    ValueId x = x_;
    ValueId mask = Emit("aten.bernoulli.p", {V(x), Arg::Float(0.75)}, Contiguous(Sizes(x)));
    program_.op(program_.value(mask).def).rng = next_stream_++;
    ValueId scaled = Emit("aten.div.Tensor", {V(mask), Arg::Float(0.75)}, Contiguous(Sizes(x)));
    x_ = Mul(x, V(scaled));
    OnBackward(x_, [=, this](ValueId g) { AddGrad(x, Mul(g, V(scaled))); });
  }

  // Statistics that are read before or after they change, by assignment or in place.
  void BufferUse() {
    if (!options_.buffers) return Elementwise();
    ValueId x = x_;
    std::vector<int64_t> sizes = {Sizes(x)[1]};
    ValueId buffer = program_.AddValue(ValueKind::kBuffer, Contiguous(sizes)).id;
    program_.buffers.push_back({buffer, "stats." + std::to_string(program_.buffers.size()), !Chance(3)});
    bool read_first = Chance(2);
    ValueId use = x;
    auto read = [&] { use = Emit("aten.add.Tensor", {V(x), V(buffer)}, Contiguous(Sizes(x))); };
    if (read_first) read();
    ValueId sums = SumRows(x);
    if (Chance(2)) {
      ValueId kept = Mul(buffer, Arg::Float(0.9));
      Op& op = NewOp("aten.add.Tensor", {V(kept), V(sums)});
      op.named.push_back({"alpha", Arg::Float(0.1)});
      ValueId next = program_.AddResult(op, Contiguous(sizes));
      NewOp("assign", {V(buffer), V(next)});
    } else {
      Op& op = NewOp("aten.add_.Tensor", {V(buffer), V(sums)});
      op.named.push_back({"alpha", Arg::Float(0.01)});
      op.writes = {buffer};
      if (Chance(2)) program_.AddView(op, Contiguous(sizes), buffer, 0);
    }
    if (!read_first) read();
    x_ = use;
    OnBackward(x_, [=, this](ValueId g) { AddGrad(x, g); });
  }

  // ---- loss and end ----
  void CrossEntropy() {
    Linear(12);
    module_ = 0;
    const ValueId x = x_;
    const ValueId labels = program_.AddValue(ValueKind::kInput, Contiguous({rows_}, DType::kI64)).id;
    program_.inputs.push_back({labels, "labels"});
    const ValueId y = Emit("aten._log_softmax", {V(x), Arg::Int(1), Arg::Bool(false)}, Contiguous(Sizes(x)));
    Op& op = NewOp("aten.nll_loss_forward", {V(y), V(labels), Arg::None(), Arg::Int(1), Arg::Int(-100)});
    const ValueId loss = program_.AddResult(op, Contiguous({})), weight = program_.AddResult(op, Contiguous({}));
    NewOp("output", {V(loss)}).SetAttr("name", Arg::String("loss"));
    tape_.push_back([=, this] {
      const ValueId one = Emit("aten.ones_like", {V(loss)}, Contiguous({}));
      const ValueId g =
          Emit("aten.nll_loss_backward", {V(one), V(y), V(labels), Arg::None(), Arg::Int(1), Arg::Int(-100), V(weight)},
               Contiguous(Sizes(x)));
      AddGrad(x,
              Emit("aten._log_softmax_backward_data",
                   {V(g), V(y), Arg::Int(1), Arg::Word(std::string(DTypeName(options_.dtype)))}, Contiguous(Sizes(x))));
    });
  }

  void Loss() {
    if (options_.cross_entropy) return CrossEntropy();
    module_ = 0;
    ValueId x = x_;
    std::vector<int64_t> sizes = Sizes(x);
    ValueId target = program_.AddValue(ValueKind::kInput, Contiguous(sizes)).id;
    program_.inputs.push_back({target, "target"});
    ValueId difference = Emit("aten.sub.Tensor", {V(x), V(target)}, Contiguous(sizes));
    ValueId square = Mul(difference, V(difference));
    ValueId total = Emit("aten.sum", {V(square)}, Contiguous({}));
    ValueId divisor = program_.AddValue(ValueKind::kConst, Contiguous({})).id;
    program_.consts.push_back({divisor, "count", Arg::List({Arg::Float(static_cast<double>(sizes[0] * sizes[1]))})});
    ValueId loss = Emit("aten.div.Tensor", {V(total), V(divisor)}, Contiguous({}));
    ValueId penalized = kNone;
    if (Chance(3)) {
      // The gradient of the penalty is a number broadcast by a stride of 0.
      penalized = NewParam({Width()}, "penalty", true);
      ValueId penalty = Emit("aten.sum", {V(penalized)}, Contiguous({}));
      loss = Emit("aten.add.Tensor", {V(loss), V(penalty)}, Contiguous({}));
    }
    NewOp("output", {V(loss)}).SetAttr("name", Arg::String("loss"));
    if (Chance(2)) NewOp("output", {V(x)}).SetAttr("name", Arg::String("logits"));
    tape_.push_back([=, this] {
      ValueId one = Emit("aten.ones_like", {V(loss)}, Contiguous({}));
      if (penalized != kNone) {
        int64_t count = Sizes(penalized)[0];
        AddGrad(penalized, View("aten.expand", {V(one), Ints({count})}, one, Strided({count}, {0})));
      }
      ValueId share = Emit("aten.div.Tensor", {V(one), V(divisor)}, Contiguous({}));
      ValueId spread = View("aten.expand", {V(share), Ints(sizes)}, share, Strided(sizes, {0, 0}));
      AddGrad(x, Mul(spread, V(Mul(difference, Arg::Int(2)))));
    });
  }

  void Finish() {
    part_ = Part::kBackward;
    module_ = 0;
    for (const Param& param : program_.params) {
      auto found = grad_.find(param.value);
      if (param.trainable && found != grad_.end()) NewOp("grad", {V(param.value), V(found->second)});
    }
  }

  const RandomProgramOptions options_;
  std::mt19937_64 random_;
  Program program_;
  Part part_ = Part::kForward;
  int32_t module_ = 0;
  int64_t rows_ = 1;
  int64_t next_stream_ = 0;
  ValueId x_ = kNone;                    // the activation at hand, [rows, width]
  std::vector<ValueId> weights_, seen_;  // to be used again
  std::vector<std::function<void()>> tape_;
  std::map<ValueId, ValueId> grad_;  // of values and parameters
};

}  // namespace

Program RandomProgram(const RandomProgramOptions& options) {
  return Generator(options).Run();
}

}  // namespace interlace::testing
