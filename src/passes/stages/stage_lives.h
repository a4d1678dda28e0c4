// stage_lives.h — what one rank of a pipeline does of a micro-batch: the places that it comes by, in order, and the
// storages that must be there at more than one of them. Of a model in two stages the second one's rank has
//
//   forward    receives %5, makes %6       %5 lives until weights, %6 until backward
//   backward   makes %7, sends it          %7 lives until sent
//   weights    makes %8 of %5
//   sent       waits until %7 has been sent
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/result.h"
#include "passes/stages/messages.h"

namespace interlace::stages {

class StageLives {
 public:
  // A storage that more than one place may need.
  struct Life {
    int32_t from = -1;         // place where it is made or received
    std::set<int32_t> wanted;  // places
    bool received = false;
    int32_t sender = 0;  // its stage
  };
  // A root; what each of a rank's stages makes again is its own, for their runs come in any order. Else chunk 0.
  using Key = std::pair<ValueId, int32_t>;

  // Of what `flow` and `layout` are of.
  StageLives(const Program& program, const Flow& flow, const Layout& layout, int32_t rank);
  // Error: a storage that would be needed before it is made.
  Status Find();

  const std::vector<Station>& places() const { return places_; }
  const std::map<Key, Life>& lives() const { return lives_; }
  bool IsHere(int32_t stage) const { return layout_.RankOf(stage) == rank_; }
  int32_t IndexOf(const Station& place) const;  // -1: not of this rank, or nothing to do there
  bool IsForeign(ValueId root) const { return layout_.IsForeign(root, rank_); }
  // Seen in every phase.
  bool IsDeclared(ValueId root) const { return flow_.DefOf(root) < 0 && !IsForeign(root); }
  // Of what came from another rank; nullptr: it did not.
  const Life* Received(ValueId root) const;
  // What this rank adds to the shared gradient of op `index` at a place; nullptr: nothing.
  const GradPart* PartAt(int32_t index, const Station& place) const;
  // The place where a message that is sent is waited for: behind the last that may need its storage.
  int32_t WaitedAt(const Message& message) const;

 private:
  void FindLast();
  void FindPlaces();
  Station WaitsAt(const Message& message) const;
  void FindAt(int32_t place);
  void Want(ValueId root, int32_t place);
  Key KeyOf(ValueId root, int32_t place) const;
  bool IsMadeAnew(ValueId root) const;

  const Program& program_;
  const Flow& flow_;
  const Layout& layout_;
  const int32_t rank_;
  std::map<ValueId, int32_t> last_;  // by root: of this rank's stages the last one whose backward part has it
  std::vector<Station> places_;
  std::map<Key, Life> lives_;
};

}  // namespace interlace::stages
