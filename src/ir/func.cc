#include "ir/func.h"

#include <utility>

#include "base/digest.h"
#include "base/scan.h"
#include "ir/text.h"

namespace interlace {

int32_t FuncOf(const Program& program, const Op& op) {
  if (op.kind != OpKind::kCall || !op.name.starts_with(kCallPrefix)) return kNone;
  const std::string_view name = std::string_view(op.name).substr(kCallPrefix.size());
  const int32_t index = name.empty() ? kNone : ParseNumber<int32_t>(name.substr(1)).value_or(kNone);
  return index >= 0 && static_cast<size_t>(index) < program.funcs.size() ? index : kNone;
}

std::vector<ValueId> OperandsOf(const Func& func) {
  std::vector<ValueId> out;
  for (const Input& input : func.body->inputs) out.push_back(input.value);
  return out;
}

const std::vector<ValueId>& GivenBy(const Func& func) {
  return func.body->phases[0].gives;
}

std::string CallOf(int32_t func) {
  return std::string(kCallPrefix) + "f" + std::to_string(func);
}

std::string PrintFunc(const Program& body, std::string_view name) {
  const auto value = [](ValueId id) { return "%" + std::to_string(id); };
  std::string out = "func " + std::string(name) + "(";
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    const ValueId id = body.inputs[i].value;
    out += (i > 0 ? ", " : "") + value(id) + ": " + PrintType(body, body.value(id).type);
  }
  out += ") gives (";
  const std::vector<ValueId>& gives = body.phases[0].gives;
  for (size_t i = 0; i < gives.size(); ++i) out += (i > 0 ? ", " : "") + value(gives[i]);
  out += ") {\n";
  for (OpId id : body.phases[0].ops) out += "  " + PrintOp(body, body.op(id)) + "\n";
  return out + "}\n";
}

Func MakeFunc(Program body) {
  std::string key = Digest(PrintFunc(body, "f"));
  return {std::make_shared<const Program>(std::move(body)), std::move(key)};
}

int32_t AddFunc(Program& program, Program body) {
  Func func = MakeFunc(std::move(body));
  for (size_t i = 0; i < program.funcs.size(); ++i) {
    if (program.funcs[i].key == func.key) return static_cast<int32_t>(i);
  }
  program.funcs.push_back(std::move(func));
  return static_cast<int32_t>(program.funcs.size()) - 1;
}

}  // namespace interlace
