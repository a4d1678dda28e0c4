// kernels_rule.cc — a captured optimizer step (ir/rule.h) over a flat shard: op after op on a piece of all operands that
// stays in the first-level cache, so that every element comes from memory and goes there once, as in a hand-written
// step.
//
//   piece 0: square_avg = mul(..) | square_avg = addcmul(..) | t0 = sqrt(..) | .. | w = addcdiv(..)
//   piece 1: ...
//
// Ops that hand a value on to one other op
// are carried out by it: a product with a number by the sum behind it, a root (and what is divided and added) by the
// quotient that it goes into. So RMSprop takes two passes over a piece where its form has five ops, and AdamW three for
// eight. Every operation rounds as it would alone. Tried and dropped: asking for the next piece (prefetch) while one is
// computed, pieces of 64 to 4096 elements (short ones keep memory busy beside the arithmetic).
//
// Floats of 16 bits are widened once for a piece and rounded once behind it.
#include <ATen/Parallel.h>
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

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/clones.h"
#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

constexpr int64_t kGrain = int64_t{32} * 1024;  // elements a thread takes at least
constexpr int64_t kPiece = 256;                 // elements of each operand at a time

constexpr RuleOperand kNothing = INT16_MIN;

// An op, with what it does for others.
struct Pass {
  RuleOp op;
  RuleOperand before = kNothing;   // of a sum: a number that the first operand is multiplied by
  bool root = false;               // of addcdiv, and of sqrt itself: the last vector is the root of what the operand names,
  RuleOperand divisor = kNothing;  // over this number,
  RuleOperand addend = kNothing;   // plus this number
  RuleOperand factor = kNothing;   // times this one
};

struct RulePlan {
  const RuleForm* form;
  std::vector<Pass> passes;
  const double* numbers;
  std::array<char*, 2 + kMaxRuleStates> flats;  // weight, gradient, states
  int count;                                    // of these
  double grad_scale;
  bool scratch_grad;  // the gradient that the form sees is not the one in memory
};

// Operands of one op: memory, or one number for all elements.
template <typename T>
struct Source {
  const T* data;
  T number;
};

// The result may be one of the operands: element by element, in place.
template <bool kA, bool kB, bool kC, typename T, typename F>
[[gnu::always_inline]] inline void Loop(T* out, const Source<T>* x, int64_t n, F f) {
  const T *const a = x[0].data, *const b = x[1].data, *const c = x[2].data;
  const T of_a = x[0].number, of_b = x[1].number, of_c = x[2].number;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = f(kA ? of_a : a[i], kB ? of_b : b[i], kC ? of_c : c[i]);
}

template <typename T, typename F>
[[gnu::always_inline]] inline void Unary(T* out, const Source<T>* x, int64_t n, F f) {
  const auto g = [&](T a, T, T) __attribute__((always_inline)) { return f(a); };
  x[0].data == nullptr ? Loop<true, true, true>(out, x, n, g)
                       : Loop<false, true, true>(out, x, n, g);
}

template <typename T, typename F>
[[gnu::always_inline]] inline void Binary(T* out, const Source<T>* x, int64_t n, F f) {
  const auto g = [&](T a, T b, T) __attribute__((always_inline)) { return f(a, b); };
  if (x[1].data == nullptr) {
    x[0].data == nullptr ? Loop<true, true, true>(out, x, n, g)
                         : Loop<false, true, true>(out, x, n, g);
  } else {
    x[0].data == nullptr ? Loop<true, false, true>(out, x, n, g)
                         : Loop<false, false, true>(out, x, n, g);
  }
}

// Their first operand is memory, and of the two of a product both are.
template <typename T, typename F>
[[gnu::always_inline]] inline void Product(T* out, const Source<T>* x, int64_t n, F f) {
  Loop<false, false, false>(out, x, n, f);
}
template <typename T, typename F>
[[gnu::always_inline]] inline void Choice(T* out, const Source<T>* x, int64_t n, F f) {
  if (x[1].data == nullptr) {
    x[2].data == nullptr ? Loop<false, true, true>(out, x, n, f)
                         : Loop<false, true, false>(out, x, n, f);
  } else {
    x[2].data == nullptr ? Loop<false, false, true>(out, x, n, f)
                         : Loop<false, false, false>(out, x, n, f);
  }
}

template <typename T>
struct Extras {
  T k, before, divisor, addend;  // 1 and 0 where there is none
  bool root, divides;
};

template <typename T>
[[gnu::always_inline]] inline void RunOp(RuleCode code, T* out, const Source<T>* x, const Extras<T>& extras, int64_t n) {
  const T k = extras.k, before = extras.before, divisor = extras.divisor, addend = extras.addend;
  switch (code) {
    case RuleCode::kCopy:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return a; });
    case RuleCode::kNeg:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return -a; });
    case RuleCode::kAbs:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return a < 0 ? -a : a + T(0); });
    case RuleCode::kSign:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return T(a > 0) - T(a < 0); });
    case RuleCode::kSqrt:
      if (extras.divides) {
        return Unary(out, x, n, [=](T a) __attribute__((always_inline)) { return std::sqrt(a) / divisor + addend; });
      }
      if (extras.root) return Unary(out, x, n, [=](T a) __attribute__((always_inline)) { return std::sqrt(a) + addend; });
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return std::sqrt(a); });
    case RuleCode::kRsqrt:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return T(1) / std::sqrt(a); });
    case RuleCode::kReciprocal:
      return Unary(out, x, n, [](T a) __attribute__((always_inline)) { return T(1) / a; });
    case RuleCode::kExp:
      return Unary(out, x, n, [](T a) { return std::exp(a); });
    case RuleCode::kLog:
      return Unary(out, x, n, [](T a) { return std::log(a); });
    case RuleCode::kTanh:
      return Unary(out, x, n, [](T a) { return std::tanh(a); });
    case RuleCode::kMul:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return a * b; });
    case RuleCode::kDiv:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return a / b; });
    case RuleCode::kMax:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return a > b || a != a ? a : b; });
    case RuleCode::kMin:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return a < b || a != a ? a : b; });
    case RuleCode::kPow:
      return Binary(out, x, n, [](T a, T b) { return std::pow(a, b); });
    case RuleCode::kGt:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a > b); });
    case RuleCode::kGe:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a >= b); });
    case RuleCode::kLt:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a < b); });
    case RuleCode::kLe:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a <= b); });
    case RuleCode::kEq:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a == b); });
    case RuleCode::kNe:
      return Binary(out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a != b); });
    case RuleCode::kAdd:
      return Binary(out, x, n, [=](T a, T b) __attribute__((always_inline)) { return a * before + k * b; });
    case RuleCode::kLerp:
      if (x[2].data == nullptr) {
        const T weight = x[2].number;
        const bool small = std::abs(weight) < T(0.5);  // from the nearer end, as torch does
        const T part = small ? weight : weight - T(1);
        if (small) return Binary(out, x, n, [part](T a, T b) __attribute__((always_inline)) { return a + part * (b - a); });
        return Binary(out, x, n, [part](T a, T b) __attribute__((always_inline)) { return b + part * (b - a); });
      }
      return Product(out, x, n, [](T a, T b, T c) __attribute__((always_inline)) {
        const bool small = c < T(0.5) && c > T(-0.5);
        return (small ? a : b) + (small ? c : c - T(1)) * (b - a);
      });
    case RuleCode::kWhere:
      return Choice(out, x, n, [](T a, T b, T c) __attribute__((always_inline)) { return a != 0 ? b : c; });
    case RuleCode::kAddcmul:
      return Product(out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) { return a * before + k * b * c; });
    case RuleCode::kAddcdiv:
      if (extras.divides) {
        return Product(out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) {
          return a * before + k * b / (std::sqrt(c) / divisor + addend);
        });
      }
      if (extras.root) {
        return Product(out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) {
          return a * before + k * b / (std::sqrt(c) + addend);
        });
      }
      return Product(out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) { return a * before + k * b / c; });
  }
}

template <typename From, typename To>
[[gnu::always_inline]] inline void Convert(const From* __restrict from, To* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

template <typename T>
[[gnu::always_inline]] inline void RunSpan(const RulePlan& plan, int64_t begin, int64_t end) {
  using Math = MathOf<T>;
  constexpr bool kWiden = sizeof(T) == 2;
  alignas(64) Math scratch[kMaxRuleRegisters][kPiece];
  Math numbers[kMaxRuleNumbers];
  for (int i = 0; i < plan.form->numbers; ++i) numbers[i] = static_cast<Math>(plan.numbers[i]);
  const Math scale = static_cast<Math>(plan.grad_scale);
  Math* registers[kMaxRuleRegisters];
  for (int r = 0; r < plan.form->registers; ++r) registers[r] = scratch[r];
  for (; begin < end; begin += kPiece) {
    const int64_t n = std::min(kPiece, end - begin);
    for (int f = 0; f < plan.count; ++f) {
      T* const flat = reinterpret_cast<T*>(plan.flats[f]) + begin;
      if constexpr (kWiden) {
        Convert(flat, registers[f], n);
      } else if (f != 1 || !plan.scratch_grad) {
        registers[f] = flat;
      } else if (scale == Math(1)) {
        Convert(flat, registers[f], n);
      }
    }
    if (scale != Math(1)) {
      const Source<Math> from[3] = {{kWiden ? registers[1] : reinterpret_cast<Math*>(plan.flats[1]) + begin, Math(0)}, {}, {}};
      Unary(registers[1], from, n, [scale](Math g) __attribute__((always_inline)) { return g * scale; });
    }
    for (const Pass& pass : plan.passes) {
      Source<Math> x[4] = {};
      for (int i = 0; i < 4; ++i) {
        const RuleOperand operand = pass.op.operands[i];
        x[i] = IsNumber(operand) ? Source<Math>{nullptr, numbers[NumberIndex(operand)]}
                                 : Source<Math>{registers[operand], Math(0)};
      }
      const auto number = [&](RuleOperand operand, Math otherwise) {
        return operand == kNothing ? otherwise : numbers[NumberIndex(operand)];
      };
      const Extras<Math> extras{.k = pass.op.code == RuleCode::kAdd ? x[2].number : x[3].number,
                                .before = number(pass.before, Math(1)),
                                .divisor = number(pass.divisor, Math(1)),
                                .addend = number(pass.addend, Math(0)) * number(pass.factor, Math(1)),
                                .root = pass.root,
                                .divides = pass.divisor != kNothing};
      RunOp<Math>(pass.op.code, registers[pass.op.result], x, extras, n);
    }
    if constexpr (kWiden) {
      for (int f = 0; f < plan.count; ++f) {
        if (f != 1) Convert(registers[f], reinterpret_cast<T*>(plan.flats[f]) + begin, n);
      }
    }
  }
}

#define INTERLACE_RULES(suffix, T)                                                                \
  INTERLACE_CLONES void Rule##suffix(const RulePlan& plan, int64_t begin, int64_t end) {          \
    RunSpan<T>(plan, begin, end);                                                                 \
  }
INTERLACE_RULES(F64, double)
INTERLACE_RULES(F32, float)
INTERLACE_RULES(F16, Float16)
INTERLACE_RULES(BF16, BFloat16)
#undef INTERLACE_RULES

// ---- which ops do others' work ----

class Fusion {
 public:
  Fusion(const RuleForm& form, int flats) : flats_(flats) {
    for (const RuleOp& op : form.ops) passes_.push_back({.op = op});
  }

  std::vector<Pass> Run() {
    for (size_t i = 0; i < passes_.size(); ++i) Root(i);
    for (size_t i = 0; i < passes_.size(); ++i) {
      if (!Scale(i)) continue;
      passes_.erase(passes_.begin() + static_cast<std::ptrdiff_t>(i));
      --i;
    }
    return std::move(passes_);
  }

 private:
  static bool Reads(const Pass& pass, RuleOperand value) {
    const auto& x = pass.op.operands;
    return std::find(x.begin(), x.begin() + TraitsOf(pass.op.code).operands, value) !=
           x.begin() + TraitsOf(pass.op.code).operands;
  }
  bool Writes(size_t i, RuleOperand value) const { return passes_[i].op.result == value; }
  // The only reader of what pass i gives; 0: there is another or none, or `source` is written before it.
  size_t Heir(size_t i, RuleOperand source) const {
    const RuleOperand value = passes_[i].op.result;
    size_t reader = 0;
    for (size_t j = i + 1; j < passes_.size(); ++j) {
      if (Reads(passes_[j], value)) {
        if (reader != 0) return 0;
        reader = j;
      }
      if (Writes(j, value)) return reader;
      if (reader == 0 && Writes(j, source)) return 0;
    }
    return value < flats_ ? 0 : reader;  // what lies in memory is wanted in the end
  }

  // t = sqrt(x), t = div(t, n), t = add(t, n, n) are one pass, and part of w = addcdiv(w, a, t, n).
  void Root(size_t i) {
    if (passes_[i].op.code != RuleCode::kSqrt || passes_[i].root) return;
    const auto follows = [&](RuleCode code) {
      return i + 1 < passes_.size() && passes_[i + 1].op.code == code && Heir(i, kNothing) == i + 1 &&
             passes_[i + 1].op.operands[0] == passes_[i].op.result && IsNumber(passes_[i + 1].op.operands[1]);
    };
    const auto take = [&] {
      passes_[i].op.result = passes_[i + 1].op.result;
      passes_.erase(passes_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    };
    if (follows(RuleCode::kDiv)) {
      passes_[i].divisor = passes_[i + 1].op.operands[1];
      take();
    }
    if (follows(RuleCode::kAdd)) {
      passes_[i].addend = passes_[i + 1].op.operands[1];
      passes_[i].factor = passes_[i + 1].op.operands[2];
      take();
    }
    passes_[i].root = true;
    const RuleOperand source = passes_[i].op.operands[0], value = passes_[i].op.result;
    const size_t j = Heir(i, source);
    if (j == 0 || passes_[j].op.code != RuleCode::kAddcdiv) return;
    auto& x = passes_[j].op.operands;
    if (x[2] != value || x[0] == value || x[1] == value) return;
    Pass& heir = passes_[j];
    x[2] = source;
    heir.root = true, heir.divisor = passes_[i].divisor;
    heir.addend = passes_[i].addend, heir.factor = passes_[i].factor;
    passes_.erase(passes_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  // r = mul(x, n) is part of the sum that begins with r. Whether it was.
  bool Scale(size_t i) {
    const auto& x = passes_[i].op.operands;
    if (passes_[i].op.code != RuleCode::kMul || IsNumber(x[0]) || !IsNumber(x[1])) return false;
    const size_t j = Heir(i, x[0]);
    if (j == 0 || passes_[j].before != kNothing) return false;
    Pass& heir = passes_[j];
    const bool sum = heir.op.code == RuleCode::kAdd || heir.op.code == RuleCode::kAddcmul || heir.op.code == RuleCode::kAddcdiv;
    const RuleOperand value = passes_[i].op.result;
    if (!sum || heir.op.operands[0] != value || heir.op.operands[1] == value) return false;
    if (heir.op.code != RuleCode::kAdd && heir.op.operands[2] == value) return false;
    heir.op.operands[0] = x[0];
    heir.before = x[1];
    return true;
  }

  std::vector<Pass> passes_;
  const int flats_;
};

// One op on whole tensors; numbers become tensors where the operator wants them.
at::Tensor RunAten(const RuleOp& op, const std::vector<at::Tensor>& x, double k) {
  switch (op.code) {
    case RuleCode::kCopy:
      return x[0].clone();
    case RuleCode::kNeg:
      return at::neg(x[0]);
    case RuleCode::kAbs:
      return at::abs(x[0]);
    case RuleCode::kSign:
      return at::sign(x[0]);
    case RuleCode::kSqrt:
      return at::sqrt(x[0]);
    case RuleCode::kRsqrt:
      return at::rsqrt(x[0]);
    case RuleCode::kReciprocal:
      return at::reciprocal(x[0]);
    case RuleCode::kExp:
      return at::exp(x[0]);
    case RuleCode::kLog:
      return at::log(x[0]);
    case RuleCode::kTanh:
      return at::tanh(x[0]);
    case RuleCode::kMul:
      return at::mul(x[0], x[1]);
    case RuleCode::kDiv:
      return at::div(x[0], x[1]);
    case RuleCode::kMax:
      return at::maximum(x[0], x[1]);
    case RuleCode::kMin:
      return at::minimum(x[0], x[1]);
    case RuleCode::kPow:
      return at::pow(x[0], x[1]);
    case RuleCode::kGt:
      return at::gt(x[0], x[1]);
    case RuleCode::kGe:
      return at::ge(x[0], x[1]);
    case RuleCode::kLt:
      return at::lt(x[0], x[1]);
    case RuleCode::kLe:
      return at::le(x[0], x[1]);
    case RuleCode::kEq:
      return at::eq(x[0], x[1]);
    case RuleCode::kNe:
      return at::ne(x[0], x[1]);
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
  }
  return {};
}

void CheckFlats(std::span<const at::Tensor> flats) {
  for (const at::Tensor& t : flats) {
    TORCH_INTERNAL_ASSERT(t.is_contiguous() && t.numel() == flats[0].numel() &&
                              t.scalar_type() == flats[0].scalar_type() && t.device() == flats[0].device(),
                          "an operand of a rule differs from the weights in size, dtype, device or is not contiguous");
  }
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

void RuleStep(const RuleForm& form, std::span<const at::Tensor> flats, std::span<const double> numbers,
              double grad_scale) {
  CheckFlats(flats);
  TORCH_INTERNAL_ASSERT(static_cast<int>(numbers.size()) >= form.numbers, "a rule's form has more numbers than its row");
  if (flats[0].numel() == 0) return;
  if (!flats[0].device().is_cpu()) return RuleStepAten(form, flats, numbers, grad_scale);
  const auto step = FormFor(flats[0].scalar_type(), &RuleF64, &RuleF32, &RuleF16, &RuleBF16);
  TORCH_INTERNAL_ASSERT(step != nullptr, "a rule's step of ", c10::toString(flats[0].scalar_type()));
  RulePlan plan{.form = &form, .passes = Fusion(form, static_cast<int>(flats.size())).Run(), .numbers = numbers.data(), .flats = {}, .count = static_cast<int>(flats.size()),
                .grad_scale = grad_scale, .scratch_grad = grad_scale != 1};
  for (const RuleOp& op : form.ops) plan.scratch_grad = plan.scratch_grad || op.result == 1;
  for (size_t i = 0; i < flats.size(); ++i) {
    plan.flats[i] = i == 1 ? static_cast<char*>(const_cast<void*>(flats[i].const_data_ptr()))
                           : static_cast<char*>(flats[i].mutable_data_ptr());
  }
  at::parallel_for(0, flats[0].numel(), kGrain, [&](int64_t begin, int64_t end) { step(plan, begin, end); });
}

}  // namespace interlace
