// op_table.h — questions about ops, answered from the table of kinds (op_kind.h); docs/ir.md has the meanings.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "ir/op_kind.h"
#include "ir/program.h"

namespace interlace {

inline const OpTraits& TraitsOf(const Op& op) {
  return TraitsOf(op.kind);
}
inline bool IsStart(const Op& op) {
  return TraitsOf(op).side == Side::kStart;
}
inline bool IsWait(const Op& op) {
  return TraitsOf(op).side == Side::kWait;
}
// An op that is not of a library; a call is of what its body has.
inline bool IsOwn(const Op& op) {
  return op.kind != OpKind::kLibrary && op.kind != OpKind::kCall;
}
inline bool IsUpdate(const Op& op) {
  return TraitsOf(op).family == OpFamily::kUpdate;
}
// "gather.start" and "gather.wait" → "gather".
std::string_view TransferName(const Op& op);
Lane LaneOf(const Op& op);  // explicit or the table's default
// view, release, marks, waits: nothing is computed, and a wait takes the time of what it waits for.
bool TakesNoTime(const Op& op);
// An optimizer step with lane=host: it works on storages that are out, where they lie, beside all other lanes
// (docs/ir.md).
bool StepsOnHost(const Op& op);
// The update of an optimizer ("adamw", "adam", "sgd", "rule"); kUnknown for others.
OpKind UpdateOf(std::string_view optimizer);
// Of an update: how many of its first operands are flat shards (weights, gradient, states); what follows is the
// coefficient.
size_t FlatOperands(const Op& op);
// Of a gather: of the parts of a shard, which the replicas have, to the shard.
inline constexpr std::string_view kParts = "parts";
// The mesh axes that a transfer goes along: of its units or of its attribute; empty for others.
std::string_view AxisOf(const Program& program, const Op& op);
// The axes that a transfer's parts lie along, and those of replicas that all-reduce theirs after it, if there are any:
// of a reduction onto shards {"dp", "replica"}, and {"replica,dp", ""} where each replica ends with a part.
struct TransferRanks {
  std::string axes, replicas;
};
TransferRanks RanksOf(const Program& program, const Op& op);
// Of a send or a receive: messages of one channel between two ranks come in the order they were sent in.
inline constexpr std::string_view kChannel = "channel";
inline constexpr int64_t kMostChannels = 64;
int64_t ChannelOf(const Op& op);
// Meta line: how many channels the stages of a pipeline have between them, of which one stage may use few.
inline constexpr std::string_view kStagesChannels = "stages.channels";
// The axis of a transfer of activations along which no unit is sharded or copied, "tp": such transfers are shown apart.
std::string_view ActivationAxisOf(const Program& program, const Op& op);
std::string_view LaneName(Lane lane);
std::optional<Lane> ParseLane(std::string_view name);
// Operands whose storage the op writes: `writes`, and what its own semantics mutate (assign's dst, update's states).
std::vector<ValueId> WrittenOperands(const Program& program, const Op& op);
// Attribute of ops of a run of several micro-batches: which of them, counted from 0 (absent: 0).
inline constexpr std::string_view kMicroBatch = "micro";
// Its value; -1: it is not a small number.
int64_t MicroBatchOf(const Op& op);
// Whether dead-code elimination must keep the op: effects, writes, or placed results.
bool HasEffect(const Program& program, const Op& op);

}  // namespace interlace
