// kernels_rule.cc — a captured optimizer step (ir/rule.h) over a flat shard: op after op on a piece of all operands
// that stays in the first-level cache, so that every element comes from memory and goes there once.
//
//   piece 0: square_avg = mul(..) | square_avg = addcmul(..) | t0 = sqrt(..) | .. | w = addcdiv(..)
//   piece 1: ...
//
// It says what a step's bits are, and runs until the form is compiled to one loop (rule_loops.h), which is about as
// fast as a hand-written step. Floats of 16 bits are widened once for a piece and rounded once behind it.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/clones.h"
#include "runtime/kernel_loops.h"
#include "runtime/kernels_aten.h"

namespace interlace {

namespace {

constexpr int64_t kRulePiece = 256;  // elements of each operand at a time

struct RulePlan {
  const RuleForm* form;
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
  const auto g = [&](T a, T, T) __attribute__((always_inline)) {
    return f(a);
  };
  x[0].data == nullptr ? Loop<true, true, true>(out, x, n, g) : Loop<false, true, true>(out, x, n, g);
}

template <typename T, typename F>
[[gnu::always_inline]] inline void Binary(T* out, const Source<T>* x, int64_t n, F f) {
  const auto g = [&](T a, T b, T) __attribute__((always_inline)) {
    return f(a, b);
  };
  if (x[1].data == nullptr) {
    x[0].data == nullptr ? Loop<true, true, true>(out, x, n, g) : Loop<false, true, true>(out, x, n, g);
  } else {
    x[0].data == nullptr ? Loop<true, false, true>(out, x, n, g) : Loop<false, false, true>(out, x, n, g);
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
    x[2].data == nullptr ? Loop<false, true, true>(out, x, n, f) : Loop<false, true, false>(out, x, n, f);
  } else {
    x[2].data == nullptr ? Loop<false, false, true>(out, x, n, f) : Loop<false, false, false>(out, x, n, f);
  }
}

// Of an op: its loop over the expression of its operands a, b and c.
#define INTERLACE_UNARY(op, expression) \
  case RuleCode::op:                    \
    return Unary(                       \
        out, x, n, [](T a) __attribute__((always_inline)) { return expression; });
#define INTERLACE_BINARY(op, expression) \
  case RuleCode::op:                     \
    return Binary(                       \
        out, x, n, [=](T a, T b) __attribute__((always_inline)) { return expression; });
#define INTERLACE_TERNARY(op, loop, expression) \
  case RuleCode::op:                            \
    return loop(                                \
        out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) { return expression; });

// `k`: of an op that is scaled, its last operand.
template <typename T>
[[gnu::always_inline]] inline void RunOp(RuleCode code, T* out, const Source<T>* x, T k, int64_t n) {
  switch (code) {
    INTERLACE_UNARY(kCopy, a)
    INTERLACE_UNARY(kNeg, -a)
    INTERLACE_UNARY(kAbs, a < 0 ? -a : a + T(0))
    INTERLACE_UNARY(kSign, T(a > 0) - T(a < 0))
    INTERLACE_UNARY(kSqrt, std::sqrt(a))
    INTERLACE_UNARY(kRsqrt, T(1) / std::sqrt(a))
    INTERLACE_UNARY(kReciprocal, T(1) / a)
    case RuleCode::kExp:
      return Unary(out, x, n, [](T a) { return std::exp(a); });
    case RuleCode::kLog:
      return Unary(out, x, n, [](T a) { return std::log(a); });
    case RuleCode::kTanh:
      return Unary(out, x, n, [](T a) { return std::tanh(a); });
    case RuleCode::kPow:
      return Binary(out, x, n, [](T a, T b) { return std::pow(a, b); });
      INTERLACE_BINARY(kMul, a * b)
      INTERLACE_BINARY(kDiv, a / b)
      INTERLACE_BINARY(kMax, a > b || a != a ? a : b)
      INTERLACE_BINARY(kMin, a < b || a != a ? a : b)
      INTERLACE_BINARY(kGt, T(a > b))
      INTERLACE_BINARY(kGe, T(a >= b))
      INTERLACE_BINARY(kLt, T(a < b))
      INTERLACE_BINARY(kLe, T(a <= b))
      INTERLACE_BINARY(kEq, T(a == b))
      INTERLACE_BINARY(kNe, T(a != b))
      INTERLACE_BINARY(kAdd, a + k * b)
    case RuleCode::kLerp:
      if (x[2].data == nullptr) {
        const T weight = x[2].number;
        const bool small = std::abs(weight) < T(0.5);  // from the nearer end, as torch does
        const T part = small ? weight : weight - T(1);
        if (small)
          return Binary(
              out, x, n, [part](T a, T b) __attribute__((always_inline)) { return a + part * (b - a); });
        return Binary(
            out, x, n, [part](T a, T b) __attribute__((always_inline)) { return b + part * (b - a); });
      }
      return Product(
          out, x, n, [](T a, T b, T c) __attribute__((always_inline)) {
            const bool small = c < T(0.5) && c > T(-0.5);
            return (small ? a : b) + (small ? c : c - T(1)) * (b - a);
          });
      INTERLACE_TERNARY(kWhere, Choice, a != 0 ? b : c)
      INTERLACE_TERNARY(kAddcmul, Product, a + k * b * c)
      INTERLACE_TERNARY(kAddcdiv, Product, a + k * b / c)
  }
}
#undef INTERLACE_UNARY
#undef INTERLACE_BINARY
#undef INTERLACE_TERNARY

// One op over a piece: functions of their own, which the spans of several types share. A call for 256 elements costs
// nothing, compiling all loops once more for each type of 16 bits took half of this file's time.
INTERLACE_CLONES void OpOn(RuleCode code, double* out, const Source<double>* x, double k, int64_t n) {
  RunOp(code, out, x, k, n);
}
INTERLACE_CLONES void OpOn(RuleCode code, float* out, const Source<float>* x, float k, int64_t n) {
  RunOp(code, out, x, k, n);
}

template <typename T>
[[gnu::always_inline]] inline void RunSpan(const RulePlan& plan, int64_t begin, int64_t end) {
  using Math = MathOf<T>;
  constexpr bool kWiden = sizeof(T) == 2;
  alignas(64) Math scratch[kMaxRuleRegisters][kRulePiece];
  Math numbers[kMaxRuleNumbers];
  for (int i = 0; i < plan.form->numbers; ++i) numbers[i] = static_cast<Math>(plan.numbers[i]);
  const Math scale = static_cast<Math>(plan.grad_scale);
  Math* registers[kMaxRuleRegisters];
  for (int r = 0; r < plan.form->registers; ++r) registers[r] = scratch[r];
  for (; begin < end; begin += kRulePiece) {
    const int64_t n = std::min(kRulePiece, end - begin);
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
      const Source<Math> from[3] = {
          {kWiden ? registers[1] : reinterpret_cast<Math*>(plan.flats[1]) + begin, Math(0)}, {}, {}};
      Unary(
          registers[1], from, n, [scale](Math g) __attribute__((always_inline)) { return g * scale; });
    }
    for (const RuleOp& op : plan.form->ops) {
      Source<Math> x[4] = {};
      for (int i = 0; i < 4; ++i) {
        const RuleOperand operand = op.operands[i];
        x[i] = IsNumber(operand) ? Source<Math>{nullptr, numbers[NumberIndex(operand)]}
                                 : Source<Math>{registers[operand], Math(0)};
      }
      OpOn(op.code, registers[op.result], x, x[op.code == RuleCode::kAdd ? 2 : 3].number, n);
    }
    if constexpr (kWiden) {
      for (int f = 0; f < plan.count; ++f) {
        if (f != 1) Convert(registers[f], reinterpret_cast<T*>(plan.flats[f]) + begin, n);
      }
    }
  }
}

#define INTERLACE_RULES(suffix, T)                                                       \
  INTERLACE_CLONES void Rule##suffix(const RulePlan& plan, int64_t begin, int64_t end) { \
    RunSpan<T>(plan, begin, end);                                                        \
  }
INTERLACE_RULES(F64, double)
INTERLACE_RULES(F32, float)
INTERLACE_RULES(F16, Float16)
INTERLACE_RULES(BF16, BFloat16)
#undef INTERLACE_RULES

void CheckFlats(std::span<const at::Tensor> flats) {
  for (const at::Tensor& t : flats) {
    TORCH_INTERNAL_ASSERT(t.is_contiguous() && t.numel() == flats[0].numel() &&
                              t.scalar_type() == flats[0].scalar_type() && t.device() == flats[0].device(),
                          "an operand of a rule differs from the weights in size, dtype, device or is not contiguous");
  }
}

}  // namespace

void RuleStep(const RuleForm& form, std::span<const at::Tensor> flats, std::span<const double> numbers,
              double grad_scale, RuleLoop loop) {
  CheckFlats(flats);
  TORCH_INTERNAL_ASSERT(static_cast<int>(numbers.size()) >= form.numbers,
                        "a rule's form has more numbers than its row");
  if (flats[0].numel() == 0) return;
  if (!flats[0].device().is_cpu()) return RuleStepAten(form, flats, numbers, grad_scale);
  const auto step = FormFor(flats[0].scalar_type(), &RuleF64, &RuleF32, &RuleF16, &RuleBF16);
  TORCH_INTERNAL_ASSERT(step != nullptr, "a rule's step of ", c10::toString(flats[0].scalar_type()));
  RulePlan plan{.form = &form,
                .numbers = numbers.data(),
                .flats = {},
                .count = static_cast<int>(flats.size()),
                .grad_scale = grad_scale,
                .scratch_grad = grad_scale != 1};
  for (const RuleOp& op : form.ops) plan.scratch_grad = plan.scratch_grad || op.result == 1;
  for (size_t i = 0; i < flats.size(); ++i) {
    plan.flats[i] = i == 1 ? static_cast<char*>(const_cast<void*>(flats[i].const_data_ptr()))
                           : static_cast<char*>(flats[i].mutable_data_ptr());
  }
  at::parallel_for(0, flats[0].numel(), kGrain, [&](int64_t begin, int64_t end) {
    loop == nullptr ? step(plan, begin, end) : loop(plan.flats.data(), plan.numbers, grad_scale, begin, end);
  });
}

}  // namespace interlace
