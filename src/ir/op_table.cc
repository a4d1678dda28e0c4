#include "ir/op_table.h"

#include <algorithm>
#include <array>
#include <unordered_map>

namespace interlace {
namespace {

using enum OpKind;

constexpr OpTraits Local(OpKind kind, std::string_view name, bool effect, std::string_view help) {
  return {.kind = kind, .name = name, .family = OpFamily::kLocal, .has_effect = effect, .help = help};
}
constexpr OpTraits Mark(OpKind kind, std::string_view name, std::string_view help) {
  return {.kind = kind, .name = name, .family = OpFamily::kMark, .has_effect = true, .help = help};
}
constexpr OpTraits Start(OpKind kind, std::string_view name, OpFamily family, OpKind wait, Exchange exchange, Lane lane,
                         std::string_view help) {
  return {.kind = kind,
          .name = name,
          .family = family,
          .side = Side::kStart,
          .partner = wait,
          .exchange = exchange,
          .lane = lane,
          .has_effect = true,
          .sharded_only = family == OpFamily::kUnit,
          .help = help};
}
constexpr OpTraits Wait(OpKind kind, std::string_view name, const OpTraits& start, std::string_view help) {
  OpTraits row = start;
  row.partner = start.kind;
  row.kind = kind, row.name = name, row.side = Side::kWait, row.help = help;
  return row;
}
constexpr OpTraits Writing(OpTraits row, uint16_t writes) {
  row.writes = writes;
  return row;
}
constexpr OpTraits Freeing(OpTraits row) {
  row.frees = kEveryOperand;
  return row;
}
constexpr OpTraits Sharded(OpTraits row) {
  row.sharded_only = true;
  return row;
}
constexpr OpTraits Norm(OpKind kind, std::string_view name, std::string_view help) {
  return {.kind = kind, .name = name, .family = OpFamily::kNorm, .sharded_only = true, .help = help};
}
constexpr OpTraits Update(OpKind kind, std::string_view name, uint16_t writes, std::string_view help) {
  return {.kind = kind,
          .name = name,
          .family = OpFamily::kUpdate,
          .has_effect = true,
          .sharded_only = true,
          .writes = writes,
          .help = help};
}

constexpr auto kUnitOps = OpFamily::kUnit;
constexpr auto kAxisOps = OpFamily::kCollective;
constexpr auto kPeerOps = OpFamily::kPeer;
constexpr auto kTierOps = OpFamily::kTier;

constexpr OpTraits kGather = Start(kGatherStart, "gather.start", kUnitOps, kGatherWait, Exchange::kGather,
                                   Lane::kGather, "all-gather of shards begins");
constexpr OpTraits kReduce = Start(kReduceStart, "reduce.start", kUnitOps, kReduceWait, Exchange::kReduce,
                                   Lane::kReduce, "reduce-scatter of flat gradients begins");
constexpr OpTraits kAllGather = Start(kAllGatherStart, "all_gather.start", kAxisOps, kAllGatherWait, Exchange::kGather,
                                      Lane::kGather, "(x) axis= dim=: the parts of an axis' ranks side by side");
constexpr OpTraits kReduceScatter =
    Start(kReduceScatterStart, "reduce_scatter.start", kAxisOps, kReduceScatterWait, Exchange::kReduce, Lane::kReduce,
          "(x) axis= dim=: this rank's part of the sum over an axis");
constexpr OpTraits kAllReduce = Start(kAllReduceStart, "all_reduce.start", kAxisOps, kAllReduceWait,
                                      Exchange::kAllReduce, Lane::kReduce, "(x) axis=: the sum over an axis");
constexpr OpTraits kAllToAll =
    Start(kAllToAllStart, "all_to_all.start", kAxisOps, kAllToAllWait, Exchange::kAllToAll, Lane::kP2P,
          "(x) axis= dim= to=: cut along one dimension, put together along another");
constexpr OpTraits kBroadcast = Start(kBroadcastStart, "broadcast.start", kAxisOps, kBroadcastWait,
                                      Exchange::kBroadcast, Lane::kGather, "(x) axis= root=: the root's value");
constexpr OpTraits kSend = Start(kSendStart, "send.start", kPeerOps, kSendWait, Exchange::kPointToPoint, Lane::kP2P,
                                 "(x) axis= peer=: goes to a rank of an axis; the result is a token to wait for");
constexpr OpTraits kRecv = Start(kRecvStart, "recv.start", kPeerOps, kRecvWait, Exchange::kPointToPoint, Lane::kP2P,
                                 "() axis= peer=: comes from a rank of an axis");
constexpr OpTraits kOffload = Start(kOffloadStart, "offload.start", kTierOps, kOffloadWait, Exchange::kNone, Lane::kD2H,
                                    "(storage, ...): copy to the tier begins");
constexpr OpTraits kReload = Start(kReloadStart, "reload.start", kTierOps, kReloadWait, Exchange::kNone, Lane::kH2D,
                                   "(storage, ...): memory is taken again, the copy from the tier begins");

// In the order of OpKind, from kLibrary on.
constexpr OpTraits kRows[] = {
    {.kind = kLibrary, .name = "", .help = ""},
    {.kind = kUnknown, .name = "", .family = OpFamily::kLocal, .has_effect = true, .help = ""},
    Local(kView, "view", false, "another geometry of a storage; costs nothing"),
    Mark(kGrad, "grad", "(param, value): the complete gradient of a parameter"),
    Mark(kOutput, "output", "(value) name=: returned by the step"),
    Writing(Local(kAssign, "assign", true, "(dst, src): copies into a buffer or state"), Operands({0})),
    Local(kCopy, "copy", false, "a contiguous copy"),
    Sharded(Local(kGradBegin, "grad.begin", false, "flat gradient buffer of a unit")),
    Freeing(Local(kRelease, "release", true, "the storages end here")),
    kGather,
    Wait(kGatherWait, "gather.wait", kGather, "the full buffers may be read from here"),
    kReduce,
    Wait(kReduceWait, "reduce.wait", kReduce, "the reduced shards may be read from here"),
    kAllGather,
    Wait(kAllGatherWait, "all_gather.wait", kAllGather, "the whole may be read from here"),
    kReduceScatter,
    Wait(kReduceScatterWait, "reduce_scatter.wait", kReduceScatter, "the part of the sum may be read from here"),
    kAllReduce,
    Wait(kAllReduceWait, "all_reduce.wait", kAllReduce, "the sum may be read from here"),
    kAllToAll,
    Wait(kAllToAllWait, "all_to_all.wait", kAllToAll, "the exchanged value may be read from here"),
    kBroadcast,
    Wait(kBroadcastWait, "broadcast.wait", kBroadcast, "the root's value may be read from here"),
    kSend,
    Wait(kSendWait, "send.wait", kSend, "the sent value may be written from here"),
    kRecv,
    Wait(kRecvWait, "recv.wait", kRecv, "the received value may be read from here"),
    Norm(kNormPartial, "norm.partial", "exact sum of squares of gradient shards"),
    Norm(kNormCoef, "norm.coef", "norm, clip coefficient and whether it is finite"),
    Update(kUpdateAdamW, "update.adamw", Operands({0, 2, 3}), "AdamW step on flat shards"),
    Update(kUpdateAdam, "update.adam", Operands({0, 2, 3}), "Adam step on flat shards"),
    Update(kUpdateSgd, "update.sgd", Operands({0, 2}), "SGD step on flat shards"),
    Update(kUpdateRule, "update.rule", Operands({0, 2, 3, 4, 5, 6, 7}), "a rule's step on flat shards"),
    {.kind = kCall, .name = "call", .family = OpFamily::kRegion, .help = "f0(x, ...): runs a region (func)"},
    {.kind = kCallPython,
     .name = "call.python",
     .family = OpFamily::kPython,
     .has_effect = true,
     .help = "an opaque module"},
    kOffload,
    Freeing(
        Wait(kOffloadWait, "offload.wait", kOffload, "the copy is complete, the storages take no memory from here")),
    Writing(kReload, kEveryOperand),
    Wait(kReloadWait, "reload.wait", kReload, "the storages may be used again from here"),
};
constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (kRows[i].kind != static_cast<OpKind>(i)) return false;
  }
  return std::size(kRows) == kOpKinds;
}
static_assert(InOrder(), "a row a kind, in the enum's order");

constexpr std::array<std::string_view, kLaneCount> kLanes = {"compute", "gather", "reduce", "h2d",
                                                             "d2h",     "file",   "p2p",    "host"};

bool WithMomentum(const Op& op) {
  const Arg* momentum = op.Attr("momentum");
  return momentum != nullptr && momentum->boolean;
}

}  // namespace

std::span<const OpTraits> OpTable() {
  return std::span(kRows).subspan(2);
}

const OpTraits& TraitsOf(OpKind kind) {
  return kRows[static_cast<size_t>(kind)];
}

OpKind KindOf(std::string_view name) {
  static const auto& index = *[] {
    auto* map = new std::unordered_map<std::string_view, OpKind>();
    for (const OpTraits& row : OpTable()) map->emplace(row.name, row.kind);
    return map;
  }();
  if (auto found = index.find(name); found != index.end()) return found->second;
  if (name.starts_with("call ")) return kCall;
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) return kUnknown;
  // A family of ours: "gather.begin" is an unknown op of our own, "torchvision.nms" is not.
  const std::string_view family = name.substr(0, dot + 1);
  for (const OpTraits& row : OpTable()) {
    if (row.name.starts_with(family)) return kUnknown;
  }
  return kLibrary;
}

std::string_view TransferName(const Op& op) {
  const std::string_view name = TraitsOf(op).name;
  return name.substr(0, name.rfind('.'));
}

Lane LaneOf(const Op& op) {
  return op.lane ? *op.lane : TraitsOf(op).lane;
}

std::string_view LaneName(Lane lane) {
  return kLanes[static_cast<size_t>(lane)];
}

std::optional<Lane> ParseLane(std::string_view name) {
  for (size_t i = 0; i < kLanes.size(); ++i) {
    if (kLanes[i] == name) return static_cast<Lane>(i);
  }
  return std::nullopt;
}

bool TakesNoTime(const Op& op) {
  return op.kind == kView || op.kind == kRelease || TraitsOf(op).family == OpFamily::kMark || IsWait(op);
}

bool StepsOnHost(const Op& op) {
  return op.lane == Lane::kHost && IsUpdate(op);
}

OpKind UpdateOf(std::string_view optimizer) {
  const OpKind kind = KindOf("update." + std::string(optimizer));
  return TraitsOf(kind).family == OpFamily::kUpdate ? kind : kUnknown;
}

size_t FlatOperands(const Op& op) {
  if (op.kind == kUpdateRule) {
    const Arg* states = op.Attr("states");
    return 2 + (states == nullptr ? 0 : states->list.size());
  }
  return op.kind != kUpdateSgd ? 4 : WithMomentum(op) ? 3 : 2;
}

std::string_view AxisOf(const Program& program, const Op& op) {
  const OpFamily family = TraitsOf(op).family;
  if (family == OpFamily::kUnit) {
    if (op.units.empty()) return {};
    const Unit& unit = program.units[op.units[0]];
    return op.Attr(kParts) != nullptr ? unit.replicas : unit.axis;
  }
  if (family != OpFamily::kCollective && family != OpFamily::kPeer) return {};
  const Arg* axis = op.Attr("axis");
  return axis != nullptr && axis->kind == Arg::Kind::kWord ? std::string_view(axis->text) : std::string_view();
}

TransferRanks RanksOf(const Program& program, const Op& op) {
  if (op.kind != OpKind::kReduceStart || op.units.empty()) return {std::string(AxisOf(program, op)), ""};
  const Unit& unit = program.units[op.units[0]];
  if (unit.parted()) return {program.DataAxes(unit), ""};
  return {unit.axis, program.AxisSize(unit.replicas) > 1 ? unit.replicas : ""};
}

int64_t ChannelOf(const Op& op) {
  const Arg* channel = op.Attr(kChannel);
  return channel != nullptr && channel->kind == Arg::Kind::kInt ? channel->integer.value : 0;
}

std::string_view ActivationAxisOf(const Program& program, const Op& op) {
  if (TraitsOf(op).family != OpFamily::kCollective) return {};
  const std::string_view axis = AxisOf(program, op);
  if (axis.find(',') != std::string_view::npos) return {};
  for (const Unit& unit : program.units) {
    if (axis == unit.axis || axis == unit.replicas) return {};
  }
  return axis;
}

std::vector<ValueId> WrittenOperands(const Program&, const Op& op) {
  std::vector<ValueId> out = op.writes;
  uint16_t writes = TraitsOf(op).writes;
  if (IsUpdate(op)) writes = static_cast<uint16_t>(writes & ((1u << std::min<size_t>(FlatOperands(op), 16)) - 1));
  for (size_t i = 0; writes != 0 && i < op.args.size(); ++i) {
    const bool written = writes == kEveryOperand || (i < 16 && (writes >> i & 1) != 0);
    if (written && op.args[i].kind == Arg::Kind::kValue) out.push_back(op.args[i].value);
  }
  return out;
}

int64_t MicroBatchOf(const Op& op) {
  const Arg* micro = op.Attr(kMicroBatch);
  if (micro == nullptr) return 0;
  const bool number = micro->kind == Arg::Kind::kInt && micro->integer.is_const();
  return number && micro->integer.value >= 0 && micro->integer.value < (1 << 24) ? micro->integer.value : -1;
}

bool HasEffect(const Program& program, const Op& op) {
  if (TraitsOf(op).has_effect || !op.writes.empty()) return true;
  for (ValueId result : op.results) {
    if (result != kNone && program.value(result).placed) return true;
  }
  return false;
}

}  // namespace interlace
