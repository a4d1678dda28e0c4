#include "ir/op_table.h"

#include <array>
#include <unordered_map>

namespace interlace {
namespace {

constexpr OpInfo kOps[] = {
    {"view", Lane::kCompute, false, "another geometry of a storage; costs nothing"},
    {"grad", Lane::kCompute, true, "(param, value): the complete gradient of a parameter"},
    {"output", Lane::kCompute, true, "(value) name=: returned by the step"},
    {"assign", Lane::kCompute, true, "(dst, src): copies into a buffer or state"},
    {"copy", Lane::kCompute, false, "a contiguous copy"},
    {"grad.begin", Lane::kCompute, false, "flat gradient buffer of a unit"},
    {"gather.start", Lane::kGather, true, "all-gather of shards begins"},
    {"gather.wait", Lane::kGather, true, "the full buffers may be read from here"},
    {"release", Lane::kCompute, true, "the storages end here"},
    {"reduce.start", Lane::kReduce, true, "reduce-scatter of flat gradients begins"},
    {"reduce.wait", Lane::kReduce, true, "the reduced shards may be read from here"},
    {"all_reduce.start", Lane::kReduce, true, "sum over a mesh axis begins"},
    {"all_reduce.wait", Lane::kReduce, true, "the sum may be read from here"},
    {"norm.partial", Lane::kCompute, false, "exact sum of squares of gradient shards"},
    {"norm.coef", Lane::kCompute, false, "norm, clip coefficient and whether it is finite"},
    {"update.adamw", Lane::kCompute, true, "AdamW step on flat shards"},
    {"update.adam", Lane::kCompute, true, "Adam step on flat shards"},
    {"update.sgd", Lane::kCompute, true, "SGD step on flat shards"},
    {"call.python", Lane::kCompute, true, "an opaque module"},
    {"offload.start", Lane::kD2H, true, "(storage, ...): copy to the tier begins"},
    {"offload.wait", Lane::kD2H, true, "the copy is complete, the storages take no memory from here"},
    {"reload.start", Lane::kH2D, true, "(storage, ...): memory is taken again, the copy from the tier begins"},
    {"reload.wait", Lane::kH2D, true, "the storages may be used again from here"},
    {"send", Lane::kP2P, true, "point-to-point send"},
    {"recv", Lane::kP2P, true, "point-to-point receive"},
    {"broadcast.start", Lane::kGather, true, "broadcast along an axis begins"},
    {"broadcast.wait", Lane::kGather, true, "the broadcast value may be read from here"},
    {"all_to_all.start", Lane::kP2P, true, "exchange along an axis begins"},
    {"all_to_all.wait", Lane::kP2P, true, "the exchanged value may be read from here"},
};

constexpr std::array<std::string_view, kLaneCount> kLanes = {"compute", "gather", "reduce", "h2d",
                                                             "d2h",     "file",   "p2p",    "host"};

const Arg* ValueArg(const Op& op, size_t index) {
  return index < op.args.size() && op.args[index].kind == Arg::Kind::kValue ? &op.args[index] : nullptr;
}

}  // namespace

std::span<const OpInfo> OpTable() {
  return kOps;
}

const OpInfo* FindOp(std::string_view name) {
  static const auto& index = *[] {
    auto* map = new std::unordered_map<std::string_view, const OpInfo*>();
    for (const OpInfo& info : kOps) map->emplace(info.name, &info);
    return map;
  }();
  auto found = index.find(name);
  return found == index.end() ? nullptr : found->second;
}

bool IsOwnOp(std::string_view name) {
  if (FindOp(name) != nullptr) return true;
  size_t dot = name.find('.');
  if (dot == std::string_view::npos) return true;
  // A family of ours: "gather.begin" is an unknown op of our own, "torchvision.nms" is not.
  std::string_view family = name.substr(0, dot + 1);
  for (const OpInfo& info : kOps) {
    if (info.name.substr(0, family.size()) == family) return true;
  }
  return false;
}

Lane LaneOf(const Op& op) {
  if (op.lane) return *op.lane;
  const OpInfo* info = FindOp(op.name);
  return info == nullptr ? Lane::kCompute : info->lane;
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

bool StepsOnHost(const Op& op) {
  return op.lane == Lane::kHost && op.name.starts_with("update.");
}

size_t FlatOperands(const Op& op) {
  if (op.name != "update.sgd") return 4;
  const Arg* momentum = op.Attr("momentum");
  return momentum != nullptr && momentum->boolean ? 3 : 2;
}

std::vector<ValueId> WrittenOperands(const Program&, const Op& op) {
  std::vector<ValueId> out = op.writes;
  auto add = [&](size_t index) {
    if (const Arg* arg = ValueArg(op, index)) out.push_back(arg->value);
  };
  if (op.name == "assign") {
    add(0);
  } else if (op.name == "reload.start") {
    for (size_t i = 0; i < op.args.size(); ++i) add(i);
  } else if (op.name == "update.adamw" || op.name == "update.adam") {
    add(0);
    add(2);
    add(3);
  } else if (op.name == "update.sgd") {
    add(0);
    const Arg* momentum = op.Attr("momentum");
    if (momentum != nullptr && momentum->boolean) add(2);
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
  const OpInfo* info = FindOp(op.name);
  if ((info != nullptr && info->has_effect) || !op.writes.empty()) return true;
  for (ValueId result : op.results) {
    if (result != kNone && program.value(result).placed) return true;
  }
  return false;
}

}  // namespace interlace
