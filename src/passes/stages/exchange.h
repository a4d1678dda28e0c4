// exchange.h — how what crosses between two stages travels: in pieces of rows where stages have unlike data ranks, each
// piece in several messages where they cut products unlike (recut.h). Of stages with as many ranks all is one message.
#pragma once

#include <map>
#include <string>

#include "passes/stages/messages.h"
#include "passes/stages/recut.h"

namespace interlace::stages {

// Of stages with unlike ranks: who has what of which storage that crosses.
struct Unlike {
  Recut recut;
  Crossings crossings;
  std::map<ValueId, std::string> names;  // what is made is called so in all programs of the set
};

// What a rank of one stage exchanges with the others; `stage` is the other.
class Exchange {
 public:
  // `unlike`: nullptr where stages have as many ranks. All must outlive this.
  Exchange(const Program& program, const Layout& layout, const Unlike* unlike, int32_t rank)
      : program_(program), layout_(layout), unlike_(unlike), rank_(rank) {}

  Crossing Of(ValueId root) const {
    if (unlike_ == nullptr) return {};
    const auto found = unlike_->crossings.find(root);
    return found == unlike_->crossings.end() ? Crossing() : found->second;
  }
  std::string NameOr(ValueId root, std::string name) const {
    return unlike_ != nullptr && unlike_->names.contains(root) ? unlike_->names.at(root) : name;
  }
  // Pieces of rows, messages of each, and all messages of a storage.
  int64_t Pieces(int32_t stage) const { return unlike_ == nullptr ? 1 : unlike_->recut.Pieces(rank_, Rank(stage)); }
  int64_t Width(int32_t stage) const { return unlike_ == nullptr ? 1 : unlike_->recut.Width(rank_, Rank(stage)); }
  int64_t Count(int32_t stage) const { return Pieces(stage) * Width(stage); }
  // Ranks of this stage that have each piece of a rank of `stage`.
  int64_t CopiesFrom(int32_t stage) const { return unlike_ == nullptr ? 1 : unlike_->recut.Pieces(Rank(stage), rank_); }
  // Parts of each piece, one a message, that are sent there or come from there; 1: every message has all of it.
  int64_t PartsTo(ValueId root, int32_t stage) const { return Parts(root, rank_, Rank(stage)); }
  int64_t PartsFrom(ValueId root, int32_t stage) const { return Parts(root, Rank(stage), rank_); }
  Dim OwnPart(DimTable& dims) const { return unlike_->recut.PartOf(dims, rank_); }
  Dim Peer(DimTable& dims, int32_t stage, int64_t number) const {
    return unlike_ == nullptr ? Dim(Rank(stage)) : unlike_->recut.Peer(dims, rank_, Rank(stage), number);
  }

  // Whether pieces are sent from, or put together in, blocks that do not lie one behind the other.
  bool InBlocks(ValueId root, int32_t stage) const {
    const Crossing crossing = Of(root);
    return crossing.kind == Crossing::Kind::kRows && crossing.blocks > 1 && Pieces(stage) > 1;
  }
  Type PieceOf(ValueId root, int64_t pieces) const { return Of(root).PieceOf(program_.value(root).type, pieces); }
  // One of `parts` equal parts of what has this type, element after element.
  static Type Flat(const Type& type, int64_t parts) {
    return Type{type.dtype, {Dim(Elements(type) / parts)}, {Dim(1)}};
  }

 private:
  static int64_t Elements(const Type& type) {
    int64_t count = 1;
    for (const Dim& size : type.sizes) count *= size.value;
    return count;
  }
  int32_t Rank(int32_t stage) const { return layout_.RankOf(stage); }
  int64_t Parts(ValueId root, int32_t from, int32_t to) const {
    if (unlike_ == nullptr) return 1;
    int64_t count = Elements(program_.value(root).type);
    if (Of(root).kind == Crossing::Kind::kRows) count /= unlike_->recut.Pieces(from, to);
    const int64_t parts = unlike_->recut.Parts(from, to);
    return count % parts == 0 ? parts : 1;
  }

  const Program& program_;
  const Layout& layout_;
  const Unlike* unlike_;
  const int32_t rank_;
};

}  // namespace interlace::stages
