// kernels_rule_aten.cc — a rule's step as ATen calls on whole tensors: for devices other than CPUs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcdiv.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/le.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include <vector>

#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

using AtenUnary = at::Tensor (*)(const at::Tensor&);
using AtenBinary = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

// By RuleCode, from kNeg and from kMul on.
constexpr AtenUnary kUnary[] = {at::neg,        at::abs, at::sign, at::sqrt, at::rsqrt,
                                at::reciprocal, at::exp, at::log,  at::tanh};
constexpr AtenBinary kBinary[] = {at::mul, at::div, at::maximum, at::minimum, at::pow, at::gt,
                                  at::ge,  at::lt,  at::le,      at::eq,      at::ne};

// One op on whole tensors; numbers become tensors where the operator wants them.
at::Tensor RunAten(const RuleOp& op, const std::vector<at::Tensor>& x, double k) {
  switch (op.code) {
    case RuleCode::kCopy:
      return x[0].clone();
    case RuleCode::kAdd:
      return at::add(x[0], x[1], k);
    case RuleCode::kLerp:
      return at::lerp(x[0], x[1], x[2]);
    case RuleCode::kWhere:
      return at::where(at::ne(x[0], 0), x[1], x[2]);
    case RuleCode::kAddcmul:
      return at::addcmul(x[0], x[1], x[2], k);
    case RuleCode::kAddcdiv:
      return at::addcdiv(x[0], x[1], x[2], k);
    default:
      break;
  }
  if (op.code < RuleCode::kMul) return kUnary[static_cast<int>(op.code) - static_cast<int>(RuleCode::kNeg)](x[0]);
  return kBinary[static_cast<int>(op.code) - static_cast<int>(RuleCode::kMul)](x[0], x[1]);
}

}  // namespace

void RuleStepAten(const RuleForm& form, std::span<const at::Tensor> flats, std::span<const double> numbers,
                  double grad_scale) {
  // In float32 at least, as the loops compute.
  const bool narrow = c10::elementSize(flats[0].scalar_type()) == 2;
  const at::ScalarType math = narrow ? at::kFloat : flats[0].scalar_type();
  std::vector<at::Tensor> registers(form.registers);
  for (size_t i = 0; i < flats.size(); ++i) registers[i] = flats[i].to(math);
  if (grad_scale != 1) registers[1] = at::mul(registers[1], grad_scale);
  for (const RuleOp& op : form.ops) {
    std::vector<at::Tensor> x;
    double k = 0;
    for (int i = 0; i < TraitsOf(op.code).operands; ++i) {
      if (!IsNumber(op.operands[i])) {
        x.push_back(registers[op.operands[i]]);
      } else {
        k = numbers[NumberIndex(op.operands[i])];
        x.push_back(at::full_like(registers[0], k));
      }
    }
    registers[op.result] = RunAten(op, x, k).to(math);
  }
  for (size_t i = 0; i < flats.size(); ++i) {
    if (i != 1) flats[i].copy_(registers[i]);
  }
}

}  // namespace interlace
