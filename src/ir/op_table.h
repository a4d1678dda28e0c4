// op_table.h — what the compiler knows of each op of its own (docs/ir.md has the meanings); ATen ops are not listed.
#pragma once

#include <span>
#include <string_view>

#include "ir/program.h"

namespace interlace {

struct OpInfo {
  std::string_view name;
  Lane lane = Lane::kCompute;
  bool has_effect = false;  // must stay although nobody uses its results
  std::string_view help;
};

std::span<const OpInfo> OpTable();
const OpInfo* FindOp(std::string_view name);  // nullptr: an ATen or library op
bool IsOwnOp(std::string_view name);          // no "ns." of an operator library
Lane LaneOf(const Op& op);                    // explicit or the table's default
// An optimizer step with lane=host: it works on storages that are out, where they lie, beside all other lanes
// (docs/ir.md).
bool StepsOnHost(const Op& op);
// Of an update: how many of its first operands are flat shards (weights, gradient, states); what follows is the
// coefficient.
size_t FlatOperands(const Op& op);
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
