// Starts of transfers, each by itself: axis, dimensions and peers exist, and results have the sizes that follow from
// the operands'. What lies between a start and its wait: verify_flow.cc.
#include <algorithm>

#include "base/suggest.h"
#include "ir/op_table.h"
#include "ir/verify_internal.h"

namespace interlace {
namespace {

class Transfers : OpChecks {
 public:
  Transfers(const Program& program, const Op& op, DimTable& dims, VerifyReport& report)
      : OpChecks(program, report), op_(op), dims_(dims) {}

  void Run() {
    switch (TraitsOf(op_).family) {
      case OpFamily::kUnit:
        return OfUnits();
      case OpFamily::kCollective:
        return OfActivations();
      case OpFamily::kPeer:
        return Message();
      default:
        return;
    }
  }

 private:
  void Report(const std::string& what, ValueId at = kNone) { report_.AtOp(op_, what, at); }
  static std::string Text(int64_t n) { return std::to_string(n); }

  // One result for each operand.
  bool Paired() {
    if (!ValueOperands(op_)) return false;
    if (op_.args.empty()) {
      Report(op_.name + " needs at least one operand");
      return false;
    }
    if (op_.results.size() != op_.args.size() ||
        std::find(op_.results.begin(), op_.results.end(), kNone) != op_.results.end()) {
      Report(op_.name + " has one result for each operand");
      return false;
    }
    return true;
  }

  void OfUnits() {
    if (!Paired()) return;
    if (op_.units.size() != op_.args.size())
      return Report(op_.name + " needs units=[..] with one unit for each operand");
    const Unit& first = program_.units[op_.units[0]];
    for (UnitId id : op_.units) {
      if (!SameAxes(program_.units[id], first))
        return Report("the units of one " + op_.name + " must share their axes");
    }
    const bool gathers = op_.kind == OpKind::kGatherStart;
    const bool parts = op_.Attr(kParts) != nullptr;
    if (parts && (!gathers || !first.parted() || op_.Attr(kParts)->kind != Arg::Kind::kBool))
      return Report("parts=true is for gathers of units that have a part");
    for (size_t i = 0; i < op_.args.size(); ++i) {
      const Unit& unit = program_.units[op_.units[i]];
      const ValueId small = gathers ? op_.args[i].value : op_.results[i];
      const ValueId large = gathers ? op_.results[i] : op_.args[i].value;
      const std::string name = "u" + Text(unit.id);
      const bool part = unit.parted() && (parts || !gathers);
      Elements(op_, small, part ? unit.part : unit.shard, (part ? "the part of " : "the shard of ") + name);
      Elements(op_, large, parts ? unit.shard : unit.numel, (parts ? "the shard of " : "numel of ") + name);
      if (gathers && TypeOf(small).dtype != TypeOf(large).dtype)
        Report("gather.start keeps the dtype of its operand", large);
    }
  }

  // ---- activations ----

  // The size of axis=; 0: reported.
  int64_t AxisRanks() {
    const std::string_view name = AxisOf(program_, op_);
    std::vector<std::string_view> known;
    for (const Axis& axis : program_.mesh) {
      if (axis.name == name) return axis.size;
      known.push_back(axis.name);
    }
    Report(op_.name + " needs axis=NAME with an axis of the mesh" + (name.empty() ? "" : DidYouMean(name, known)));
    return 0;
  }

  // An integer attribute from 0 to `end` - 1; -1: reported.
  int64_t Index(std::string_view name, int64_t end, const std::string& of) {
    const Arg* arg = op_.Attr(name);
    const bool number = arg != nullptr && arg->kind == Arg::Kind::kInt && arg->integer.is_const();
    if (number && arg->integer.value >= 0 && arg->integer.value < end) return arg->integer.value;
    Report(op_.name + " needs " + std::string(name) + "= with " + of + ": " +
           (end < 1    ? "there is none"
            : end == 1 ? "0"
                       : "0 to " + Text(end - 1)));
    return -1;
  }

  void OfActivations() {
    const bool paired = Paired();
    const int64_t ranks = AxisRanks();
    if (!paired || ranks == 0) return;
    if (op_.kind == OpKind::kBroadcastStart) Index("root", ranks, "a rank of the axis");
    for (size_t i = 0; i < op_.args.size(); ++i) {
      const ValueId from = op_.args[i].value, to = op_.results[i];
      if (TypeOf(from).dtype != TypeOf(to).dtype) {
        Report(op_.name + " keeps the dtype of its operand", to);
        continue;
      }
      if (!Sizes(from, to, ranks)) return;
      Contiguous(to);
    }
  }

  // Pieces from other ranks land where they belong.
  void Contiguous(ValueId id) {
    const Type& type = TypeOf(id);
    Dim next = 1;
    for (size_t i = type.sizes.size(); i-- > 0;) {
      if (!(type.sizes[i] == Dim(1)) && !(type.strides[i] == next))
        return Report("the result of " + op_.name + " must be contiguous", id);
      next = dims_.Mul(next, type.sizes[i]);
    }
  }

  // False: an attribute is wrong, and the other operands need not be looked at.
  bool Sizes(ValueId from, ValueId to, int64_t ranks) {
    std::vector<Dim> wanted = TypeOf(from).sizes;
    const auto end = static_cast<int64_t>(wanted.size());
    const auto needs_dim = [&](std::string_view name) { return Index(name, end, "a dimension of %" + Text(from)); };
    const Exchange exchange = TraitsOf(op_).exchange;
    if (exchange == Exchange::kGather || exchange == Exchange::kReduce || exchange == Exchange::kAllToAll) {
      const int64_t dim = needs_dim("dim");
      if (dim < 0) return false;
      const int64_t along = exchange == Exchange::kAllToAll ? needs_dim("to") : dim;
      if (along < 0) return false;
      if (exchange != Exchange::kGather) {  // cut into equal parts
        Dim& size = wanted[static_cast<size_t>(dim)];
        const Dim part = dims_.FloorDiv(size, Dim(ranks));
        if (!(dims_.Mul(part, Dim(ranks)) == size)) {
          Report("dimension " + Text(dim) + " of %" + Text(from) + ", " + dims_.ToString(size) +
                     ", cannot be cut into " + Text(ranks) + " equal parts",
                 from);
          return true;
        }
        size = part;
      }
      if (exchange != Exchange::kReduce) {
        Dim& size = wanted[static_cast<size_t>(along)];
        size = dims_.Mul(size, Dim(ranks));
      }
    }
    if (TypeOf(to).sizes == wanted) return true;
    std::string list;
    for (const Dim& size : wanted) list += (list.empty() ? "" : ",") + dims_.ToString(size);
    Report("the result of " + op_.name + " along an axis of " + Text(ranks) + " ranks must have the sizes [" + list +
               "], not those of " + PrintType(program_, TypeOf(to)),
           to);
    return true;
  }

  // ---- messages ----

  void Message() {
    const bool sends = op_.kind == OpKind::kSendStart;
    const bool shaped = Shape(op_, sends ? 1 : 0, sends ? 1 : 0, 1);
    if (const int64_t ranks = AxisRanks(); ranks > 0) Peer(ranks);
    if (const Arg* channel = op_.Attr(kChannel); channel != nullptr) {
      const bool number = channel->kind == Arg::Kind::kInt && channel->integer.is_const();
      if (!number || channel->integer.value < 0 || channel->integer.value >= kMostChannels)
        Report("channel= is a number from 0 to " + Text(kMostChannels - 1));
    }
    if (!shaped) return;
    if (!sends) return Contiguous(op_.results[0]);
    const Type& token = TypeOf(op_.results[0]);
    if (token.dtype != DType::kB8 || token.sizes != std::vector<Dim>{Dim(0)})
      Report("the result of send.start is a token to wait for, b8[0], not " + PrintType(program_, token),
             op_.results[0]);
  }

  // A number, or an expression of this rank's own index: for every rank of the axis another one of it.
  void Peer(int64_t ranks) {
    const Arg* peer = op_.Attr("peer");
    const std::string own = "rank_" + std::string(AxisOf(program_, op_));
    if (peer == nullptr || peer->kind != Arg::Kind::kInt)
      return Report(op_.name + " needs peer= with a rank of the axis, a number or an expression of " + own);
    for (const std::string& name : dims_.SymbolsOf(peer->integer)) {
      if (name != own) return Report("peer= may depend on " + own + " only, not on " + name);
    }
    int64_t first = 0, end = peer->integer.is_const() ? 1 : ranks;
    if (program_.stage && program_.stage->unlike() && program_.stage->axis == AxisOf(program_, op_)) {
      first = program_.stage->First(program_.stage->index);  // whose text it is
      end = first + (peer->integer.is_const() ? 1 : program_.stage->ranks[program_.stage->index]);
    }
    for (int64_t rank = first; rank < end; ++rank) {
      const Result<int64_t> index = dims_.Evaluate(peer->integer, {{own, rank}});
      if (index.ok() && *index >= 0 && *index < ranks) continue;
      return Report("peer= is " + (index.ok() ? Text(*index) : "no number") +
                    (peer->integer.is_const() ? "" : " on rank " + Text(rank)) + ", but the axis has ranks 0 to " +
                    Text(ranks - 1));
    }
  }

  const Op& op_;
  DimTable& dims_;
};

}  // namespace

void VerifyTransfer(const Program& program, const Op& op, DimTable& dims, VerifyReport& report) {
  Transfers(program, op, dims, report).Run();
}

}  // namespace interlace
