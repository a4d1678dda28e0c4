#include "runtime/rule_passes.h"

#include <algorithm>
#include <utility>

namespace interlace {

namespace {

class Fusion {
 public:
  Fusion(const RuleForm& form, int flats) : flats_(flats) {
    for (const RuleOp& op : form.ops) passes_.push_back({.op = op});
  }

  std::vector<RulePass> Run() {
    for (size_t i = 0; i < passes_.size(); ++i) Root(i);
    for (size_t i = 0; i < passes_.size(); ++i) {
      if (!Scale(i)) continue;
      passes_.erase(passes_.begin() + static_cast<std::ptrdiff_t>(i));
      --i;
    }
    for (size_t i = 0; i < passes_.size(); ++i) Moments(i);
    return std::move(passes_);
  }

 private:
  static bool Reads(const RulePass& pass, RuleOperand value) {
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
    RulePass& heir = passes_[j];
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
    RulePass& heir = passes_[j];
    const bool sum =
        heir.op.code == RuleCode::kAdd || heir.op.code == RuleCode::kAddcmul || heir.op.code == RuleCode::kAddcdiv;
    const RuleOperand value = passes_[i].op.result;
    if (!sum || heir.op.operands[0] != value || heir.op.operands[1] == value) return false;
    if (heir.op.code != RuleCode::kAdd && heir.op.operands[2] == value) return false;
    heir.op.operands[0] = x[0];
    heir.before = x[1];
    return true;
  }

  // [m = lerp(m, g, n)] v = addcmul(v, g, g, n) [u = max(u, v)] w = addcdiv(w, m or g, root of v or u, n), next to one
  // another: one loop. g is not one of the others.
  void Moments(size_t i) {
    RulePass loop;
    size_t at = i;
    const auto pass = [&](RuleCode code) {
      return at < passes_.size() && passes_[at].op.code == code && passes_[at].square == kNothing ? &passes_[at]
                                                                                                  : nullptr;
    };
    const auto in_place = [](const RulePass& p) { return p.op.result == p.op.operands[0]; };
    if (const RulePass* mean = pass(RuleCode::kLerp)) {
      if (!in_place(*mean) || !IsNumber(mean->op.operands[2])) return;
      loop.mean = mean->op.result, loop.gradient = mean->op.operands[1], loop.mean_weight = mean->op.operands[2];
      ++at;
    }
    const RulePass* square = pass(RuleCode::kAddcmul);
    if (square == nullptr || !in_place(*square) || square->op.operands[1] != square->op.operands[2]) return;
    if (loop.mean != kNothing && square->op.operands[1] != loop.gradient) return;
    loop.gradient = square->op.operands[1], loop.square = square->op.result;
    loop.square_before = square->before, loop.square_k = square->op.operands[3];
    ++at;
    if (const RulePass* largest = pass(RuleCode::kMax)) {
      if (!in_place(*largest) || largest->op.operands[1] != loop.square) return;
      loop.largest = largest->op.result;
      ++at;
    }
    const RulePass* weight = pass(RuleCode::kAddcdiv);
    if (weight == nullptr || !in_place(*weight) || !weight->root) return;
    if (weight->op.operands[1] != (loop.mean != kNothing ? loop.mean : loop.gradient)) return;
    if (weight->op.operands[2] != (loop.largest != kNothing ? loop.largest : loop.square)) return;
    std::vector<RuleOperand> apart = {loop.gradient, loop.square, weight->op.result};
    if (loop.mean != kNothing) apart.push_back(loop.mean);
    if (loop.largest != kNothing) apart.push_back(loop.largest);
    std::sort(apart.begin(), apart.end());
    if (std::adjacent_find(apart.begin(), apart.end()) != apart.end()) return;
    loop.op = weight->op, loop.before = weight->before, loop.root = true;
    loop.divisor = weight->divisor, loop.addend = weight->addend, loop.factor = weight->factor;
    passes_[i] = loop;
    passes_.erase(passes_.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                  passes_.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }

  std::vector<RulePass> passes_;
  const int flats_;
};

}  // namespace

std::vector<RulePass> PassesOf(const RuleForm& form, int flats) {
  return Fusion(form, flats).Run();
}

bool FoldsScale(const std::vector<RulePass>& passes) {
  return std::all_of(passes.begin(), passes.end(), [](const RulePass& pass) {
    const auto& x = pass.op.operands;
    const int count = pass.square != kNothing ? 0 : TraitsOf(pass.op.code).operands;
    return std::find(x.begin(), x.begin() + count, RuleOperand{1}) == x.begin() + count && pass.op.result != 1;
  });
}

}  // namespace interlace
