#include "runtime/op_schema.h"

#include <ATen/core/List.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>

#include "base/suggest.h"

namespace interlace {

namespace {

at::Tensor WrappedNumber(const c10::Scalar& number) {
  at::Tensor tensor = at::scalar_tensor(number, c10::TensorOptions().dtype(number.type()).device(c10::kCPU));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// A dtype, layout or memory format, by its word or number; nullopt: there is no such one, and kernels would look it up
// in tables all the same.
std::optional<int64_t> EnumOf(const Arg& arg, c10::TypeKind kind) {
  const bool word = arg.kind == Arg::Kind::kWord;
  const int64_t number = arg.kind == Arg::Kind::kInt ? arg.integer.value : -1;
  if (kind == c10::TypeKind::ScalarTypeType) {
    if (word) {
      const auto dtype = ParseDType(arg.text);
      return dtype ? std::optional(static_cast<int64_t>(ScalarTypeOf(*dtype))) : std::nullopt;
    }
    const bool known = number >= 0 && number < static_cast<int64_t>(c10::ScalarType::Undefined) &&
                       DTypeOf(static_cast<c10::ScalarType>(number)).has_value();
    return known ? std::optional(number) : std::nullopt;
  }
  if (kind == c10::TypeKind::LayoutType) {
    const auto strided = static_cast<int64_t>(c10::Layout::Strided);
    return (word ? arg.text == "strided" : number == strided) ? std::optional(strided) : std::nullopt;
  }
  constexpr std::string_view kFormats[] = {"contiguous", "preserve", "channels_last", "channels_last_3d"};
  for (int64_t i = 0; i < 4; ++i) {
    if (word ? arg.text == kFormats[i] : number == i) return i;
  }
  return std::nullopt;
}

// Where the type is an int: capture writes dtypes and formats as words, and the schema may have them as numbers.
std::optional<int64_t> WordAsInt(const Arg& arg) {
  for (const c10::TypeKind kind :
       {c10::TypeKind::ScalarTypeType, c10::TypeKind::MemoryFormatType, c10::TypeKind::LayoutType}) {
    if (const auto value = EnumOf(arg, kind)) return value;
  }
  return std::nullopt;
}

bool NamesEnum(std::string_view argument) {
  return argument == "dtype" || argument == "layout" || argument == "memory_format" || argument == "input_dtype" ||
         argument == "out_dtype";
}

c10::TypeKind EnumKind(std::string_view argument) {
  return argument == "layout"          ? c10::TypeKind::LayoutType
         : argument == "memory_format" ? c10::TypeKind::MemoryFormatType
                                       : c10::TypeKind::ScalarTypeType;
}

std::optional<c10::Scalar> NumberOf(const Arg& arg) {
  switch (arg.kind) {
    case Arg::Kind::kInt:
      return c10::Scalar(arg.integer.value);
    case Arg::Kind::kFloat:
      return c10::Scalar(arg.real);
    case Arg::Kind::kBool:
      return c10::Scalar(arg.boolean);
    default:
      return std::nullopt;
  }
}

bool IsTensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType;
}

const c10::Type* Unwrap(const c10::Type& type, bool* optional) {
  *optional = type.kind() == c10::TypeKind::OptionalType;
  return *optional ? type.expectRef<c10::OptionalType>().getElementType().get() : &type;
}

template <typename T>
c10::IValue ListOf(const std::vector<c10::IValue>& values, c10::List<T> list) {
  for (const c10::IValue& v : values) list.push_back(v.to<T>());
  return c10::IValue(std::move(list));
}

// A literal that is no tensor, by the type the schema wants. nullopt: it does not fit.
std::optional<c10::IValue> Convert(const Arg& arg, const c10::Type& wanted, c10::Device device) {
  bool optional = false;
  const c10::Type& type = *Unwrap(wanted, &optional);
  if (arg.kind == Arg::Kind::kNone) {
    const bool fits = optional || type.kind() == c10::TypeKind::NoneType || type.kind() == c10::TypeKind::GeneratorType;
    return fits ? std::optional(c10::IValue()) : std::nullopt;
  }
  switch (type.kind()) {
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      if (const auto value = EnumOf(arg, type.kind())) return c10::IValue(*value);
      return std::nullopt;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (arg.kind == Arg::Kind::kInt) return c10::IValue(arg.integer.value);
      if (arg.kind == Arg::Kind::kBool) return c10::IValue(static_cast<int64_t>(arg.boolean));
      if (arg.kind == Arg::Kind::kWord) {
        if (const auto value = WordAsInt(arg)) return c10::IValue(*value);
      }
      return std::nullopt;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      if (const auto number = NumberOf(arg)) return c10::IValue(number->toDouble());
      return std::nullopt;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      if (arg.kind == Arg::Kind::kBool) return c10::IValue(arg.boolean);
      if (arg.kind == Arg::Kind::kInt) return c10::IValue(arg.integer.value != 0);
      return std::nullopt;
    case c10::TypeKind::NumberType:
      if (const auto number = NumberOf(arg)) return c10::IValue(*number);
      return std::nullopt;
    case c10::TypeKind::StringType:
      if (arg.kind == Arg::Kind::kString || arg.kind == Arg::Kind::kWord) return c10::IValue(arg.text);
      return std::nullopt;
    case c10::TypeKind::DeviceObjType:
      return c10::IValue(device);  // one device: whatever the capture ran on
    case c10::TypeKind::ListType:
      break;
    default:
      return std::nullopt;
  }
  const c10::Type& element = *type.expectRef<c10::ListType>().getElementType();
  std::vector<Arg> single;
  if (arg.kind != Arg::Kind::kList) single.push_back(arg);  // `int[1] dim` accepts a bare number
  const std::vector<Arg>& items = arg.kind == Arg::Kind::kList ? arg.list : single;
  std::vector<c10::IValue> values;
  for (const Arg& item : items) {
    auto value = Convert(item, element, device);
    if (!value) return std::nullopt;
    values.push_back(std::move(*value));
  }
  switch (element.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ListOf(values, c10::List<int64_t>());
    case c10::TypeKind::FloatType:
      return ListOf(values, c10::List<double>());
    case c10::TypeKind::BoolType:
      return ListOf(values, c10::List<bool>());
    default: {
      c10::impl::GenericList list(type.expectRef<c10::ListType>().getElementType());
      for (c10::IValue& v : values) list.push_back(std::move(v));
      return c10::IValue(std::move(list));
    }
  }
}

const std::vector<c10::OperatorName>& AllOperators() {
  static const std::vector<c10::OperatorName> names = c10::Dispatcher::singleton().getAllOpNames();
  return names;
}

Error UnknownOperator(const BuildContext& context, const Op& op, const c10::OperatorName& wanted) {
  std::vector<std::string_view> names;
  std::string overloads;
  for (const c10::OperatorName& name : AllOperators()) {
    if (name.name == wanted.name)
      overloads += (overloads.empty() ? "" : ", ") + (name.overload_name.empty() ? "(none)" : name.overload_name);
    if (name.overload_name.empty() || names.empty() || names.back() != name.name) names.push_back(name.name);
  }
  if (!overloads.empty()) {
    return OpError(context, op, wanted.name + " has no overload \"" + wanted.overload_name + "\"; it has " + overloads);
  }
  return OpError(context, op,
                 "torch has no operator " + wanted.name + DidYouMean(wanted.name, names) +
                     " (a library that registers it must be imported first)");
}

// Of any program: what runs computes tensors from tensors, within their storages.
const char* WhyRefused(std::string_view name) {
  constexpr std::string_view kNever[] = {
      "aten::set",      "aten::set_",          "aten::set_data",        "aten::resize",
      "aten::resize_",  "aten::resize_as",     "aten::resize_as_",      "aten::_resize_output",
      "aten::data_ptr", "aten::record_stream", "aten::_resize_output_", "inductor::_reinterpret_tensor"};
  if (name == "aten::from_file") return "programs may not read files";
  if (std::find(std::begin(kNever), std::end(kNever), name) != std::end(kNever))
    return "programs may not change where storages lie and end";
  return nullptr;
}

}  // namespace

c10::OperatorName OperatorNameOf(const std::string& name) {
  const size_t first = name.find('.');
  const size_t second = name.find('.', first + 1);
  std::string overload = second == std::string::npos ? "" : name.substr(second + 1);
  if (overload == "default") overload.clear();
  const size_t length = second == std::string::npos ? std::string::npos : second - first - 1;
  return {name.substr(0, first) + "::" + name.substr(first + 1, length), overload};
}

Result<BoundCall> BindCall(const BuildContext& context, const Op& op) {
  c10::OperatorName wanted = OperatorNameOf(op.name);
  // It takes sizes and strides and looks at nothing; as_strided does the same and looks at the storage.
  if (wanted.name == "aten::_reshape_alias") wanted = {"aten::as_strided", ""};
  if (const char* why = WhyRefused(wanted.name)) return OpError(context, op, why);
  BoundCall call;
  call.op = c10::Dispatcher::singleton().findSchema(wanted);
  if (!call.op) return UnknownOperator(context, op, wanted);
  const c10::FunctionSchema& schema = call.op->schema();
  if (schema.is_mutable() && op.writes.empty())
    return OpError(context, op, wanted.name + " changes its arguments, and the op does not say which (writes=[...])");
  if (!context.options.captured_here) {
    INTERLACE_ASSIGN(call.value_checks, CheckFileOperator(context, op, schema));
  }
  const auto& arguments = schema.arguments();

  std::map<ValueId, int> uses;
  ForEachOperand(op, [&](ValueId id) { ++uses[id]; });
  const auto constant = [&](c10::IValue value) {
    call.pushes.push_back({Push::Kind::kConst, static_cast<int32_t>(call.constants.size())});
    call.constants.push_back(std::move(value));
  };

  size_t named_used = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::Argument& argument = arguments[i];
    const Arg* given = nullptr;
    if (i < op.args.size() && !argument.kwarg_only()) given = &op.args[i];
    for (const NamedArg& named : op.named) {
      if (named.name != argument.name()) continue;
      if (given) return OpError(context, op, "the argument \"" + argument.name() + "\" is given twice");
      given = &named.arg;
      ++named_used;
    }
    bool optional = false;
    const c10::Type& type = *Unwrap(*argument.type(), &optional);
    if (type.kind() == c10::TypeKind::GeneratorType) {
      if (op.rng && context.options.keyed_random) {
        call.takes_generator = true;
        call.pushes.push_back({Push::Kind::kGenerator, 0});
      } else {
        constant(c10::IValue());
      }
      continue;
    }
    if (!given) {
      if (type.kind() == c10::TypeKind::DeviceObjType) {
        constant(c10::IValue(context.device));
      } else if (argument.default_value()) {
        constant(*argument.default_value());
      } else {
        return OpError(context, op, "the argument \"" + argument.name() + "\" of " + wanted.name + " is missing");
      }
      continue;
    }
    const bool wants_list = type.kind() == c10::TypeKind::ListType;
    if (given->kind == Arg::Kind::kValue && IsTensor(type)) {
      const bool move = uses[given->value] == 1 && context.dies_here(given->value);
      call.pushes.push_back({move ? Push::Kind::kMoveSlot : Push::Kind::kSlot, given->value});
      continue;
    }
    if (IsTensor(type) && NumberOf(*given)) {
      constant(WrappedNumber(*NumberOf(*given)));
      continue;
    }
    if (IsTensor(type) && given->kind == Arg::Kind::kNone) {
      constant(optional ? c10::IValue() : c10::IValue(at::Tensor()));
      continue;
    }
    if (wants_list) {
      bool optional_element = false;
      const c10::Type& element = *Unwrap(*type.expectRef<c10::ListType>().getElementType(), &optional_element);
      if (IsTensor(element) && given->kind == Arg::Kind::kList) {
        std::vector<ValueId> ids;
        for (const Arg& item : given->list) {
          if (item.kind != Arg::Kind::kValue && !(item.kind == Arg::Kind::kNone && optional_element)) {
            return OpError(context, op, "the list \"" + argument.name() + "\" must hold values");
          }
          ids.push_back(item.kind == Arg::Kind::kValue ? item.value : kNone);
        }
        call.pushes.push_back({optional_element ? Push::Kind::kOptionalTensorList : Push::Kind::kTensorList,
                               static_cast<int32_t>(call.lists.size())});
        call.lists.push_back(std::move(ids));
        continue;
      }
    }
    auto value = Convert(*given, *argument.type(), context.device);
    // The schema may say that they are ints.
    if (value && NamesEnum(argument.name()) && type.kind() == c10::TypeKind::IntType && !value->isNone()) {
      const auto exact = EnumOf(*given, EnumKind(argument.name()));
      value = exact ? std::optional(c10::IValue(*exact)) : std::nullopt;
    }
    if (!value) {
      return OpError(context, op,
                     "the argument \"" + argument.name() + "\" does not fit its type " + argument.type()->str());
    }
    constant(std::move(*value));
  }
  size_t positional = 0;
  for (const c10::Argument& argument : arguments) positional += argument.kwarg_only() ? 0 : 1;
  if (op.args.size() > positional)
    return OpError(context, op, wanted.name + " takes " + std::to_string(positional) + " positional arguments");
  if (named_used != op.named.size()) return OpError(context, op, "a keyword argument is unknown to " + wanted.name);
  return call;
}

std::optional<c10::OperatorHandle> FindOutForm(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.returns().size() != 1 || !IsTensor(*schema.returns()[0].type())) return std::nullopt;
  const std::string& overload = op.operator_name().overload_name;
  std::vector<std::string> candidates =
      overload.empty() ? std::vector<std::string>{"out"} : std::vector<std::string>{overload + "_out", "out"};
  for (const c10::OperatorName& name : AllOperators()) {
    if (name.name == op.operator_name().name) candidates.push_back(name.overload_name);
  }
  for (const std::string& candidate : candidates) {
    const auto found = c10::Dispatcher::singleton().findSchema({op.operator_name().name, candidate});
    if (!found || found->hasTag(at::Tag::generated)) continue;
    const auto& ours = schema.arguments();
    const auto& theirs = found->schema().arguments();
    if (theirs.size() != ours.size() + 1 || !theirs.back().is_out()) continue;
    bool same = true;
    for (size_t i = 0; i < ours.size() && same; ++i) {
      same = ours[i].name() == theirs[i].name() && *ours[i].type() == *theirs[i].type();
    }
    if (same) return found;
  }
  return std::nullopt;
}

}  // namespace interlace
