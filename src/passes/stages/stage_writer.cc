#include "passes/stages/stage_writer.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>

#include "ir/op_table.h"
#include "ir/text.h"
#include "passes/phase_editor.h"
#include "passes/sharding.h"
#include "passes/stages/exchange.h"
#include "passes/stages/stage_lives.h"
#include "passes/stages/stage_tables.h"

namespace interlace::stages {
namespace {

class StageWriter {
 public:
  StageWriter(Program& program, const Flow& flow, const Layout& layout, const Unlike* unlike, std::string axis,
              int32_t rank)
      : program_(program),
        flow_(flow),
        layout_(layout),
        lives_(program, flow, layout, rank),
        exchange_(program, layout, unlike, rank),
        axis_(std::move(axis)),
        rank_(rank) {}

  Status Run() {
    INTERLACE_TRY(lives_.Find());
    std::vector<Phase> phases;
    for (size_t p = 0; p < lives_.places().size(); ++p) {
      INTERLACE_TRY(Write(p));
      phases.push_back(std::move(phase_));
    }
    program_.order.clear();
    for (const Phase& phase : phases) program_.order.push_back({phase.name, 0, 1});
    program_.phases = std::move(phases);
    return DropForeign(program_, flow_, layout_, rank_);
  }

 private:
  static std::string Name(ValueId root) { return "v" + std::to_string(root); }
  static std::string NameOf(const StageLives::Key& key) {
    return Name(key.first) + (key.second > 0 ? "." + std::to_string(key.second) : "");
  }
  std::string TokenName(const Message& message, int64_t number) const {
    const std::string name = "sent." + Name(message.root) + "." + std::to_string(layout_.RankOf(message.to.stage));
    return exchange_.Count(message.to.stage) == 1 ? name : name + "." + std::to_string(number);
  }

  // A message's storage is copied to be sent: it is gathered, or its pieces lie apart.
  bool IsCopied(const Message& message) const {
    return lives_.IsDeclared(message.root) || exchange_.InBlocks(message.root, message.to.stage);
  }
  // Whole it is one copy for all pieces.
  bool HasCopy(const Message& message, int64_t number) const {
    return IsCopied(message) && (number == 0 || exchange_.InBlocks(message.root, message.to.stage));
  }
  Type CopiedFor(const Message& message) {
    if (exchange_.InBlocks(message.root, message.to.stage))
      return exchange_.PieceOf(message.root, exchange_.Pieces(message.to.stage));
    return Copied(message.root);
  }

  std::string NameOf(const Station& place) const {
    const char* turn = std::array{"forward", "backward", "weights", "sent"}[static_cast<size_t>(place.turn)];
    return layout_.deal.chunks > 1 ? std::string(turn) + "." + std::to_string(layout_.deal.ChunkOf(place.stage)) : turn;
  }

  Status Write(size_t index) {
    here_ = static_cast<int32_t>(index);
    const Station& place = lives_.places()[index];
    phase_ = Phase{NameOf(place), {}, {}, {}};
    now_.clear();
    arriving_.clear();
    sent_.clear();
    part_ = place.turn == Turn::kForward ? Part::kForward : Part::kBackward;
    for (const auto& [key, life] : lives_.lives()) {
      if (life.from != here_ && life.wanted.contains(here_)) Load(NameOf(key), key.first, Stored(key.first));
    }
    for (const Message& message : layout_.messages) {  // the tokens of what was sent before
      if (!lives_.IsHere(message.from.stage) || lives_.WaitedAt(message) != here_ ||
          lives_.IndexOf(message.from) == here_)
        continue;
      for (int64_t number = 0; number < exchange_.Count(message.to.stage); ++number) {
        const ValueId token = AddLoad(TokenName(message, number), Token());
        if (HasCopy(message, number)) AddLoad(TokenName(message, number) + ".copy", CopiedFor(message));
        Finish(OpKind::kSendWait, token);
      }
    }
    for (const Message& message : layout_.messages) {
      if (message.to == place) Receive(message);
    }
    INTERLACE_TRY(SendAfter(-1));
    for (int32_t i = 0; i < flow_.size(); ++i) {
      if (layout_.At(i, place)) Clone(flow_.op(i));
      if (const GradPart* part = lives_.PartAt(i, place)) AddGradient(flow_.op(i), part->values);
      INTERLACE_TRY(SendAfter(i));
    }
    while (!arriving_.empty()) Arrive(arriving_.begin()->first);
    for (const Sent& sent : sent_) {
      if (lives_.WaitedAt(*sent.message) != here_) {
        phase_.saves.push_back({TokenName(*sent.message, sent.number), sent.token});
        if (sent.copy != kNone) phase_.saves.push_back({TokenName(*sent.message, sent.number) + ".copy", sent.copy});
      } else {
        Finish(OpKind::kSendWait, sent.token);
      }
    }
    for (const auto& [key, life] : lives_.lives()) {
      if (life.wanted.contains(here_) && *life.wanted.rbegin() > here_)
        phase_.saves.push_back({NameOf(key), now_.at(key.first)});
    }
    return Ok{};
  }

  // How a storage lies when it comes from elsewhere: as it is, or flat when it is no plain block of memory, or when it
  // may be put together of pieces.
  Type Stored(ValueId root) {
    const Type& type = program_.value(root).type;
    const StageLives::Life* const life = lives_.Received(root);
    if (life == nullptr) return type;
    if (exchange_.Of(root).kind == Crossing::Kind::kRows) return exchange_.PieceOf(root, 1);
    if (exchange_.PartsFrom(root, life->sender) > 1) return Exchange::Flat(type, 1);
    if (program_.IsContiguous(type)) return type;
    const Dim count = program_.NumElements(type);
    return Type{type.dtype, {count}, {Dim(1)}};
  }
  Type Copied(ValueId root) {
    const Type& type = program_.value(root).type;
    return Type{type.dtype, type.sizes, program_.ContiguousStrides(type.sizes)};
  }
  static Type Token() { return Type{DType::kB8, {Dim(0)}, {Dim(1)}}; }

  ValueId AddLoad(std::string name, Type type) {
    const ValueId id = program_.AddValue(ValueKind::kTake, std::move(type)).id;
    phase_.loads.push_back({std::move(name), id});
    return id;
  }
  void Load(std::string name, ValueId root, Type type) { now_[root] = AddLoad(std::move(name), std::move(type)); }

  Op& Add(OpKind kind) {
    Op& op = program_.AddOp(kind);
    op.part = part_;
    phase_.ops.push_back(op.id);
    return op;
  }
  void Finish(OpKind kind, ValueId value) { Add(kind).args = {Arg::Of(value)}; }
  void Address(Op& op, ValueId root, int32_t stage, int64_t number, const Message& message) {
    op.SetAttr("axis", Arg::Word(axis_));
    const int64_t channel = layout_.channels.at({message.from.stage, message.to.stage});
    if (channel > 0) op.SetAttr("channel", Arg::Int(Dim(channel)));
    op.SetAttr("peer", Arg::Int(exchange_.Peer(program_.dims, stage, number)));
    op.SetAttr("message", Arg::String(exchange_.NameOr(root, Name(root))));
  }

  void Receive(const Message& message) {
    const int32_t from = message.from.stage;
    const bool rows = exchange_.Of(message.root).kind == Crossing::Kind::kRows;
    const int64_t parts = exchange_.PartsFrom(message.root, from);
    for (int64_t number = 0; number < exchange_.Count(from); ++number) {
      Op& op = Add(OpKind::kRecvStart);
      Address(op, message.root, from, number, message);
      const Type type = rows ? exchange_.PieceOf(message.root, exchange_.Pieces(from)) : Stored(message.root);
      arriving_[message.root].push_back(program_.AddResult(op, parts > 1 ? Exchange::Flat(type, parts) : type));
    }
  }
  void Arrive(ValueId root) {
    const auto found = arriving_.find(root);
    if (found == arriving_.end()) return;
    const std::vector<ValueId> parts = std::move(found->second);
    arriving_.erase(found);
    for (const ValueId part : parts) Finish(OpKind::kRecvWait, part);
    now_[root] = Assembled(root, parts);
  }
  // What came as one storage: parts one behind the other, rows side by side, sums added up.
  ValueId Assembled(ValueId root, const std::vector<ValueId>& came) {
    const Crossing crossing = exchange_.Of(root);
    const bool rows = crossing.kind == Crossing::Kind::kRows;
    const int32_t sender = lives_.Received(root)->sender;
    const int64_t parts = exchange_.PartsFrom(root, sender);
    const auto width = static_cast<size_t>(exchange_.Width(sender));
    std::vector<ValueId> pieces;
    for (size_t i = 0; i < came.size(); i += width) {
      pieces.push_back(came[i]);  // where each rank has sent all of it, the first's
      if (parts == 1) continue;
      const Type whole = rows ? exchange_.PieceOf(root, exchange_.Pieces(sender)) : Stored(root);
      pieces.back() = Joined(came.begin() + i, came.begin() + i + width, 0, Exchange::Flat(whole, 1));
      if (whole.sizes.size() > 1) pieces.back() = AddPart(pieces.back(), whole, Dim(0));
    }
    if (rows && pieces.size() > 1)
      return Joined(pieces.begin(), pieces.end(), crossing.blocks > 1 ? 1 : 0, Stored(root));
    ValueId sum = pieces[0];
    if (crossing.kind != Crossing::Kind::kSum) return sum;
    for (size_t i = 1; i < pieces.size(); ++i) {
      Op& add = AddLibrary("aten.add.Tensor");
      add.args = {Arg::Of(sum), Arg::Of(pieces[i])};
      sum = program_.AddResult(add, Stored(root));
    }
    const int64_t copies = exchange_.CopiesFrom(sender);
    if (copies == 1) return sum;
    Op& part = AddLibrary("aten.div.Scalar");  // each of them has gone to so many ranks
    part.args = {Arg::Of(sum), Arg::Int(Dim(copies))};
    return program_.AddResult(part, Stored(root));
  }
  template <typename It>
  ValueId Joined(It begin, It end, int64_t dim, Type type) {
    Op& cat = AddLibrary("aten.cat");
    std::vector<Arg> all;
    for (It it = begin; it != end; ++it) all.push_back(Arg::Of(*it));
    cat.args = {Arg::List(std::move(all)), Arg::Int(Dim(dim))};
    return program_.AddResult(cat, std::move(type));
  }
  Op& AddLibrary(std::string name) {
    Op& op = program_.AddOp(std::move(name));
    op.part = part_;
    phase_.ops.push_back(op.id);
    return op;
  }

  Status SendAfter(int32_t index) {
    for (const Message& message : layout_.messages) {
      if (!(message.from == lives_.places()[static_cast<size_t>(here_)]) || message.after != index) continue;
      const int64_t pieces = exchange_.Pieces(message.to.stage);
      const bool apart = exchange_.Of(message.root).kind == Crossing::Kind::kRows;
      ValueId value = Use(message.root), copied = kNone;
      if (lives_.IsDeclared(message.root)) {  // gathered here or not, it stays what it is until it has been sent
        Op& copy = Add(OpKind::kCopy);
        copy.args = {Arg::Of(value)};
        value = copied = program_.AddResult(copy, Copied(message.root));
      }
      const Type& type = program_.value(value).type;
      if (!program_.IsContiguous(type) && !IsDense(type))
        return MakeError("%", message.root, ": ", PrintType(program_, type),
                         " leaves gaps in memory and cannot be sent");
      if (!program_.IsContiguous(type) && !apart) {
        value = AddPart(value, Type{type.dtype, {program_.NumElements(type)}, {Dim(1)}}, Dim(0));
      }
      const int64_t width = exchange_.Width(message.to.stage),
                    parts = exchange_.PartsTo(message.root, message.to.stage);
      for (int64_t number = 0; number < pieces * width; ++number) {
        ValueId part = value;
        if (apart) {
          Type own = exchange_.PieceOf(message.root, pieces);
          const Dim length = own.sizes.back();
          if (own.sizes.size() > 1) own.strides[0] = Dim(length.value * pieces);
          part = AddPart(value, own, Dim(length.value * (number / width)));
        }
        if (exchange_.InBlocks(message.root, message.to.stage)) {
          Op& copy = Add(OpKind::kCopy);
          copy.args = {Arg::Of(part)};
          part = copied = program_.AddResult(copy, exchange_.PieceOf(message.root, pieces));
        }
        if (parts > 1) {
          const Type flat = Exchange::Flat(program_.value(part).type, parts);
          const Dim mine = program_.dims.Mul(exchange_.OwnPart(program_.dims), flat.sizes[0]);
          part = AddPart(part, flat, program_.dims.Add(program_.value(part).offset, mine));
        }
        Op& op = Add(OpKind::kSendStart);
        op.args = {Arg::Of(part)};
        Address(op, message.root, message.to.stage, number, message);
        sent_.push_back({&message, number, program_.AddResult(op, Token()), HasCopy(message, number) ? copied : kNone});
      }
    }
    return Ok{};
  }
  ValueId AddPart(ValueId value, Type type, Dim offset) {
    Op& view = Add(OpKind::kView);
    view.args = {Arg::Of(value)};
    return program_.AddView(view, std::move(type), program_.RootOf(value), offset);
  }

  // The stand-in of a value of the captured program in this phase.
  ValueId Use(ValueId id) {
    const ValueId root = program_.RootOf(id);
    Arrive(root);
    const auto found = now_.find(id);
    if (found != now_.end()) return Shown(found->second, id);
    if (root == id && lives_.IsDeclared(root)) return id;
    ValueId storage = root;
    if (!lives_.IsDeclared(root)) {
      if (now_.find(root) == now_.end()) Clone(flow_.op(flow_.DefOf(root)));
      storage = now_.at(root);
      if (const auto made = now_.find(id); made != now_.end()) return Shown(made->second, id);
    }
    return View(storage, id);
  }
  // A storage that came flat is seen as what it was.
  ValueId Shown(ValueId value, ValueId id) {
    if (program_.RootOf(id) != id || program_.value(value).type == program_.value(id).type) return value;
    auto [known, fresh] = shown_.try_emplace({here_, id}, kNone);
    if (fresh) known->second = View(value, id, /*keep=*/false);
    return known->second;
  }
  ValueId View(ValueId storage, ValueId id, bool keep = true) {
    const ValueId made = AddPart(storage, program_.value(id).type, program_.value(id).offset);
    if (keep) now_[id] = made;
    return made;
  }

  void Clone(const Op& op) {
    // Operands first: what they need comes before the op.
    std::map<ValueId, ValueId> operands;
    const bool names_param = op.kind == OpKind::kGrad;
    if (names_param) operands[op.args[0].value] = op.args[0].value;
    ForEachOperand(op, [&](ValueId id) {
      if (!operands.contains(id)) operands[id] = Use(id);
    });
    for (ValueId id : op.writes) {
      if (!operands.contains(id)) operands[id] = Use(id);
    }
    Op& out = program_.AddOp(op.name);
    const OpId id = out.id;
    out = op;
    out.id = id;
    out.part = part_;
    ForEachOperand(out, [&](ValueId& v) { v = operands.at(v); });
    for (ValueId& v : out.writes) v = operands.at(v);
    for (size_t i = 0; i < op.results.size(); ++i) {
      const ValueId old = op.results[i];
      if (old == kNone) continue;
      const Value from = program_.value(old);
      ValueId root = kNone;
      if (from.root != old) {
        const auto storage = now_.find(from.root);
        root = storage != now_.end() ? program_.RootOf(storage->second) : from.root;
      }
      Value& value = program_.AddValue(ValueKind::kResult, from.type);
      value.def = id;
      value.result_index = static_cast<int32_t>(i);
      if (root != kNone) {
        value.root = root;
        value.offset = from.offset;
        value.placed = from.placed;
      }
      now_[old] = value.id;
      program_.op(id).results[i] = value.id;
    }
    // Of a parameter of another rank there is no shard to cast.
    if (op.Attr(kOnShard) != nullptr && lives_.IsForeign(program_.RootOf(op.args[0].value)))
      std::erase_if(program_.op(id).attrs, [](const NamedArg& attr) { return attr.name == kOnShard; });
    phase_.ops.push_back(id);
  }

  // The gradient of a shared parameter, as far as it is made here.
  void AddGradient(const Op& grad, const std::vector<ValueId>& values) {
    ValueId sum = Use(values[0]);
    for (size_t i = 1; i < values.size(); ++i) {
      const ValueId next = Use(values[i]);
      Op& add = program_.AddOp("aten.add.Tensor");
      CopyTags(grad, add);
      add.part = part_;
      phase_.ops.push_back(add.id);
      add.args = {Arg::Of(sum), Arg::Of(next)};
      sum = program_.AddResult(add, Type{program_.value(sum).type.dtype, program_.value(sum).type.sizes, {}});
    }
    Op& out = Add(OpKind::kGrad);
    CopyTags(grad, out);
    out.part = part_;
    out.args = {grad.args[0], Arg::Of(sum)};
  }

  Program& program_;
  const Flow& flow_;
  const Layout& layout_;
  StageLives lives_;
  const Exchange exchange_;
  const std::string axis_;
  const int32_t rank_;
  // Of the phase that is written:
  int32_t here_ = 0;
  Phase phase_;
  Part part_ = Part::kForward;
  std::map<ValueId, ValueId> now_;                    // by value of the captured program
  std::map<ValueId, std::vector<ValueId>> arriving_;  // by root: received and not waited for
  struct Sent {
    const Message* message;
    int64_t number;
    ValueId token, copy;  // where it is copied to be sent, else kNone
  };
  std::vector<Sent> sent_;
  std::map<std::pair<int32_t, ValueId>, ValueId> shown_;  // by place and root
};

}  // namespace

Status WriteStage(Program& program, const Flow& flow, const Layout& layout, const Unlike* unlike, std::string axis,
                  int32_t rank) {
  return StageWriter(program, flow, layout, unlike, std::move(axis), rank).Run();
}

}  // namespace interlace::stages
