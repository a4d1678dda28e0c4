// dim.h — a size, stride, offset or integer argument: a 64-bit integer or a symbolic expression.
//
// Expressions are interned in a DimTable owned by the Program, so equal expressions have equal ids and Dim compares by
// value. Canonical form: a sum of products, terms sorted, constants folded; floor division, modulo, max and min are
// opaque factors whose operands are canonical. Worked example: (s*2+b*s) and (b*s+2*s) are the same Dim and print as
// "b*s+2*s".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"

namespace interlace {

struct Dim {
  int64_t value = 0;  // the number, when expr < 0
  int32_t expr = -1;  // index into the DimTable, or -1
  Dim() = default;
  Dim(int64_t v) : value(v) {}  // NOLINT: implicit on purpose
  bool is_const() const { return expr < 0; }
  friend bool operator==(const Dim& a, const Dim& b) { return a.expr == b.expr && (a.expr >= 0 || a.value == b.value); }
};

inline constexpr size_t kMaxDimText = 1024;  // characters of one expression's canonical text

// Values for symbols, by name: {"b": 4, "s": 128, "rank_dp": 0}.
using Binding = std::unordered_map<std::string, int64_t>;

class DimTable {
 public:
  // Arithmetic never fails: what overflows 64 bits, or grows beyond kMaxDimText characters, becomes the largest
  // integer. Parse, Evaluate and Substitute report it instead.
  // A symbol such as "b"; the same name gives the same Dim.
  Dim Symbol(std::string_view name);
  Dim Add(Dim a, Dim b);
  Dim Sub(Dim a, Dim b);
  Dim Mul(Dim a, Dim b);
  Dim FloorDiv(Dim a, Dim b);
  Dim Mod(Dim a, Dim b);

  // Product that reports overflow. Error: the product does not fit in 64 bits or is too long.
  Result<Dim> CheckedMul(Dim a, Dim b);

  // Text without blanks, e.g. "b*s+2*s".
  std::string ToString(Dim dim) const;
  // Parses a dim expression that spans all of `text`. Error: syntax, overflow of 64 bits, division by zero.
  Result<Dim> Parse(std::string_view text);
  // The number under a binding. Error: unbound symbol (named), overflow, division by zero.
  Result<int64_t> Evaluate(Dim dim, const Binding& binding) const;
  // Replaces the bound symbols, keeps the others.
  Result<Dim> Substitute(Dim dim, const Binding& binding);
  // Names of the symbols in dim, sorted.
  std::vector<std::string> SymbolsOf(Dim dim) const;

 private:
  // A product: coefficient times interned factors (sorted, with repetition).
  struct Term {
    int64_t coefficient = 1;
    std::vector<int32_t> factors;  // ids of atoms
  };
  enum class AtomKind : uint8_t { kSymbol, kFloorDiv, kMod, kMax, kMin };
  struct Atom {
    AtomKind kind = AtomKind::kSymbol;
    std::string text;  // a symbol's name; canonical text of the others
    Dim a, b;          // operands of the others
  };
  using Sum = std::vector<Term>;
  friend struct DimTableImpl;
  std::vector<Atom> atoms_;
  std::vector<Sum> sums_;
  std::vector<std::string> sum_text_;  // canonical text, by sum
  std::unordered_map<std::string, int32_t> atom_by_text_;
  std::unordered_map<std::string, int32_t> sum_by_text_;
};

}  // namespace interlace
