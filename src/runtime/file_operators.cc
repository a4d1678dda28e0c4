#include "runtime/file_operators.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/masked_fill.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#include "runtime/allocator.h"

namespace interlace {

namespace {

struct List {
  const char* rule;
  const char* names;
};
constexpr List kLists[] = {
#include "runtime/file_operators.inc"
};

const std::map<std::string, std::string>& Rules() {
  static const std::map<std::string, std::string> rules = [] {
    std::map<std::string, std::string> out;
    for (const List& list : kLists) {
      std::istringstream names(list.names);
      for (std::string name; names >> name;) out["aten::" + name] = list.rule;
    }
    return out;
  }();
  return rules;
}

// Integers that are sizes, strides, dimensions: what kernels compute from them stays within 64 bits.
constexpr int64_t kLargest = int64_t{1} << 40;
using Problem = std::optional<std::string>;

class Rule {
 public:
  Rule(const BuildContext& context, const Op& op, const c10::FunctionSchema& schema)
      : context_(context), op_(op), schema_(schema) {}

  std::vector<ValueCheck> values;

  Problem Check(const std::string& rule) {
    for (const c10::Argument& argument : schema_.arguments()) {
      if (argument.is_out()) return "it writes to an argument and gives it its size";
    }
    if (Problem problem = Integers()) return problem;
    if (rule == "sound") return std::nullopt;
    using Member = Problem (Rule::*)();
    static const std::map<std::string, Member> rules = {
        {"division", &Rule::Division},
        {"batch norm", &Rule::BatchNorm},
        {"batch norm backward", &Rule::BatchNormBackward},
        {"group norm", &Rule::GroupNorm},
        {"group norm backward", &Rule::GroupNormBackward},
        {"layer norm backward", &Rule::LayerNormBackward},
        {"softmax backward", &Rule::SoftmaxBackward},
        {"embedding backward", &Rule::EmbeddingBackward},
        {"loss", &Rule::Loss},
        {"loss backward", &Rule::LossBackward},
        {"pool backward", &Rule::PoolBackward},
        {"convolution backward", &Rule::ConvolutionBackward},
        {"attention", &Rule::Attention},
        {"attention backward", &Rule::AttentionBackward},
        {"unfold backward", &Rule::UnfoldBackward},
        {"dimensions", &Rule::Dimensions},
        {"scales", &Rule::Scales},
    };
    return (this->*rules.at(rule))();
  }

 private:
  // ---- the op's arguments, by their place in the schema ----
  const Arg* At(std::string_view name) const {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() != name) continue;
      if (i < op_.args.size() && !arguments[i].kwarg_only()) return &op_.args[i];
      for (const NamedArg& named : op_.named) {
        if (named.name == name) return &named.arg;
      }
    }
    return nullptr;
  }
  // nullptr: it is none.
  const Geometry* Tensor(std::string_view name) const {
    const Arg* arg = At(name);
    return arg != nullptr && arg->kind == Arg::Kind::kValue ? &context_.geometry[arg->value] : nullptr;
  }
  int64_t Int(std::string_view name, int64_t otherwise = 0) const {
    const Arg* arg = At(name);
    return arg != nullptr && arg->kind == Arg::Kind::kInt ? arg->integer.value : otherwise;
  }
  bool Bool(std::string_view name) const {
    const Arg* arg = At(name);
    return arg != nullptr && (arg->kind == Arg::Kind::kBool ? arg->boolean : Int(name) != 0);
  }
  std::vector<int64_t> Ints(std::string_view name) const {
    std::vector<int64_t> out;
    const Arg* arg = At(name);
    if (arg == nullptr) return out;
    if (arg->kind == Arg::Kind::kInt) return {arg->integer.value};
    for (const Arg& item : arg->list) {
      if (item.kind == Arg::Kind::kInt) out.push_back(item.integer.value);
    }
    return out;
  }
  // -1: it is beyond what a program has.
  static int64_t Product(const std::vector<int64_t>& sizes) {
    int64_t product = 1;
    for (int64_t size : sizes) {
      if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
    }
    return product;
  }
  static bool Same(const Geometry* a, const Geometry* b) {
    return a != nullptr && b != nullptr && a->sizes == b->sizes;
  }

  // ---- rules ----
  Problem Integers() const {
    const bool slices = schema_.name().starts_with("aten::slice");
    for (const c10::Argument& argument : schema_.arguments()) {
      const Arg* arg = At(argument.name());
      if (arg == nullptr) continue;
      const std::string type = argument.real_type()->str();
      if (type.find("Tensor") != std::string::npos && arg->kind == Arg::Kind::kNone && type == "Tensor")
        return "the argument \"" + argument.name() + "\" needs a value";
      if (type.find("int") == std::string::npos && type.find("Int") == std::string::npos) continue;
      if (slices && (argument.name() == "start" || argument.name() == "end")) continue;  // cut off by the operator
      for (int64_t number : Ints(argument.name())) {
        if (number > kLargest || number < -kLargest)
          return "the argument \"" + argument.name() + "\" is " + std::to_string(number);
      }
    }
    return std::nullopt;
  }

  // The smallest integer by -1 is a trap of the processor.
  Problem Division() {
    const Geometry* of = Tensor("self");
    const Arg* by = At("other");
    if (by == nullptr || (of != nullptr && !c10::isIntegralType(of->dtype, true))) return std::nullopt;
    if (by->kind == Arg::Kind::kInt && by->integer.value < 0) return "integers are divided by a negative number";
    if (by->kind == Arg::Kind::kValue && c10::isIntegralType(context_.geometry[by->value].dtype, true))
      values.push_back({by->value, 0, std::numeric_limits<int64_t>::max()});
    return std::nullopt;
  }

  Problem OfChannels(const Geometry* input, std::initializer_list<const char*> names, bool or_empty = false) {
    if (input == nullptr || input->sizes.size() < 2) return "its input has no channels";
    for (const char* name : names) {
      const Geometry* g = Tensor(name);
      if (g == nullptr || (or_empty && g->elements == 0)) continue;
      if (g->sizes.size() != 1 || g->elements != input->sizes[1])
        return "\"" + std::string(name) + "\" does not have one number for each channel";
    }
    return std::nullopt;
  }
  Problem BatchNorm() {
    if (!Bool("training") && (Tensor("running_mean") == nullptr || Tensor("running_var") == nullptr))
      return "it needs running statistics";
    return OfChannels(Tensor("input"), {"weight", "bias", "running_mean", "running_var"});
  }
  Problem BatchNormBackward() {
    const Geometry* input = Tensor("input");
    if (!Same(Tensor("grad_out"), input)) return "the gradient does not have the sizes of the input";
    if (!Bool("train") && (Tensor("running_mean") == nullptr || Tensor("running_var") == nullptr))
      return "it needs running statistics";
    if (Bool("train") && (Tensor("save_mean") == nullptr || Tensor("save_invstd") == nullptr))
      return "it needs the statistics of its batch";
    if (Problem problem = OfChannels(input, {"weight", "running_mean", "running_var"})) return problem;
    return OfChannels(input, {"save_mean", "save_invstd"}, /*or_empty=*/!Bool("train"));
  }

  Problem Groups() {
    const Geometry* input = Tensor("input");
    const int64_t channels = Int("C"), groups = Int("group");
    if (input == nullptr || input->elements != Product({Int("N"), channels, Int("HxW")}))
      return "its sizes are not those of the input";
    if (channels <= 0 || groups <= 0 || channels % groups != 0) return "the groups do not divide the channels";
    for (const char* name : {"weight", "bias"}) {
      const Geometry* g = Tensor(name);
      if (g != nullptr && g->elements != channels)
        return "\"" + std::string(name) + "\" does not have one number for each channel";
    }
    return std::nullopt;
  }
  Problem GroupNorm() { return Groups(); }
  Problem GroupNormBackward() {
    if (!Same(Tensor("grad_out"), Tensor("input"))) return "the gradient does not have the sizes of the input";
    for (const char* name : {"mean", "rstd"}) {
      const Geometry* g = Tensor(name);
      if (g == nullptr || g->elements != Product({Int("N"), Int("group")}))
        return "\"" + std::string(name) + "\" does not have one number for each group";
    }
    return Groups();
  }

  Problem LayerNormBackward() {
    const Geometry* input = Tensor("input");
    const int64_t row = Product(Ints("normalized_shape"));
    if (!Same(Tensor("grad_out"), input)) return "the gradient does not have the sizes of the input";
    if (row <= 0 || input->elements % row != 0) return "the input is not of whole rows";
    for (const char* name : {"mean", "rstd"}) {
      const Geometry* g = Tensor(name);
      if (g == nullptr || g->elements != input->elements / row)
        return "\"" + std::string(name) + "\" does not have one number for each row";
    }
    for (const char* name : {"weight", "bias"}) {
      const Geometry* g = Tensor(name);
      if (g != nullptr && g->elements != row) return "\"" + std::string(name) + "\" is not a row";
    }
    return std::nullopt;
  }

  Problem SoftmaxBackward() {
    const bool same = Same(Tensor("grad_output"), Tensor("output"));
    return same ? Problem() : "the gradient does not have the sizes of the output";
  }

  Problem EmbeddingBackward() {
    const Geometry *grad = Tensor("grad_output"), *indices = Tensor("indices");
    if (grad == nullptr || indices == nullptr || grad->sizes.empty()) return "it needs a gradient and indices";
    if (grad->elements != Product({indices->elements, grad->sizes.back()}))
      return "the gradient has no row for each index";
    values.push_back({At("indices")->value, 0, Int("num_weights"), Int("padding_idx", -1)});
    return std::nullopt;
  }

  Problem Targets() {
    const Geometry *self = Tensor("self"), *target = Tensor("target"), *weight = Tensor("weight");
    if (self == nullptr || target == nullptr || self->sizes.empty()) return "it needs values and targets";
    const int64_t classes = self->sizes[self->sizes.size() > 1 ? 1 : 0];
    if (weight != nullptr && weight->elements != classes) return "there is no weight for each class";
    if (target->elements != Product({self->elements == 0 ? 0 : self->elements / std::max<int64_t>(classes, 1)}))
      return "there is no target for each row";
    values.push_back({At("target")->value, 0, classes, Int("ignore_index", -100)});
    return std::nullopt;
  }
  Problem Loss() { return Targets(); }
  Problem LossBackward() {
    const Geometry *grad = Tensor("grad_output"), *target = Tensor("target"), *total = Tensor("total_weight");
    if (total == nullptr || total->elements != 1 || grad == nullptr) return "its gradient or total weight is no number";
    const bool none = Int("reduction", 1) == 0;
    if (grad->elements != (none && target != nullptr ? target->elements : 1)) return "the gradient has the wrong size";
    return Targets();
  }

  Problem PoolBackward() {
    const Geometry *grad = Tensor("grad_output"), *self = Tensor("self"), *indices = Tensor("indices");
    if (!Same(grad, indices)) return "there is no index for each gradient";
    if (self == nullptr || self->sizes.size() < 3 || self->sizes.size() > 4 ||
        grad->sizes.size() != self->sizes.size() ||
        !std::equal(self->sizes.begin(), self->sizes.end() - 2, grad->sizes.begin()))
      return "the gradient is not of the planes of the input";
    const size_t dims = self->sizes.size();
    values.push_back({At("indices")->value, 0, Product({self->sizes[dims - 2], self->sizes[dims - 1]})});
    return std::nullopt;
  }

  Problem ConvolutionBackward() {
    const Geometry *grad = Tensor("grad_output"), *input = Tensor("input"), *weight = Tensor("weight");
    const int64_t groups = Int("groups");
    if (grad == nullptr || input == nullptr || weight == nullptr || groups <= 0)
      return "it needs a gradient, input and weight";
    const size_t dims = input->sizes.size();
    if (dims < 3 || grad->sizes.size() != dims || weight->sizes.size() != dims)
      return "its operands have unequal dimensions";
    if (grad->dtype != input->dtype || weight->dtype != input->dtype) return "its operands have unequal dtypes";
    const bool transposed = Bool("transposed");
    const int64_t in = transposed ? weight->sizes[0] : Product({weight->sizes[1], groups});
    const int64_t out = transposed ? Product({weight->sizes[1], groups}) : weight->sizes[0];
    if (input->sizes[0] != grad->sizes[0] || input->sizes[1] != in || grad->sizes[1] != out ||
        weight->sizes[0] % groups != 0)
      return "its channels do not fit";
    const auto of = [&](const char* name, size_t i) {
      const std::vector<int64_t> list = Ints(name);
      return list.empty() ? int64_t{-1} : list[std::min(i, list.size() - 1)];
    };
    for (size_t i = 0; i + 2 < dims; ++i) {
      const int64_t stride = of("stride", i), padding = of("padding", i), dilation = of("dilation", i);
      const int64_t kernel = weight->sizes[i + 2], extra = of("output_padding", i);
      if (stride <= 0 || padding < 0 || dilation <= 0 || kernel <= 0 || extra < 0 || stride > 1 << 20 ||
          padding > 1 << 20 || dilation > 1 << 20 || kernel > 1 << 20 || extra > 1 << 20)
        return "its strides, paddings or dilations cannot be";
      const int64_t reach = dilation * (kernel - 1), size = input->sizes[i + 2];
      const int64_t wanted = transposed ? (size - 1) * stride - 2 * padding + reach + extra + 1
                                        : (size + 2 * padding - reach - 1) / stride + 1;
      if (grad->sizes[i + 2] != wanted) return "the gradient is not of the size that the convolution gives";
    }
    return std::nullopt;
  }

  Problem Attention() {
    const Geometry *q = Tensor("query"), *k = Tensor("key"), *v = Tensor("value");
    for (const Geometry* g : {q, k, v}) {
      if (g == nullptr || g->sizes.size() != 4 || g->dtype != q->dtype || g->elements == 0)
        return "it needs queries, keys and values of four dimensions and one dtype";
    }
    if (k->sizes != v->sizes || k->sizes[0] != q->sizes[0] || k->sizes[3] != q->sizes[3] ||
        q->sizes[1] % k->sizes[1] != 0)
      return "its keys and values do not fit the queries";
    const Geometry* mask = Tensor("attn_mask");
    if (mask == nullptr) return std::nullopt;
    const int64_t full[] = {q->sizes[0], q->sizes[1], q->sizes[2], k->sizes[2]};
    const size_t dims = mask->sizes.size();
    if (dims != 2 && dims != 4) return "its mask has neither two nor four dimensions";
    for (size_t i = 0; i < dims; ++i) {
      if (mask->sizes[i] != 1 && mask->sizes[i] != full[4 - dims + i]) return "its mask does not fit";
    }
    return std::nullopt;
  }
  Problem AttentionBackward() {
    if (Problem problem = Attention()) return problem;
    const Geometry *q = Tensor("query"), *out = Tensor("out"), *grad = Tensor("grad_out"), *sums = Tensor("logsumexp");
    if (!Same(out, q) || !Same(grad, q) || out->dtype != q->dtype || grad->dtype != q->dtype)
      return "the gradient and the output are not of the query's type";
    if (sums == nullptr || sums->sizes.size() != 3 ||
        sums->elements != Product({q->sizes[0], q->sizes[1], q->sizes[2]}))
      return "there is no logsumexp for each row";
    return std::nullopt;
  }

  Problem UnfoldBackward() {
    std::vector<int64_t> sizes = Ints("input_sizes");
    const int64_t dims = static_cast<int64_t>(sizes.size()), size = Int("size"), step = Int("step");
    const int64_t dim = Int("dim") < 0 ? Int("dim") + dims : Int("dim");
    const Geometry* grad = Tensor("grad_in");
    if (grad == nullptr || dim < 0 || dim >= dims || step <= 0 || size <= 0 || size > sizes[dim])
      return "its windows cannot be";
    sizes[dim] = (sizes[dim] - size) / step + 1;
    sizes.push_back(size);
    return std::equal(sizes.begin(), sizes.end(), grad->sizes.begin(), grad->sizes.end())
               ? Problem()
               : "the gradient is not of the windows";
  }

  Problem Dimensions() {
    const Geometry* self = Tensor("self");
    const std::vector<int64_t> dims = Ints("dim");
    std::set<int64_t> once(dims.begin(), dims.end());
    if (self == nullptr || dims.empty() || once.size() != dims.size() || self->elements == 0 || *once.begin() < 0 ||
        *once.rbegin() >= static_cast<int64_t>(self->sizes.size()))
      return "its dimensions are not those of the operand";
    const int64_t norm = Int("normalization");
    return norm < 0 || norm > 2 ? Problem("there is no such normalization") : std::nullopt;
  }

  // Places are computed from them in floating point.
  Problem Scales() {
    const auto sound = [](const Arg& arg) {
      const double number = arg.kind == Arg::Kind::kFloat ? arg.real
                            : arg.kind == Arg::Kind::kInt ? static_cast<double>(arg.integer.value)
                                                          : 1.0;
      return number >= 1.0 / 1024 && number <= 1024;
    };
    for (const c10::Argument& argument : schema_.arguments()) {
      const Arg* arg = At(argument.name());
      if (arg == nullptr || !std::string_view(argument.name()).starts_with("scale")) continue;
      if (!sound(*arg) || !std::all_of(arg->list.begin(), arg->list.end(), sound)) return "its scale is out of range";
    }
    return std::nullopt;
  }

  const BuildContext& context_;
  const Op& op_;
  const c10::FunctionSchema& schema_;
};

}  // namespace

Result<std::vector<ValueCheck>> CheckFileOperator(const BuildContext& context, const Op& op,
                                                  const c10::FunctionSchema& schema) {
  const auto found = Rules().find(schema.name());
  if (found == Rules().end()) {
    return OpError(context, op,
                   schema.name() + " is not on the list of operators that programs from files may use; it runs in "
                                   "programs of models that were captured here, or with --trust-program");
  }
  Rule rule(context, op, schema);
  if (const Problem problem = rule.Check(found->second))
    return OpError(context, op, schema.name() + " of a program from a file: " + *problem);
  return std::move(rule.values);
}

void CheckValues(const Frame& frame, const std::vector<ValueCheck>& checks) {
  ArenaHook::Outside outside;
  for (const ValueCheck& check : checks) {
    at::Tensor tensor = frame.slots[check.value];
    TORCH_CHECK(c10::isIntegralType(tensor.scalar_type(), true), "%", check.value, " holds no integers");
    if (tensor.numel() == 0) continue;
    tensor = tensor.toType(at::kLong);
    if (check.except) tensor = tensor.masked_fill(tensor.eq(*check.except), check.low);
    const auto [low, high] = at::aminmax(tensor);
    TORCH_CHECK(low.item<int64_t>() >= check.low && high.item<int64_t>() < check.high, "%", check.value, " holds ",
                low.item<int64_t>() < check.low ? low.item<int64_t>() : high.item<int64_t>(), ", which is not in ",
                check.low, "..", check.high - 1);
  }
}

std::vector<std::string> FileOperators() {
  std::vector<std::string> out;
  for (const auto& [name, rule] : Rules()) out.push_back(name);
  return out;
}

}  // namespace interlace
