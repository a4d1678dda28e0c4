// op_kind.h — the kinds of ops of our own, and what the compiler knows of each: one row of traits a kind (op_table.cc).
//
// Nothing outside the table, the parser and the printer asks for an op's name. A question about one op is `op.kind ==
// OpKind::kRelease`; a question about many is a trait: `TraitsOf(op).side == Side::kStart`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace interlace {

enum class OpKind : uint8_t {
  kLibrary,  // ATen, or another operator library: the name says which operator
  kUnknown,  // a name of our own families that no row has; the verifier refuses it
  kView,
  kGrad,
  kOutput,
  kAssign,
  kCopy,
  kGradBegin,
  kRelease,
  // parameters of units
  kGatherStart,
  kGatherWait,
  kReduceStart,
  kReduceWait,
  // activations along a mesh axis
  kAllGatherStart,
  kAllGatherWait,
  kReduceScatterStart,
  kReduceScatterWait,
  kAllReduceStart,
  kAllReduceWait,
  kAllToAllStart,
  kAllToAllWait,
  kBroadcastStart,
  kBroadcastWait,
  kSendStart,
  kSendWait,
  kRecvStart,
  kRecvWait,
  // optimizer
  kNormPartial,
  kNormCoef,
  kUpdateAdamW,
  kUpdateAdam,
  kUpdateSgd,
  kUpdateRule,
  // regions
  kCall,
  // opaque modules
  kCallPython,
  // the tier
  kOffloadStart,
  kOffloadWait,
  kReloadStart,
  kReloadWait,
};
inline constexpr int kOpKinds = static_cast<int>(OpKind::kReloadWait) + 1;

enum class Lane : uint8_t { kCompute, kGather, kReduce, kH2D, kD2H, kFile, kP2P, kHost };
inline constexpr int kLaneCount = 8;

enum class OpFamily : uint8_t {
  kLibrary,
  kLocal,       // view, copy, assign, grad.begin, release: this rank's storages alone
  kMark,        // grad, output: say what a value is
  kUnit,        // gather, reduce: shards and full buffers of units
  kCollective,  // activations among all ranks of an axis
  kPeer,        // send, recv: activations between two ranks of an axis
  kNorm,
  kUpdate,
  kRegion,  // call: ops of a library under one name
  kPython,
  kTier,  // offload, reload
};

// A transfer is a start and a wait; between them nobody touches the result or writes the source.
enum class Side : uint8_t { kWhole, kStart, kWait };

// What a transfer does with the data of its ranks.
enum class Exchange : uint8_t { kNone, kGather, kReduce, kAllReduce, kBroadcast, kAllToAll, kPointToPoint };

// Sets of positional operands, a bit each.
inline constexpr uint16_t kNoOperand = 0, kEveryOperand = 0xffff;
constexpr uint16_t Operands(std::initializer_list<int> indices) {
  uint16_t set = 0;
  for (int i : indices) set = static_cast<uint16_t>(set | 1 << i);
  return set;
}

struct OpTraits {
  OpKind kind = OpKind::kLibrary;
  std::string_view name;
  OpFamily family = OpFamily::kLibrary;
  Side side = Side::kWhole;
  OpKind partner = OpKind::kLibrary;  // of a start its wait, of a wait its start
  Exchange exchange = Exchange::kNone;
  Lane lane = Lane::kCompute;
  bool has_effect = false;       // stays although nobody uses its results
  bool sharded_only = false;     // does not belong into a captured program
  uint16_t writes = kNoOperand;  // operands whose storage it writes (update.*: WrittenOperands, for states may lack)
  uint16_t frees = kNoOperand;   // operands whose memory ends here
  std::string_view help;
};

// The rows of all kinds but kLibrary and kUnknown, in the enum's order.
std::span<const OpTraits> OpTable();
// kLibrary and kUnknown have rows too.
const OpTraits& TraitsOf(OpKind kind);
// kUnknown: the name begins like one of ours, or has no namespace, and is in no row.
OpKind KindOf(std::string_view name);

}  // namespace interlace
