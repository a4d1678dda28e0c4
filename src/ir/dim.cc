#include "ir/dim.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <set>

#include "base/scan.h"

namespace interlace {
namespace {

constexpr size_t kMaxTerms = 64;
constexpr size_t kMaxFactors = 16;
constexpr int kMaxDepth = 64;
constexpr size_t kMaxSymbol = 64;

std::optional<int64_t> CheckedAddInt(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}
std::optional<int64_t> CheckedMulInt(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}
// Python's floor division and modulo; b is not 0.
std::optional<int64_t> FloorDivInt(int64_t a, int64_t b) {
  if (a == std::numeric_limits<int64_t>::min() && b == -1) return std::nullopt;
  int64_t q = a / b;
  return q - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}
int64_t FloorModInt(int64_t a, int64_t b) {
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

}  // namespace

// Operations that may fail: nullopt means overflow or an expression that is too long.
struct DimTableImpl {
  using Term = DimTable::Term;
  using Sum = DimTable::Sum;
  using Atom = DimTable::Atom;
  using AtomKind = DimTable::AtomKind;
  DimTable& t;

  Sum ToSum(Dim d) const {
    if (!d.is_const()) return t.sums_[d.expr];
    if (d.value == 0) return {};
    return {Term{d.value, {}}};
  }

  // "b*s"; factors that are quotients stand in parentheses unless alone.
  std::string ProductText(const std::vector<int32_t>& factors, bool alone) const {
    std::string out;
    for (int32_t f : factors) {
      const Atom& atom = t.atoms_[f];
      bool quotient = atom.kind == AtomKind::kFloorDiv || atom.kind == AtomKind::kMod;
      if (!out.empty()) out += '*';
      if (quotient && !(alone && factors.size() == 1)) {
        out += '(' + atom.text + ')';
      } else {
        out += atom.text;
      }
    }
    return out;
  }

  std::string SumText(const Sum& sum) const {
    std::string out;
    for (const Term& term : sum) {
      if (term.factors.empty()) {
        if (term.coefficient >= 0 && !out.empty()) out += '+';
        out += std::to_string(term.coefficient);
        continue;
      }
      if (term.coefficient == -1) {
        out += '-';
      } else if (term.coefficient >= 0 && !out.empty()) {
        out += '+';
      }
      bool shown = term.coefficient != 1 && term.coefficient != -1;
      if (shown) out += std::to_string(term.coefficient) + "*";
      out += ProductText(term.factors, term.coefficient == 1);
    }
    return out;
  }

  // Sorts and merges terms, then looks the sum up or adds it.
  std::optional<Dim> Intern(Sum sum) {
    std::vector<std::pair<std::string, Term>> keyed;
    keyed.reserve(sum.size());
    for (Term& term : sum) {
      if (term.coefficient == 0) continue;
      if (term.factors.size() > kMaxFactors) return std::nullopt;
      std::sort(term.factors.begin(), term.factors.end(),
                [&](int32_t a, int32_t b) { return t.atoms_[a].text < t.atoms_[b].text; });
      std::string key = ProductText(term.factors, false);
      keyed.emplace_back(std::move(key), std::move(term));
    }
    // The constant (empty key) comes last.
    std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) {
      return a.first.empty() != b.first.empty() ? b.first.empty() : a.first < b.first;
    });
    Sum merged;
    for (size_t i = 0; i < keyed.size();) {
      size_t j = i + 1;
      int64_t total = keyed[i].second.coefficient;
      for (; j < keyed.size() && keyed[j].first == keyed[i].first; ++j) {
        auto next = CheckedAddInt(total, keyed[j].second.coefficient);
        if (!next) return std::nullopt;
        total = *next;
      }
      // The smallest integer has no negative, so "a-9223372036854775808*b" could not be read back.
      if (total == std::numeric_limits<int64_t>::min()) return std::nullopt;
      if (total != 0) {
        merged.push_back(std::move(keyed[i].second));
        merged.back().coefficient = total;
      }
      i = j;
    }
    if (merged.empty()) return Dim(0);
    if (merged.size() == 1 && merged[0].factors.empty()) return Dim(merged[0].coefficient);
    if (merged.size() > kMaxTerms) return std::nullopt;
    std::string text = SumText(merged);
    if (text.size() > kMaxDimText) return std::nullopt;
    Dim out;
    if (auto found = t.sum_by_text_.find(text); found != t.sum_by_text_.end()) {
      out.expr = found->second;
      return out;
    }
    out.expr = static_cast<int32_t>(t.sums_.size());
    t.sums_.push_back(std::move(merged));
    t.sum_text_.push_back(text);
    t.sum_by_text_.emplace(std::move(text), out.expr);
    return out;
  }

  std::optional<Dim> FromAtom(Atom atom) {
    if (atom.text.size() > kMaxDimText) return std::nullopt;
    int32_t id;
    if (auto found = t.atom_by_text_.find(atom.text); found != t.atom_by_text_.end()) {
      id = found->second;
    } else {
      id = static_cast<int32_t>(t.atoms_.size());
      t.atom_by_text_.emplace(atom.text, id);
      t.atoms_.push_back(std::move(atom));
    }
    return Intern({Term{1, {id}}});
  }

  // An operand of // or %: in parentheses unless one symbol or one integer that is not negative.
  std::string OperandText(Dim d) const {
    std::string text = t.ToString(d);
    for (char c : text) {
      if (!IsWordStart(c) && !IsDigit(c)) return "(" + text + ")";
    }
    return text;
  }

  std::optional<Dim> Add(Dim a, Dim b, int64_t sign) {
    if (a.is_const() && b.is_const()) {
      auto scaled = CheckedMulInt(b.value, sign);
      auto sum = scaled ? CheckedAddInt(a.value, *scaled) : std::nullopt;
      return sum ? std::optional<Dim>(Dim(*sum)) : std::nullopt;
    }
    Sum sum = ToSum(a);
    for (Term term : ToSum(b)) {
      auto scaled = CheckedMulInt(term.coefficient, sign);
      if (!scaled) return std::nullopt;
      term.coefficient = *scaled;
      sum.push_back(std::move(term));
    }
    return Intern(std::move(sum));
  }

  std::optional<Dim> Mul(Dim a, Dim b) {
    if (a.is_const() && b.is_const()) {
      auto product = CheckedMulInt(a.value, b.value);
      return product ? std::optional<Dim>(Dim(*product)) : std::nullopt;
    }
    if (a == Dim(1)) return b;
    if (b == Dim(1)) return a;
    Sum left = ToSum(a), right = ToSum(b), out;
    if (left.size() * right.size() > kMaxTerms * 4) return std::nullopt;
    for (const Term& l : left) {
      for (const Term& r : right) {
        auto product = CheckedMulInt(l.coefficient, r.coefficient);
        if (!product) return std::nullopt;
        Term term{*product, l.factors};
        term.factors.insert(term.factors.end(), r.factors.begin(), r.factors.end());
        out.push_back(std::move(term));
      }
    }
    return Intern(std::move(out));
  }

  // Whether a constant divides every coefficient of a.
  bool Divides(int64_t by, const Sum& sum) const {
    for (const Term& term : sum) {
      if (FloorModInt(term.coefficient, by) != 0) return false;
    }
    return true;
  }

  std::optional<Dim> FloorDiv(Dim a, Dim b) {
    if (b.is_const() && b.value != 0) {
      if (a.is_const()) {
        auto quotient = FloorDivInt(a.value, b.value);
        return quotient ? std::optional<Dim>(Dim(*quotient)) : std::nullopt;
      }
      Sum sum = ToSum(a);
      if (Divides(b.value, sum)) {
        for (Term& term : sum) {
          auto quotient = FloorDivInt(term.coefficient, b.value);
          if (!quotient) return std::nullopt;
          term.coefficient = *quotient;
        }
        return Intern(std::move(sum));
      }
    }
    return FromAtom({AtomKind::kFloorDiv, OperandText(a) + "//" + OperandText(b), a, b});
  }

  std::optional<Dim> Mod(Dim a, Dim b) {
    if (b.is_const() && b.value != 0 && Divides(b.value, ToSum(a))) return Dim(0);
    if (a.is_const() && b.is_const() && b.value != 0) return Dim(FloorModInt(a.value, b.value));
    return FromAtom({AtomKind::kMod, OperandText(a) + "%" + OperandText(b), a, b});
  }

  std::optional<Dim> MaxMin(Dim a, Dim b, bool max) {
    if (a == b) return a;
    if (a.is_const() && b.is_const()) return Dim(max ? std::max(a.value, b.value) : std::min(a.value, b.value));
    std::string left = t.ToString(a), right = t.ToString(b);
    if (right < left) {
      std::swap(left, right);
      std::swap(a, b);
    }
    return FromAtom({max ? AtomKind::kMax : AtomKind::kMin, (max ? "max(" : "min(") + left + "," + right + ")", a, b});
  }

  std::optional<Dim> Combine(AtomKind kind, Dim a, Dim b) {
    switch (kind) {
      case AtomKind::kFloorDiv:
        return FloorDiv(a, b);
      case AtomKind::kMod:
        return Mod(a, b);
      default:
        return MaxMin(a, b, kind == AtomKind::kMax);
    }
  }
};

namespace {

Dim OrLargest(std::optional<Dim> dim) {
  return dim ? *dim : Dim(std::numeric_limits<int64_t>::max());
}

// Recursive descent over one expression; depth is bounded.
class DimParser {
 public:
  DimParser(DimTable& table, std::string_view text) : table_(table), impl_{table}, text_(text) {}

  Result<Dim> Run() {
    INTERLACE_ASSIGN(Dim out, Sum());
    if (pos_ != text_.size()) return Unexpected();
    return out;
  }

 private:
  char Peek() const { return pos_ < text_.size() ? text_[pos_] : '\0'; }
  Error Unexpected() const {
    if (pos_ >= text_.size()) return MakeError("the expression ends too early");
    return MakeError("unexpected '", text_[pos_], "' in an expression");
  }
  static Result<Dim> Check(std::optional<Dim> dim) {
    if (!dim) return MakeError("the expression overflows 64 bits or is longer than ", kMaxDimText, " characters");
    return *dim;
  }

  Result<Dim> Sum() {
    if (++depth_ > kMaxDepth) return MakeError("the expression is nested deeper than ", kMaxDepth);
    INTERLACE_ASSIGN(Dim out, Product());
    while (Peek() == '+' || Peek() == '-') {
      int64_t sign = text_[pos_++] == '+' ? 1 : -1;
      INTERLACE_ASSIGN(Dim right, Product());
      INTERLACE_ASSIGN(out, Check(impl_.Add(out, right, sign)));
    }
    --depth_;
    return out;
  }

  Result<Dim> Product() {
    INTERLACE_ASSIGN(Dim out, Factor());
    while (Peek() == '*' || Peek() == '%' || Peek() == '/') {
      char op = text_[pos_++];
      if (op == '/' && Peek() != '/') return MakeError("use '//' for division in an expression");
      if (op == '/') ++pos_;
      INTERLACE_ASSIGN(Dim right, Factor());
      if (op != '*' && right == Dim(0)) return MakeError("division by zero");
      auto result = op == '*' ? impl_.Mul(out, right) : op == '/' ? impl_.FloorDiv(out, right) : impl_.Mod(out, right);
      INTERLACE_ASSIGN(out, Check(result));
    }
    return out;
  }

  Result<Dim> Factor() {
    char c = Peek();
    if (IsDigit(c) || (c == '-' && pos_ + 1 < text_.size() && IsDigit(text_[pos_ + 1]))) {
      int64_t value = 0;
      auto [end, problem] = std::from_chars(text_.data() + pos_, text_.data() + text_.size(), value);
      if (problem != std::errc()) return MakeError("this integer does not fit in 64 bits");
      pos_ = end - text_.data();
      return Dim(value);
    }
    if (c == '-') {
      ++pos_;
      if (++depth_ > kMaxDepth) return MakeError("the expression is nested deeper than ", kMaxDepth);
      INTERLACE_ASSIGN(Dim inner, Factor());
      --depth_;
      return Check(impl_.Mul(Dim(-1), inner));
    }
    if (c == '(') {
      ++pos_;
      INTERLACE_ASSIGN(Dim inner, Sum());
      if (Peek() != ')') return Unexpected();
      ++pos_;
      return inner;
    }
    if (!IsWordStart(c)) return Unexpected();
    size_t begin = pos_;
    while (IsWordStart(Peek()) || IsDigit(Peek())) ++pos_;
    std::string_view word = text_.substr(begin, pos_ - begin);
    if ((word == "max" || word == "min") && Peek() == '(') {
      ++pos_;
      INTERLACE_ASSIGN(Dim a, Sum());
      if (Peek() != ',') return Unexpected();
      ++pos_;
      INTERLACE_ASSIGN(Dim b, Sum());
      if (Peek() != ')') return Unexpected();
      ++pos_;
      return Check(impl_.MaxMin(a, b, word == "max"));
    }
    if (word.size() > kMaxSymbol) return MakeError("a symbol's name is longer than ", kMaxSymbol, " characters");
    return table_.Symbol(word);
  }

  DimTable& table_;
  DimTableImpl impl_;
  std::string_view text_;
  size_t pos_ = 0;
  int depth_ = 0;
};

}  // namespace

Dim DimTable::Symbol(std::string_view name) {
  return OrLargest(DimTableImpl{*this}.FromAtom({AtomKind::kSymbol, std::string(name), {}, {}}));
}
Dim DimTable::Add(Dim a, Dim b) {
  return OrLargest(DimTableImpl{*this}.Add(a, b, 1));
}
Dim DimTable::Sub(Dim a, Dim b) {
  return OrLargest(DimTableImpl{*this}.Add(a, b, -1));
}
Dim DimTable::Mul(Dim a, Dim b) {
  return OrLargest(DimTableImpl{*this}.Mul(a, b));
}
Dim DimTable::FloorDiv(Dim a, Dim b) {
  return OrLargest(DimTableImpl{*this}.FloorDiv(a, b));
}
Dim DimTable::Mod(Dim a, Dim b) {
  return OrLargest(DimTableImpl{*this}.Mod(a, b));
}

Result<Dim> DimTable::CheckedMul(Dim a, Dim b) {
  if (auto out = DimTableImpl{*this}.Mul(a, b)) return *out;
  return MakeError("the product of ", ToString(a), " and ", ToString(b), " does not fit in 64 bits");
}

std::string DimTable::ToString(Dim dim) const {
  return dim.is_const() ? std::to_string(dim.value) : sum_text_[dim.expr];
}

Result<Dim> DimTable::Parse(std::string_view text) {
  // What was printed is canonical already, and mostly known.
  const auto found = text.size() <= kMaxDimText ? sum_by_text_.find(std::string(text)) : sum_by_text_.end();
  if (found == sum_by_text_.end()) return DimParser(*this, text).Run();
  Dim out;
  out.expr = found->second;
  return out;
}

Result<int64_t> DimTable::Evaluate(Dim dim, const Binding& binding) const {
  if (dim.is_const()) return dim.value;
  auto overflow = [&] { return MakeError("'", ToString(dim), "' overflows 64 bits under this binding"); };
  int64_t total = 0;
  for (const Term& term : sums_[dim.expr]) {
    int64_t product = term.coefficient;
    for (int32_t f : term.factors) {
      const Atom& atom = atoms_[f];
      int64_t value = 0;
      if (atom.kind == AtomKind::kSymbol) {
        auto found = binding.find(atom.text);
        if (found == binding.end()) return MakeError("symbol '", atom.text, "' has no value; bind it first");
        value = found->second;
      } else {
        INTERLACE_ASSIGN(int64_t a, Evaluate(atom.a, binding));
        INTERLACE_ASSIGN(int64_t b, Evaluate(atom.b, binding));
        bool divides = atom.kind == AtomKind::kFloorDiv || atom.kind == AtomKind::kMod;
        if (divides && b == 0) return MakeError("'", atom.text, "' divides by zero under this binding");
        if (atom.kind == AtomKind::kFloorDiv) {
          auto quotient = FloorDivInt(a, b);
          if (!quotient) return overflow();
          value = *quotient;
        } else if (atom.kind == AtomKind::kMod) {
          value = FloorModInt(a, b);
        } else {
          value = atom.kind == AtomKind::kMax ? std::max(a, b) : std::min(a, b);
        }
      }
      auto next = CheckedMulInt(product, value);
      if (!next) return overflow();
      product = *next;
    }
    auto next = CheckedAddInt(total, product);
    if (!next) return overflow();
    total = *next;
  }
  return total;
}

Result<Dim> DimTable::Substitute(Dim dim, const Binding& binding) {
  if (dim.is_const()) return dim;
  DimTableImpl impl{*this};
  auto overflow = [&] { return MakeError("'", ToString(dim), "' overflows 64 bits under this binding"); };
  Dim total;
  Sum sum = sums_[dim.expr];  // a copy: interning below may move the tables
  for (const Term& term : sum) {
    Dim product(term.coefficient);
    for (int32_t f : term.factors) {
      Atom atom = atoms_[f];
      Dim value;
      if (atom.kind == AtomKind::kSymbol) {
        auto found = binding.find(atom.text);
        value = found == binding.end() ? Symbol(atom.text) : Dim(found->second);
      } else {
        INTERLACE_ASSIGN(Dim a, Substitute(atom.a, binding));
        INTERLACE_ASSIGN(Dim b, Substitute(atom.b, binding));
        bool divides = atom.kind == AtomKind::kFloorDiv || atom.kind == AtomKind::kMod;
        if (divides && b == Dim(0)) return MakeError("'", atom.text, "' divides by zero under this binding");
        auto combined = impl.Combine(atom.kind, a, b);
        if (!combined) return overflow();
        value = *combined;
      }
      auto next = impl.Mul(product, value);
      if (!next) return overflow();
      product = *next;
    }
    auto next = impl.Add(total, product, 1);
    if (!next) return overflow();
    total = *next;
  }
  return total;
}

std::vector<std::string> DimTable::SymbolsOf(Dim dim) const {
  std::set<std::string> names;
  std::vector<Dim> open = {dim};
  while (!open.empty()) {
    Dim next = open.back();
    open.pop_back();
    if (next.is_const()) continue;
    for (const Term& term : sums_[next.expr]) {
      for (int32_t f : term.factors) {
        const Atom& atom = atoms_[f];
        if (atom.kind == AtomKind::kSymbol) {
          names.insert(atom.text);
        } else {
          open.push_back(atom.a);
          open.push_back(atom.b);
        }
      }
    }
  }
  return {names.begin(), names.end()};
}

}  // namespace interlace
