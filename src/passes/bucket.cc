// bucket.cc — gathers and reductions of several units become one call each (SimpleFSDP 3.2.1 and 3.3).
//
//   before: gather.start(u0)  gather.start(u1)  ...  reduce.start(u1)  reduce.start(u0)
//   after:  gather.start(u0, u1)  ...                reduce.start(u1, u0)
//
// mode=manual, modules=a+b: a bucket is what one listed module owns, in forward, backward and reductions alike. A
// module is a path as in the names of parameters (model.layers.0); `*` stands for any one component, so model.layers.*
// makes each layer a bucket. What no listed module owns stays as it is. A tied parameter belongs to the first of its
// names that a listed module owns.
//
// mode=greedy: the paper's Algorithm 1. It takes the gathers of one part of a phase in order of use; gather i joins the
// open bucket m iff
//   forward:   T_AG(m + i) <= Tc               and Mc + Mc_i <= limit
//   backward:  T_RS(last) + T_AG(m + i) <= Tc  and Mc + Mc_i <= limit
//   Tc          compute of the bucket before m, during which m is gathered (so the first gather stays alone)
//   Mc_i, Mc    the largest op (operands, results, workspace) between the first use of i and that of the next gather;
//               the sum of these in m
//   T_RS(last)  time of reducing the gradients of the bucket before that one
// Reductions of units that were gathered together in the backward part are merged as well. time=faithful: T = alpha +
// beta * n, one latency and n bytes of the buffers at the rate of the links between nodes, or within one when there is
// only one; time=model: this repository's cost model, with topology and measured times.
//
// pack=flat: one coalesced call, no copies. pack=copy: one call on one buffer, with copies in and out
// (baselines/bucket_copies.h), as peers do it. Runs after shard and accumulate, before reorder. Errors: modules that
// match nothing or overlap, a unit of two modules, reductions that cannot wait for one another.
#include <algorithm>
#include <map>

#include "ir/op_table.h"
#include "passes/baselines/bucket_copies.h"
#include "passes/bucket_greedy.h"
#include "passes/bucket_modules.h"
#include "passes/cost_options.h"
#include "passes/passes.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

using GatherGroups = std::vector<std::vector<size_t>>;  // indices of gathers or reductions that become one

// What has one bucket, one key (-1: none) and one axis is one call. Transfers that hold units of several buckets
// already stay as they are.
template <typename Transfer>
std::vector<std::vector<size_t>> GroupsOf(const Program& program, const std::vector<Transfer>& all,
                                          const std::vector<int32_t>& bucket_of, auto&& key_of) {
  std::map<std::tuple<int, int32_t, std::string>, std::vector<size_t>> groups;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<UnitId>& units = all[i].units;
    const int32_t bucket = bucket_of[units[0]];
    const bool whole = std::all_of(units.begin(), units.end(), [&](UnitId unit) { return bucket_of[unit] == bucket; });
    if (bucket >= 0 && whole && key_of(all[i]) >= 0)
      groups[{key_of(all[i]), bucket, program.units[units[0]].axis + " " + program.units[units[0]].replicas}].push_back(
          i);
  }
  std::vector<std::vector<size_t>> out;
  for (auto& [key, group] : groups) out.push_back(std::move(group));
  return out;
}

Status MergeReductions(Transfers& transfers, const std::vector<std::vector<size_t>>& groups) {
  for (const std::vector<size_t>& group : groups) {
    Reduce& into = transfers.reduces[group[0]];
    for (size_t i = 1; i < group.size(); ++i) {
      Reduce& from = transfers.reduces[group[i]];
      if (into.tail.empty() != from.tail.empty() || std::max(into.at, from.at) > std::min(into.latest, from.latest)) {
        return MakeError("the reductions of ", UnitNames(into.units), " and ", UnitNames(from.units),
                         " cannot be one: the sum of one is used before the other's gradients are there");
      }
      transfers.Merge(into, from);
      into.wait = std::min(into.wait, into.latest);
    }
  }
  return Ok{};
}

// One buffer has one dtype; a coalesced call may have several.
int DTypeKey(const Program& program, ValueId buffer, bool copy) {
  return copy ? static_cast<int>(program.value(buffer).type.dtype) : 0;
}

// The units that backward gathers bring together, as numbers for reductions.
std::vector<int32_t> TogetherInBackward(const Program& program, const Transfers& transfers,
                                        const GatherGroups& groups) {
  std::vector<int32_t> bucket_of(program.units.size(), -1);
  for (size_t b = 0; b < groups.size(); ++b) {
    for (size_t i : groups[b]) {
      const Gather& gather = transfers.gathers[i];
      if (gather.need < transfers.backward_begin()) continue;
      for (UnitId unit : gather.units) bucket_of[unit] = static_cast<int32_t>(b);
    }
  }
  return bucket_of;
}

}  // namespace

Result<bool> Bucket(Program& program, const PassOptions& options) {
  INTERLACE_ASSIGN(std::string mode, options.Choice("mode", {"manual", "greedy"}));
  INTERLACE_ASSIGN(std::string pack, options.Choice("pack", {"flat", "copy"}));
  INTERLACE_ASSIGN(std::string time, options.Choice("time", {"faithful", "model"}));
  std::vector<int32_t> bucket_of;
  PassCosts costs;
  if (mode == "manual") {
    if (options.Find("modules") == nullptr) {
      return MakeError(
          "bucket(mode=manual) needs modules=a+b, for example modules=model.layers.*; or take mode=greedy");
    }
    INTERLACE_ASSIGN(bucket_of, BucketsOfModules(program, options.Text("modules", "")));
  } else {
    if (options.Find("modules") != nullptr)
      return MakeError("bucket(mode=greedy) finds the buckets itself; leave modules= out");
    INTERLACE_ASSIGN(costs, ReadCosts(program, options));
  }
  const bool copy = pack == "copy";
  bool changed = false;
  CopiedBuckets copied(program);
  for (Phase* phase : MicroBatches(program)) {
    INTERLACE_ASSIGN(Transfers transfers, Transfers::Read(program, *phase));
    auto part_of = [&](const Gather& gather) {
      if (gather.need >= transfers.size()) return -1;  // another phase waits for it
      return 2 * DTypeKey(program, gather.fulls[0], copy) + (gather.need >= transfers.backward_begin() ? 1 : 0);
    };
    auto reduce_key_of = [&](const Reduce& reduce) { return DTypeKey(program, reduce.flats[0], copy); };
    GatherGroups gathers;
    std::vector<int32_t> reduce_bucket_of = bucket_of;
    if (mode == "manual") {
      gathers = GroupsOf(program, transfers.gathers, bucket_of, part_of);
    } else {
      INTERLACE_ASSIGN(CostModel model, costs.Model(program));
      INTERLACE_ASSIGN(gathers, GreedyBuckets(program, transfers, model, {costs.limit, time == "model"}));
      reduce_bucket_of = TogetherInBackward(program, transfers, gathers);
    }
    const GatherGroups reduces = GroupsOf(program, transfers.reduces, reduce_bucket_of, reduce_key_of);
    for (const std::vector<size_t>& group : gathers) {
      for (size_t i = 1; i < group.size(); ++i) {
        changed = true;
        transfers.Merge(transfers.gathers[group[0]], transfers.gathers[group[i]]);
      }
    }
    for (const std::vector<size_t>& group : reduces) changed = changed || group.size() > 1;
    INTERLACE_TRY(MergeReductions(transfers, reduces));
    INTERLACE_TRY(transfers.Write());
    if (!copy) continue;
    std::vector<OpId> starts;
    for (const std::vector<size_t>& group : gathers) {
      if (transfers.gathers[group[0]].units.size() > 1) starts.push_back(transfers.gathers[group[0]].start);
    }
    for (const std::vector<size_t>& group : reduces) {
      const Reduce& reduce = transfers.reduces[group[0]];
      if (reduce.units.size() > 1 && !reduce.tail.empty()) starts.push_back(reduce.start);
    }
    changed = changed || !starts.empty();
    INTERLACE_TRY(copied.Rewrite(*phase, starts));
  }
  return changed;
}

}  // namespace interlace
