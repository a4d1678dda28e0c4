// kernels_rule.cc — a captured optimizer step (ir/rule.h) over a flat shard: op after op on a piece of all operands
// that stays in the first-level cache, so that every element comes from memory and goes there once, as in a
// hand-written step.
//
//   piece 0: square_avg = mul(..) | square_avg = addcmul(..) | t0 = sqrt(..) | .. | w = addcdiv(..)
//   piece 1: ...
//
// rule_passes.h says which ops are one pass. Tried and dropped: asking for the next piece (prefetch) while one is
// computed, pieces of 64 and of 512 to 4096 elements.
//
// Floats of 16 bits are widened once for a piece and rounded once behind it.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/clones.h"
#include "runtime/kernel_loops.h"
#include "runtime/kernels_aten.h"
#include "runtime/rule_passes.h"

namespace interlace {

namespace {

constexpr int64_t kRulePiece = 256;  // elements of each operand at a time

struct RulePlan {
  const RuleForm* form;
  std::vector<RulePass> passes;
  const double* numbers;
  std::array<char*, 2 + kMaxRuleStates> flats;  // weight, gradient, states
  int count;                                    // of these
  double grad_scale;
  bool folds_scale;   // into the loops that read the gradient
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

template <typename T>
struct Extras {
  T k, before, divisor, addend;  // 1 and 0 where there is none
  bool root, divides;
};

template <typename T>
[[gnu::always_inline]] inline void RunOp(RuleCode code, T* out, const Source<T>* x, const Extras<T>& extras,
                                         int64_t n) {
  const T k = extras.k, before = extras.before, divisor = extras.divisor, addend = extras.addend;
  switch (code) {
    case RuleCode::kCopy:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return a; });
    case RuleCode::kNeg:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return -a; });
    case RuleCode::kAbs:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return a < 0 ? -a : a + T(0); });
    case RuleCode::kSign:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return T(a > 0) - T(a < 0); });
    case RuleCode::kSqrt:
      if (extras.divides) {
        return Unary(
            out, x, n, [=](T a) __attribute__((always_inline)) { return std::sqrt(a) / divisor + addend; });
      }
      if (extras.root)
        return Unary(
            out, x, n, [=](T a) __attribute__((always_inline)) { return std::sqrt(a) + addend; });
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return std::sqrt(a); });
    case RuleCode::kRsqrt:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return T(1) / std::sqrt(a); });
    case RuleCode::kReciprocal:
      return Unary(
          out, x, n, [](T a) __attribute__((always_inline)) { return T(1) / a; });
    case RuleCode::kExp:
      return Unary(out, x, n, [](T a) { return std::exp(a); });
    case RuleCode::kLog:
      return Unary(out, x, n, [](T a) { return std::log(a); });
    case RuleCode::kTanh:
      return Unary(out, x, n, [](T a) { return std::tanh(a); });
    case RuleCode::kMul:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return a * b; });
    case RuleCode::kDiv:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return a / b; });
    case RuleCode::kMax:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return a > b || a != a ? a : b; });
    case RuleCode::kMin:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return a < b || a != a ? a : b; });
    case RuleCode::kPow:
      return Binary(out, x, n, [](T a, T b) { return std::pow(a, b); });
    case RuleCode::kGt:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a > b); });
    case RuleCode::kGe:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a >= b); });
    case RuleCode::kLt:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a < b); });
    case RuleCode::kLe:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a <= b); });
    case RuleCode::kEq:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a == b); });
    case RuleCode::kNe:
      return Binary(
          out, x, n, [](T a, T b) __attribute__((always_inline)) { return T(a != b); });
    case RuleCode::kAdd:
      return Binary(
          out, x, n, [=](T a, T b) __attribute__((always_inline)) { return a * before + k * b; });
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
    case RuleCode::kWhere:
      return Choice(
          out, x, n, [](T a, T b, T c) __attribute__((always_inline)) { return a != 0 ? b : c; });
    case RuleCode::kAddcmul:
      return Product(
          out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) { return a * before + k * b * c; });
    case RuleCode::kAddcdiv:
      if (extras.divides) {
        return Product(
            out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) {
              return a * before + k * b / (std::sqrt(c) / divisor + addend);
            });
      }
      if (extras.root) {
        return Product(
            out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) {
              return a * before + k * b / (std::sqrt(c) + addend);
            });
      }
      return Product(
          out, x, n, [=](T a, T b, T c) __attribute__((always_inline)) { return a * before + k * b / c; });
  }
}

template <typename T>
struct MomentsArgs {
  T *weight, *mean, *square, *largest;
  const T* gradient;
  T scale, mean_part, square_before, square_k, before, k, divisor, addend;
  bool from_mean;  // lerp begins at the mean, else at the gradient
};

// The averages of a gradient and what they do to the weight, in one pass over memory.
template <bool kMean, bool kLargest, bool kDivides, typename T>
[[gnu::always_inline]] inline void MomentsLoop(const MomentsArgs<T>& a, int64_t n) {
  T *const w = a.weight, *const m = a.mean, *const v = a.square, *const u = a.largest;
  const T* const g = a.gradient;
  const T scale = a.scale, part = a.mean_part, keep = a.square_before, add = a.square_k, before = a.before, k = a.k;
  const T divisor = a.divisor, addend = a.addend;
  const bool from_mean = a.from_mean;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T grad = g[i] * scale;
    T moved = grad;
    if constexpr (kMean) {
      const T old = m[i];
      moved = (from_mean ? old : grad) + part * (grad - old);
      m[i] = moved;
    }
    T square = v[i] * keep + add * grad * grad;
    v[i] = square;
    if constexpr (kLargest) {
      const T old = u[i];
      square = old > square || old != old ? old : square;
      u[i] = square;
    }
    const T root = kDivides ? std::sqrt(square) / divisor + addend : std::sqrt(square) + addend;
    w[i] = w[i] * before + k * moved / root;
  }
}

template <typename T>
[[gnu::always_inline]] inline void RunMoments(const MomentsArgs<T>& a, bool divides, int64_t n) {
  if (a.mean == nullptr) {
    if (a.largest != nullptr) {
      divides ? MomentsLoop<false, true, true>(a, n) : MomentsLoop<false, true, false>(a, n);
    } else {
      divides ? MomentsLoop<false, false, true>(a, n) : MomentsLoop<false, false, false>(a, n);
    }
  } else if (a.largest != nullptr) {
    divides ? MomentsLoop<true, true, true>(a, n) : MomentsLoop<true, true, false>(a, n);
  } else {
    divides ? MomentsLoop<true, false, true>(a, n) : MomentsLoop<true, false, false>(a, n);
  }
}

// One op or one pass over a piece: functions of their own, which the spans of several types share. A call for 256 elements costs
// nothing, compiling all loops once more for each type of 16 bits took half of this file's time.
#define INTERLACE_PIECES(suffix, T)                                                                                 \
  INTERLACE_CLONES void Op##suffix(RuleCode code, T* out, const Source<T>* x, const Extras<T>& extras, int64_t n) { \
    RunOp<T>(code, out, x, extras, n);                                                                              \
  }                                                                                                                 \
  INTERLACE_CLONES void Moments##suffix(const MomentsArgs<T>& a, bool divides, int64_t n) {                         \
    RunMoments<T>(a, divides, n);                                                                                   \
  }
INTERLACE_PIECES(F64, double)
INTERLACE_PIECES(F32, float)
#undef INTERLACE_PIECES

template <typename T>
constexpr auto OpOf = &OpF32;
template <>
constexpr auto OpOf<double> = &OpF64;
template <typename T>
constexpr auto MomentsOf = &MomentsF32;
template <>
constexpr auto MomentsOf<double> = &MomentsF64;

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
    if (scale != Math(1) && !plan.folds_scale) {
      const Source<Math> from[3] = {
          {kWiden ? registers[1] : reinterpret_cast<Math*>(plan.flats[1]) + begin, Math(0)}, {}, {}};
      Unary(
          registers[1], from, n, [scale](Math g) __attribute__((always_inline)) { return g * scale; });
    }
    for (const RulePass& pass : plan.passes) {
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
      if (pass.square != kNothing) {
        const auto memory = [&](RuleOperand operand) { return operand == kNothing ? nullptr : registers[operand]; };
        const Math weight = number(pass.mean_weight, Math(0));
        const bool from_mean = std::abs(weight) < Math(0.5);
        MomentsOf<Math>({.weight = registers[pass.op.result],
                          .mean = memory(pass.mean),
                          .square = memory(pass.square),
                          .largest = memory(pass.largest),
                          .gradient = registers[pass.gradient],
                          .scale = plan.folds_scale && pass.gradient == 1 ? scale : Math(1),
                          .mean_part = from_mean ? weight : weight - Math(1),
                          .square_before = number(pass.square_before, Math(1)),
                          .square_k = number(pass.square_k, Math(0)),
                          .before = extras.before,
                          .k = extras.k,
                          .divisor = extras.divisor,
                          .addend = extras.addend,
                          .from_mean = from_mean},
                         extras.divides, n);
        continue;
      }
      OpOf<Math>(pass.op.code, registers[pass.op.result], x, extras, n);
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
              double grad_scale) {
  CheckFlats(flats);
  TORCH_INTERNAL_ASSERT(static_cast<int>(numbers.size()) >= form.numbers,
                        "a rule's form has more numbers than its row");
  if (flats[0].numel() == 0) return;
  if (!flats[0].device().is_cpu()) return RuleStepAten(form, flats, numbers, grad_scale);
  const auto step = FormFor(flats[0].scalar_type(), &RuleF64, &RuleF32, &RuleF16, &RuleBF16);
  TORCH_INTERNAL_ASSERT(step != nullptr, "a rule's step of ", c10::toString(flats[0].scalar_type()));
  RulePlan plan{.form = &form,
                .passes = PassesOf(form, static_cast<int>(flats.size())),
                .numbers = numbers.data(),
                .flats = {},
                .count = static_cast<int>(flats.size()),
                .grad_scale = grad_scale,
                .folds_scale = false,
                .scratch_grad = false};
  plan.folds_scale = FoldsScale(plan.passes);
  plan.scratch_grad = grad_scale != 1 && !plan.folds_scale;
  for (const RuleOp& op : form.ops) plan.scratch_grad = plan.scratch_grad || op.result == 1;
  for (size_t i = 0; i < flats.size(); ++i) {
    plan.flats[i] = i == 1 ? static_cast<char*>(const_cast<void*>(flats[i].const_data_ptr()))
                           : static_cast<char*>(flats[i].mutable_data_ptr());
  }
  at::parallel_for(0, flats[0].numel(), kGrain, [&](int64_t begin, int64_t end) { step(plan, begin, end); });
}

}  // namespace interlace
