// stack_products.cc — a sum of products of few rows each is one product of all rows.
//   before: %5: f32[64,16] = aten.mm(%3, %4)              %3: f32[64,2]{1,64} in %1+0, %4: f32[2,16]
//           %8: f32[64,16] = aten.mm(%6, %7)              %6: f32[64,2]{1,64} in %2+0
//           %9: f32[64,16] = aten.add.Tensor(%5, %8)      ... and so on, `least` products at least
//   after:  %a: f32[2n,64] = aten.cat([view of %1, view of %2, ...])
//           %b: f32[2n,16] = aten.cat([%4, %7, ...])
//           %9: f32[64,16] = aten.mm(view of %a, %b)
// So the gradient of a weight that a recurrent net uses at every step of a sequence is made at the end, and not added
// up through memory once a step. It takes the rows' memory until then, and rounds as one product does: the sums of its
// elements are made in another order. A product of k rows pays where writing the rows once more costs less than the
// addition: 2 k (m + n) numbers against 3 m n.
//
// Runs on a captured program, after canonicalize. Option: least. No errors.
#include <vector>

#include "ir/op_table.h"
#include "passes/passes.h"
#include "passes/phase_editor.h"

namespace interlace {
namespace {

class Stacker {
 public:
  Stacker(Program& program, Phase& phase, int64_t least)
      : program_(program), facts_(program, phase), edit_(program, phase), least_(least) {}

  bool Run() {
    bool changed = false;
    for (int32_t i = edit_.size(); i-- > 0;) {  // a sum's last addition comes first
      if (!taken_.empty() && taken_[i]) continue;
      if (IsSum(edit_.op(i))) changed = Stack(i) || changed;
    }
    edit_.Finish();
    return changed;
  }

 private:
  struct Product {
    int32_t index;
    ValueId left, right;
  };

  static bool IsSum(const Op& op) {
    return op.name == "aten.add.Tensor" && op.args.size() == 2 && op.named.empty() &&
           op.args[0].kind == Arg::Kind::kValue && op.args[1].kind == Arg::Kind::kValue;
  }

  // The op whose only user takes its result as it is, which nobody else reads or writes; -1: none.
  int32_t OnlyFor(int32_t user, ValueId id) {
    const int32_t index = facts_.def[id];
    const bool alone = index >= 0 && program_.RootOf(id) == id && facts_.writes[id].empty() && !facts_.leaves[id] &&
                       facts_.uses[id] == std::vector<int32_t>{user};
    return alone && edit_.op(index).part == edit_.op(user).part ? index : -1;
  }

  // A product of the transpose of few rows, and few rows.
  bool IsOfFewRows(const Op& op) {
    if (!IsProduct(op)) return false;
    const Value &left = program_.value(op.args[0].value), &right = program_.value(op.args[1].value);
    for (const Type* type : {&left.type, &right.type}) {
      for (const Dim& dim : type->sizes) {
        if (!dim.is_const()) return false;
      }
    }
    if (!(left.type.strides[0] == Dim(1)) || !left.type.strides[1].is_const()) return false;
    const int64_t m = left.type.sizes[0].value, k = left.type.sizes[1].value, n = right.type.sizes[1].value;
    return left.type.strides[1].value >= m && 2 * k * (m + n) <= 3 * m * n && AreKept(left.id, right.id);
  }
  bool AreKept(ValueId left, ValueId right) const {
    return facts_.writes[program_.RootOf(left)].empty() && facts_.writes[program_.RootOf(right)].empty();
  }

  bool Stack(int32_t last) {
    std::vector<int32_t> sums = {last};
    std::vector<Product> products;
    std::vector<ValueId> others;
    const Type type = program_.value(edit_.op(last).results[0]).type;
    for (size_t at = 0; at < sums.size(); ++at) {
      const int32_t sum = sums[at];
      for (const Arg& arg : edit_.op(sum).args) {
        const int32_t index = program_.value(arg.value).type == type ? OnlyFor(sum, arg.value) : -1;
        if (index >= 0 && IsSum(edit_.op(index))) {
          sums.push_back(index);
        } else if (index >= 0 && IsOfFewRows(edit_.op(index))) {
          const Op& op = edit_.op(index);
          products.push_back({index, op.args[0].value, op.args[1].value});
        } else {
          others.push_back(arg.value);
        }
      }
    }
    taken_.resize(edit_.size(), false);
    for (const int32_t sum : sums) taken_[sum] = true;
    if (static_cast<int64_t>(products.size()) < least_) return false;
    const Op& like = edit_.op(last);
    std::vector<Arg> left, right;
    int64_t rows = 0;
    for (const Product& product : products) {
      const Value value = program_.value(product.left);
      Op& view = AddLike(program_, like, OpKind::kView, {value.root});
      const Type turned{
          value.type.dtype, {value.type.sizes[1], value.type.sizes[0]}, {value.type.strides[1], value.type.strides[0]}};
      left.push_back(Arg::Of(program_.AddView(view, turned, value.root, value.offset)));
      edit_.Before(last, view.id);
      right.push_back(Arg::Of(product.right));
      rows += value.type.sizes[1].value;
      edit_.Remove(product.index);
    }
    const ValueId stacked_left = Cat(last, std::move(left), {Dim(rows), type.sizes[0]});
    const ValueId stacked_right = Cat(last, std::move(right), {Dim(rows), type.sizes[1]});
    Op& view = AddLike(program_, like, OpKind::kView, {stacked_left});
    const ValueId transposed = program_.AddView(
        view, Type{type.dtype, {type.sizes[0], Dim(rows)}, {Dim(1), type.sizes[0]}}, stacked_left, Dim(0));
    edit_.Before(last, view.id);
    for (const int32_t sum : sums) {
      if (sum != last) edit_.Remove(sum);
    }
    if (others.empty()) {
      Op& product = edit_.op(last);
      product.SetName("aten.mm");
      product.args = {Arg::Of(transposed), Arg::Of(stacked_right)};
      return true;
    }
    Op& product = AddLike(program_, like, "aten.mm", {transposed, stacked_right});
    ValueId sum = program_.AddResult(product, type);
    edit_.Before(last, product.id);
    for (size_t i = 0; i + 1 < others.size(); ++i) {
      Op& add = AddLike(program_, like, "aten.add.Tensor", {sum, others[i]});
      sum = program_.AddResult(add, type);
      edit_.Before(last, add.id);
    }
    edit_.op(last).args = {Arg::Of(sum), Arg::Of(others.back())};
    return true;
  }

  ValueId Cat(int32_t last, std::vector<Arg> parts, std::vector<Dim> sizes) {
    Op& cat = AddLike(program_, edit_.op(last), "aten.cat");
    const DType dtype = program_.value(parts[0].value).type.dtype;
    cat.args = {Arg::List(std::move(parts)), Arg::Int(0)};
    std::vector<Dim> strides = program_.ContiguousStrides(sizes);
    const ValueId result = program_.AddResult(cat, Type{dtype, std::move(sizes), std::move(strides)});
    edit_.Before(last, cat.id);
    return result;
  }

  Program& program_;
  PhaseFacts facts_;
  PhaseEditor edit_;
  int64_t least_;
  std::vector<char> taken_;  // by op: part of a sum that has been looked at
};

}  // namespace

Result<bool> StackProducts(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(const int64_t least, options.Int("least", 4, 2));
  bool changed = false;
  for (Phase& phase : program.phases) changed = Stacker(program, phase, least).Run() || changed;
  return changed;
}

}  // namespace interlace
