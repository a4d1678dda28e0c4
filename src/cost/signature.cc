#include "cost/signature.h"

#include <algorithm>

#include "base/append.h"
#include "ir/func.h"
#include "ir/text.h"

namespace interlace {
namespace {

class Printer {
 public:
  Printer(const Program& program, std::string& out) : program_(program), out_(out) {}
  bool bad() const { return bad_; }

  void Size(Dim dim) {
    if (!dim.is_const()) return OfRankZero(dim);
    Append(out_, dim.value);
  }
  // Where a number depends on the rank (the first row of its part), that of rank 0 stands for all: it is as much work.
  void OfRankZero(Dim dim) {
    const Result<int64_t> value = program_.dims.Evaluate(dim, FirstRank(program_.mesh));
    bad_ = bad_ || !value.ok();
    Append(out_, value.ok() ? *value : 0);
  }
  void TypeOf(ValueId id) {
    const Type& type = program_.value(id).type;
    Append(out_, DTypeName(type.dtype), '[');
    int64_t expected = 1;
    bool contiguous = true;
    for (size_t i = type.sizes.size(); i-- > 0;) {
      if (type.sizes[i].value != 1 && type.strides[i].value != expected) contiguous = false;
      expected *= std::max<int64_t>(type.sizes[i].value, 1);
    }
    List(type.sizes);
    out_.push_back(']');
    if (contiguous) return;
    out_.push_back('{');
    List(type.strides);
    out_.push_back('}');
  }
  void Argument(const Arg& arg) {
    switch (arg.kind) {
      case Arg::Kind::kNone:
        out_.append("none");
        break;
      case Arg::Kind::kValue:
        TypeOf(arg.value);
        break;
      case Arg::Kind::kInt:
        if (!arg.integer.is_const() && OfRank(arg.integer)) {
          out_.append("rank");  // which rank it is changes no time
        } else {
          Size(arg.integer);
        }
        break;
      case Arg::Kind::kFloat:
        out_.push_back('f');
        break;
      case Arg::Kind::kBool:
        out_.append(arg.boolean ? "true" : "false");
        break;
      case Arg::Kind::kString:
      case Arg::Kind::kWord:
        out_.append(arg.text);
        break;
      case Arg::Kind::kList:
        out_.push_back('[');
        for (size_t i = 0; i < arg.list.size(); ++i) {
          if (i > 0) out_.push_back(',');
          Argument(arg.list[i]);
        }
        out_.push_back(']');
        break;
    }
  }

 private:
  void List(const std::vector<Dim>& dims) {
    for (size_t i = 0; i < dims.size(); ++i) {
      if (i > 0) out_.push_back(',');
      Size(dims[i]);
    }
  }
  bool OfRank(Dim dim) const {
    const std::vector<std::string> symbols = program_.dims.SymbolsOf(dim);
    return std::all_of(symbols.begin(), symbols.end(), [](const std::string& s) { return s.starts_with("rank_"); });
  }
  const Program& program_;
  std::string& out_;
  bool bad_ = false;
};

}  // namespace

Status AppendSignature(const Program& program, const Op& op, std::string& out) {
  Printer p(program, out);
  // A region by its body: the number that it has in a program says nothing.
  const int32_t func = FuncOf(program, op);
  if (func == kNone) {
    out.append(op.name);
  } else {
    Append(out, kCallPrefix, std::string_view(program.funcs[func].key).substr(0, 16));
  }
  out.push_back('(');
  bool first = true;
  for (const Arg& arg : op.args) {
    if (!first) out.push_back(',');
    first = false;
    p.Argument(arg);
  }
  if (const Arg* rule = op.Attr("rule"); op.kind == OpKind::kUpdateRule && rule != nullptr) {
    Append(out, ',', rule->text);
  }
  for (const NamedArg& named : op.named) {
    if (!first) out.push_back(',');
    first = false;
    Append(out, named.name, '=');
    p.Argument(named.arg);
  }
  out.append(")->");
  for (size_t i = 0; i < op.results.size(); ++i) {
    if (i > 0) out.push_back(',');
    ValueId id = op.results[i];
    if (id == kNone) {
      out.push_back('_');
      continue;
    }
    if (program.value(id).placed) out.push_back('!');
    p.TypeOf(id);
  }
  if (p.bad()) return Error{"a size is not yet a number; bind the symbols first", PrintOp(program, op)};
  return Ok{};
}

Status AppendProfileKey(const Program& program, const Op& op, std::string& out) {
  INTERLACE_TRY(AppendSignature(program, op, out));
  if (const Arg* zero = op.Attr("zero"); zero != nullptr && zero->boolean) out += " zero";
  return Ok{};
}

}  // namespace interlace
