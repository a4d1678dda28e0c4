// Regions: what a body may have, and calls against it.
#include <algorithm>

#include "ir/func.h"
#include "ir/op_table.h"
#include "ir/text.h"
#include "ir/verifier.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

// What is wrong with an op of a body; "" when nothing is.
std::string ProblemOf(const Program& body, const Op& op) {
  if (op.kind != OpKind::kView && (op.kind != OpKind::kLibrary || !op.name.starts_with("aten.")))
    return "a region has ATen ops and views, not " + op.name;
  if (op.rng) return "a region draws no random numbers";
  if (!op.writes.empty()) return "a region writes nothing but its results";
  for (ValueId id : op.results) {
    if (id != kNone && body.value(id).placed) return "a region's results are placed by its calls, not by its body";
  }
  return "";
}

std::string ProblemOf(const Program& body) {
  const std::vector<ValueId>& gives = body.phases[0].gives;
  if (gives.empty()) return "it gives nothing";
  for (size_t i = 0; i < gives.size(); ++i) {
    const Value& given = body.value(gives[i]);
    const std::string name = "%" + std::to_string(gives[i]);
    if (given.kind != ValueKind::kResult) return name + " is given, but it is an operand";
    if (given.root != given.id) return name + " is given, but does not own its storage";
    if (std::count(gives.begin(), gives.end(), gives[i]) > 1) return name + " is given twice";
  }
  for (const Input& input : body.inputs) {
    if (body.RootOf(input.value) != input.value) return "its operands own their storage";
  }
  for (OpId id : body.phases[0].ops) {
    if (std::string problem = ProblemOf(body, body.op(id)); !problem.empty())
      return problem + "\n" + PrintOp(body, body.op(id));
  }
  return "";
}

}  // namespace

void VerifyFuncs(const Program& program, VerifyReport& report) {
  for (size_t i = 0; i < program.funcs.size(); ++i) {
    const Program& body = *program.funcs[i].body;
    const std::string name = "func f" + std::to_string(i) + ": ";
    std::string problem = body.phases.size() == 1 ? "" : "it has no body";
    // Its structure is that of a phase of a captured program.
    if (problem.empty()) {
      VerifyReport inside(body);
      problem = VerifyStructure(body, inside);
    }
    if (problem.empty()) problem = ProblemOf(body);
    if (!problem.empty()) report.AtProgram(name + problem);
  }
}

void VerifyCall(const Program& program, const Op& op, VerifyReport& report) {
  const int32_t index = FuncOf(program, op);
  if (index == kNone) return report.AtOp(op, op.name + " calls no func of this program");
  const Func& func = program.funcs[index];
  const std::vector<ValueId> operands = OperandsOf(func);
  const std::vector<ValueId>& gives = GivenBy(func);
  const auto number = [](size_t n) { return std::to_string(n); };
  if (!op.named.empty() || op.rng || !op.writes.empty())
    return report.AtOp(op, op.name + " takes operands only, draws no random numbers and writes nothing");
  if (op.args.size() != operands.size())
    return report.AtOp(op, op.name + " takes " + number(operands.size()) + " operands, not " + number(op.args.size()));
  if (op.results.size() != gives.size())
    return report.AtOp(op, op.name + " has " + number(gives.size()) + " results, not " + number(op.results.size()));
  const auto check = [&](ValueId id, ValueId inside) {
    const std::string is = PrintType(program, program.value(id).type);
    const std::string wanted = PrintType(*func.body, func.body->value(inside).type);
    if (is == wanted) return;
    report.AtOp(op, "%" + std::to_string(id) + " must be " + wanted + " as in the body, not " + is, id);
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    if (op.args[i].kind != Arg::Kind::kValue) return report.AtOp(op, op.name + " takes values only");
    check(op.args[i].value, operands[i]);
  }
  for (size_t i = 0; i < gives.size(); ++i) {
    const ValueId id = op.results[i];
    if (id == kNone) continue;
    check(id, gives[i]);
    const Value& value = program.value(id);
    if (value.root != id && !value.placed)
      report.AtOp(op, "what a call gives owns its storage or is placed 'into' another", id);
  }
}

}  // namespace interlace
