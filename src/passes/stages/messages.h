// messages.h — which ops run where, and what travels, when a captured program is cut into stages.
//
// A model's stages are dealt to ranks (deal.h). A micro-batch passes the places of a rank in this order:
//
//   forward of its stages, first to last | backward, last to first | gradients of weights, last to first (when split) |
//   where what backward parts sent is waited for, last to first
//
// A parameter whose gradient comes from several ranks (a tied embedding) is on all of these; their parts are added up
// when the step ends. Any other storage is made in one place; every other rank that needs it gets one message, which is
// sent and received in the forward places of both stages when it goes up, and in their backward places when it goes
// down.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "passes/stages/deal.h"
#include "passes/stages/flow.h"

namespace interlace::stages {

enum class Turn : uint8_t { kForward, kBackward, kWeights, kSent };

struct Station {
  int32_t stage = 0;
  Turn turn = Turn::kForward;
  friend bool operator==(const Station&, const Station&) = default;
};
// Whether a micro-batch comes by `a` before `b`.
bool Before(const Station& a, const Station& b);

struct Message {
  ValueId root = kNone;  // the storage that is sent, or the parameter
  int32_t after = -1;    // index of the op behind which it is complete; -1: when the place begins
  Station from, to;      // where it is sent and received
};

// What one rank adds to the gradient of a parameter that it shares: the sum of `values`, all there.
struct GradPart {
  Station place;
  std::vector<ValueId> values;
};

struct Layout {
  Deal deal;                   // to the ranks along the axis of the stages
  std::vector<int32_t> stage;  // by op; -1: any, or none (sums that the parts of a shared gradient stand for)
  std::vector<Turn> turn;      // by op
  std::vector<int32_t> home;   // by value: of a parameter the first stage that has it; -1
  std::vector<char> trained;   // by value: a parameter with a gradient
  std::map<ValueId, std::vector<int64_t>> shared;  // by parameter that several ranks have and change: those, ascending
  std::map<int32_t, std::vector<GradPart>> gradients;  // of shared parameters, by index of the op `grad`
  std::vector<Message> messages;                       // in the order they are sent
  std::map<std::pair<int32_t, int32_t>, int64_t> channels;  // by the stages that send and receive
  int32_t RankOf(int32_t of_stage) const { return deal.RankOf(of_stage); }
  int64_t Channels() const;  // the largest and one
  // A parameter that changes, and that another rank has.
  bool IsForeign(ValueId root, int32_t rank) const;
  bool At(int32_t op, const Station& place) const { return stage[op] == place.stage && turn[op] == place.turn; }
};

// The storages of the messages that ops make.
std::vector<ValueId> CrossingRoots(const Program& program, const Layout& layout);

// `split`: gradients of weights have a turn of their own. Error: something would have to be sent against the order of
// places, or is changed by one rank and read by another.
Result<Layout> MakeLayout(const Program& program, const Flow& flow, std::vector<int32_t> stage, Deal deal, bool split);

}  // namespace interlace::stages
