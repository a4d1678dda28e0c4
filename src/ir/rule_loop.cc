#include "ir/rule_loop.h"

#include <algorithm>
#include <map>

#include "base/append.h"
#include "base/digest.h"
#include "ir/op_table.h"

namespace interlace {
namespace {

// What every file begins with: the ops by the names that they have in a form, and floats of 16 bits as in
// base/clones.h. No header, so that a compiler is done with it at once.
constexpr std::string_view kOps = R"(namespace {
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
inline u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
inline u64 bits_of(double x) { return __builtin_bit_cast(u64, x); }
inline float float_of(u32 x) { return __builtin_bit_cast(float, x); }
inline double float_of(u64 x) { return __builtin_bit_cast(double, x); }
struct f16 {
  u16 bits;
  explicit f16(float value) {
    const u32 x = bits_of(value), magnitude = x & 0x7fffffffu;
    const u32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    u32 half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    bits = (u16)(half | ((x >> 16) & 0x8000u));
  }
  operator float() const {
    const u32 magnitude = bits & 0x7fffu;
    const u32 normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7f800000u;
    const u32 subnormal = bits_of((float)(int)magnitude * 0x1p-24f);
    const u32 wide = magnitude < 0x400u ? subnormal : magnitude >= 0x7c00u ? special : normal;
    return float_of(wide | (u32)(bits & 0x8000u) << 16);
  }
};
struct bf16 {
  u16 bits;
  explicit bf16(float value) {
    const u32 x = bits_of(value), rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    bits = (u16)((x & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
  operator float() const { return float_of((u32)bits << 16); }
};
#define OP template <typename F> inline F
// x, made to depend on what lies in memory: none is 0, which no compiler knows.
OP over(F old, F x, decltype(bits_of(F())) none) { return float_of(bits_of(x) | (bits_of(old) & none)); }
#define IN_LIBRARY(name) \
  inline float name(float a) { return __builtin_##name##f(a); } \
  inline double name(double a) { return __builtin_##name(a); }
IN_LIBRARY(sqrt) IN_LIBRARY(exp) IN_LIBRARY(log) IN_LIBRARY(tanh)
inline float pow(float a, float b) { return __builtin_powf(a, b); }
inline double pow(double a, double b) { return __builtin_pow(a, b); }
OP copy(F a) { return a; }
OP neg(F a) { return -a; }
OP abs(F a) { return a < 0 ? -a : a + F(0); }
OP sign(F a) { return F(a > 0) - F(a < 0); }
OP rsqrt(F a) { return F(1) / sqrt(a); }
OP reciprocal(F a) { return F(1) / a; }
OP mul(F a, F b) { return a * b; }
OP div(F a, F b) { return a / b; }
OP max(F a, F b) { return (a > b) | (a != a) ? a : b; }
OP min(F a, F b) { return (a < b) | (a != a) ? a : b; }
OP gt(F a, F b) { return F(a > b); }
OP ge(F a, F b) { return F(a >= b); }
OP lt(F a, F b) { return F(a < b); }
OP le(F a, F b) { return F(a <= b); }
OP eq(F a, F b) { return F(a == b); }
OP ne(F a, F b) { return F(a != b); }
OP add(F a, F b, F n) { return a + n * b; }
OP lerp(F a, F b, F c) {
  const bool small = (c < F(0.5)) & (c > F(-0.5));
  return (small ? a : b) + (small ? c : c - F(1)) * (b - a);
}
// The same of a number: what it decides is decided before the loop, and compilers make vectors of what is left.
template <typename F> struct weight {
  decltype(bits_of(F())) mask;
  F part;
  explicit weight(F c) {
    const bool small = (c < F(0.5)) & (c > F(-0.5));
    mask = -(decltype(mask))small;
    part = small ? c : c - F(1);
  }
};
OP lerp(F a, F b, weight<F> c) {
  return float_of((bits_of(a) & c.mask) | (bits_of(b) & ~c.mask)) + c.part * (b - a);
}
OP where(F a, F b, F c) { return a != 0 ? b : c; }
OP addcmul(F a, F b, F c, F n) { return a + n * b * c; }
OP addcdiv(F a, F b, F c, F n) { return a + n * b / c; }
}
)";

class Writer {
 public:
  Writer(const RuleForm& form, int states, DType dtype) : form_(form), flats_(2 + states), dtype_(dtype) {}

  // All but the name.
  std::string Run() {
    const std::string type = dtype_ == DType::kF64    ? "double"
                             : dtype_ == DType::kF32  ? "float"
                             : dtype_ == DType::kBF16 ? "bf16"
                                                      : "f16";
    const std::string math = dtype_ == DType::kF64 ? "double" : "float";
    std::string out = "(char* const* flats, const double* numbers, double scale, long begin, long end) {\n  typedef " +
                      math + " F;\n";
    for (int r = 0; r < flats_; ++r) {
      if (!Reads(r) && !Writes(r)) continue;
      Append(out, "  ", type, "* __restrict const p", r, " = (", type, "*)flats[", r, "];\n");
    }
    if (Reads(1)) out += "  const F s = (F)scale;\n";
    for (int n = 0; n < form_.numbers; ++n) Append(out, "  const F n", n, " = (F)numbers[", n, "];\n");
    for (int n = 0; n < form_.numbers; ++n) {
      const auto weighs = [n](const RuleOp& op) { return IsWeight(op) && NumberIndex(op.operands[2]) == n; };
      if (!std::any_of(form_.ops.begin(), form_.ops.end(), weighs)) continue;
      Append(out, "  const weight<F> c", n, "(n", n, ");\n");
    }
    // A flat that is written and never read takes a third longer than one that is read as well: its lines come late.
    bool only_written = false;
    for (int r = 0; r < flats_; ++r) only_written = only_written || (Writes(r) && !Reads(r));
    if (only_written) out += "  volatile int zero = 0;\n  const int none = zero;\n";
    out += "#pragma GCC ivdep\n  for (long i = begin; i < end; ++i) {\n    F ";
    for (int r = 0; r < form_.registers; ++r) {
      Append(out, r == 0 ? "" : ", ", Name(static_cast<RuleOperand>(r)));
      if (r < flats_ && Reads(r)) Append(out, " = F(p", r, "[i])", r == 1 ? " * s" : "");
    }
    out += ";\n";
    for (const RuleOp& op : form_.ops) {
      const RuleTraits& traits = TraitsOf(op.code);
      Append(out, "    ", Name(op.result), " = ", traits.name, '(');
      for (int i = 0; i < traits.operands; ++i) {
        out += i == 0 ? "" : ", ";
        out += i == 2 && IsWeight(op) ? "c" + std::to_string(NumberIndex(op.operands[i])) : Name(op.operands[i]);
      }
      out += ");\n";
    }
    for (int r = 0; r < flats_; ++r) {
      if (!Writes(r)) continue;
      const std::string place = "p" + std::to_string(r) + "[i]", value = Name(static_cast<RuleOperand>(r));
      const std::string given = Reads(r) ? value : "over(F(" + place + "), " + value + ", none)";
      Append(out, "    ", place, " = ", type, '(', given, ");\n");
    }
    return out + "  }\n}\n";
  }

 private:
  std::string Name(RuleOperand operand) const {
    if (IsNumber(operand)) return "n" + std::to_string(NumberIndex(operand));
    if (operand < 2) return operand == 0 ? "w" : "g";
    return operand < flats_ ? "s" + std::to_string(operand - 2) : "t" + std::to_string(operand - flats_);
  }
  static bool IsWeight(const RuleOp& op) { return op.code == RuleCode::kLerp && IsNumber(op.operands[2]); }
  // Whether the loop needs what lies in memory: an op takes the register before one gives it.
  bool Reads(int r) const {
    for (const RuleOp& op : form_.ops) {
      const auto end = op.operands.begin() + TraitsOf(op.code).operands;
      if (std::find(op.operands.begin(), end, r) != end) return true;
      if (op.result == r) return false;
    }
    return false;
  }
  bool Writes(int r) const {
    return r != 1 && std::any_of(form_.ops.begin(), form_.ops.end(), [r](const RuleOp& op) { return op.result == r; });
  }

  const RuleForm& form_;
  const int flats_;
  const DType dtype_;
};

}  // namespace

RuleLoopText LoopOf(const RuleForm& form, int states, DType dtype) {
  const std::string body = Writer(form, states, dtype).Run();
  const std::string name = "rule_" + Digest(body).substr(0, 16);
  return {.name = name, .text = "extern \"C\" void " + name + body};
}

std::string RuleLoopsOf(const Program& program, bool on_host) {
  std::vector<RuleLoopText> loops;
  ForEachOp(program, [&](const Op& op) {
    if (op.kind != OpKind::kUpdateRule || (on_host && !StepsOnHost(op))) return;
    const DType dtype = program.value(op.args[0].value).type.dtype;
    const std::vector<Arg>& ranges = op.Attr("ranges")->list;
    for (size_t i = 2; i < ranges.size(); i += 3) {
      const UpdateRule& rule = program.rules[program.groups[ranges[i].integer.value].rule];
      const int states = static_cast<int>(rule.states.size());
      for (const RuleForm& form : rule.forms) loops.push_back(LoopOf(form, states, dtype));
    }
  });
  return loops.empty() ? "" : FileOf(loops);
}

std::string FileOf(const std::vector<RuleLoopText>& loops) {
  std::map<std::string_view, std::string_view> by_name;
  for (const RuleLoopText& loop : loops) by_name.emplace(loop.name, loop.text);
  std::string out(kOps);
  for (const auto& [name, text] : by_name) out += text;
  return out;
}

}  // namespace interlace
