#include "passes/pass_table.h"

#include <sstream>

#include "passes/accumulate.h"
#include "passes/baselines/offload.h"
#include "passes/breadth_first.h"
#include "passes/bucket.h"
#include "passes/canonicalize.h"
#include "passes/cost_options.h"
#include "passes/forward_only.h"
#include "passes/host_update.h"
#include "passes/offload.h"
#include "passes/overlap_update.h"
#include "passes/mesh.h"
#include "passes/precision.h"
#include "passes/prefetch.h"
#include "passes/recompute.h"
#include "passes/reorder.h"
#include "passes/replicate.h"
#include "passes/reposition_update.h"
#include "passes/schedule.h"
#include "passes/search.h"
#include "passes/shard.h"
#include "passes/unshard.h"
#include "passes/update.h"

namespace interlace {

std::span<const PassInfo> PassTable() {
  using enum OptionKind;
  static const OptionInfo kAxis = {"axis", kName, "dp", "mesh axis that the ranks form"};
  static const OptionInfo kRanks = {"ranks", kCount, "of the mesh", "size of the axis; needed where no mesh was declared", {}, 1};
  static const OptionInfo kReplicas = {"replicas", kText, "none",
                                       "axes, joined by +, whose ranks hold the same and add up their gradients"};
  static const OptionInfo kWait = {"wait",
                                   kChoice,
                                   "next",
                                   "wait for a reduce-scatter before the next one starts (a bias rides along with its "
                                   "weight; replicate: before more "
                                   "than 8 MiB of gradients are under way), or at once",
                                   {"next", "now"}};
  constexpr bool kKeepsPending = true;
  static const std::vector<PassInfo> table = {
      {"canonicalize",
       "views become views of their storage, dead and repeated ops go, identities vanish",
       {},
       Canonicalize,
       Takes::kAny,
       kKeepsPending},
      {"mesh",
       "declares the axes of the ranks and their sizes, the last fastest",
       {{"axes", kText, "", "NAME:RANKS, joined by +, such as replica:2+dp:4"}},
       DeclareMesh,
       Takes::kCaptured},
      {"precision",
       "narrower transfers: casts of parameters move onto their shards, gradients are reduced in another dtype",
       {{"param",
         kChoice,
         "none",
         "dtype that parameters are cast to before they are gathered",
         {"none", "bf16", "f16", "auto"}},
        {"reduce", kChoice, "none", "dtype that gradients are reduced in", {"none", "f32", "bf16", "f16"}}},
       Precision,
       Takes::kCaptured},
      {"recompute",
       "activation checkpointing: forward ops run again just before the backward ops that need them",
       {{"mode",
         kChoice,
         "full",
         "everything inside blocks, all but expensive ops, or as little as fits",
         {"full", "selective", "budget"}},
        {"blocks", kText, "elements of lists", "paths of modules, joined by +, that are a block each"},
        {"save", kText, "products and attention", "selective: ops, joined by +, that do not run again"},
        {"whole", kText, "none", "selective: blocks, joined by +, in which everything runs again"},
        {"bytes", kBytes, "none", "budget: what may be kept for the backward part"},
        {"cluster", kText, "local-1", "budget: preset whose kernel times count"}},
       Recompute,
       Takes::kCaptured},
      {"breadth_first",
       "several micro-batches run side by side, layer by layer: transfers hide behind all of them, for their "
       "activations' memory",
       {{"micro_batches", kCount, "2", "that run side by side", {}, 1}},
       BreadthFirst,
       Takes::kCaptured},
      {"shard",
       "ZeRO-3: parameters live in shards, are gathered before and released after each stretch of uses",
       {kAxis, kRanks, kReplicas, kWait, {"ahead", kCount, "1", "gathers in flight ahead of the one waited for", {}, 0}},
       Shard,
       Takes::kCaptured},
      {"replicate",
       "data parallel: parameters and optimizer states are whole on every rank",
       {kAxis, kRanks, kReplicas, kWait},
       Replicate,
       Takes::kCaptured},
      {"zero1",
       "parameters are whole on every rank, gradients and optimizer states live in shards",
       {kAxis, kRanks, kReplicas, kWait},
       Zero1,
       Takes::kCaptured},
      {"accumulate",
       "an optimizer step runs several micro-batches and adds up their gradients",
       {{"steps", kCount, "", "micro-batches of a step", {}, 1},
        {"mode",
         kChoice,
         "reduce_each",
         "reduce every micro-batch's gradients, or their sum once",
         {"reduce_each", "reduce_last"}}},
       Accumulate,
       Takes::kUnits},
      {"update",
       "adds the optimizer step, with clipping by the global norm",
       {{"clip", kPositiveOrNone, "none", "largest global norm of the gradient"},
        {"norm", kChoice, "auto", "compute the norm: auto (when clipping) or always", {"auto", "always"}},
        {"momentum", kChoice, "true", "give sgd a momentum buffer", {"true", "false"}}},
       Update,
       Takes::kUnits},
      {"forward_only",
       "what the outputs need and nothing else, on the same units and states: for evaluation",
       {{"out", kText, "none", "states that lie in the tier if nothing here uses them: u0.exp_avg+u3.exp_avg, or all"}},
       ForwardOnly},
      {"schedule",
       "carries out a schedule that was written down or found by search; units as u0+u3, buckets as u1+u2:AHEAD;u3",
       {{"keep", kText, "none", "units that stay gathered through the step, or all"},
        {"forward", kText, "none", "gathers of the forward part: coalesced units and the steps they are issued ahead"},
        {"backward", kText, "none", "the same of the backward part"},
        {"reduce", kText, "none", "coalesced reductions and how many later ones start before each is waited for"}},
       SchedulePass,
       Takes::kUnits},
      {"bucket",
       "gathers and reductions of several units become one call each (SimpleFSDP)",
       {{"mode", kChoice, "manual", "buckets by module, or found greedily", {"manual", "greedy"}},
        {"modules", kText, "required", "manual: paths of modules joined by +, * for any one component: embed+layers.*"},
        {"pack",
         kChoice,
         "flat",
         "one coalesced call, or one buffer with copies in and out as peers have it",
         {"flat", "copy"}},
        {"time", kChoice, "faithful", "greedy: one latency and one rate, or the cost model", {"faithful", "model"}},
        kLimitOption,
        kClusterOption,
        kProfileOption},
       Bucket,
       Takes::kUnits},
      {"prefetch",
       "gathers start as early as memory allows, small neighbours as one call (DeepCompile)",
       {kLimitOption,
        {"prefetch", kBytes, "2GB", "bytes under way or waiting at one time"},
        {"alpha", kNumber, "1.5", "two calls become one when together they take more than this many times the one"},
        kClusterOption,
        kProfileOption},
       Prefetch,
       Takes::kUnits},
      {"unshard",
       "units stay gathered through a step where memory allows (DeepCompile)",
       {{"units", kText, "auto", "auto, all, none, or those of a list u0+u3 whatever the limit"},
        kLimitOption,
        kClusterOption,
        kProfileOption},
       Unshard,
       Takes::kUnits},
      {"reorder",
       "a gather starts before or after the wait for the one before it (SimpleFSDP)",
       {{"forward", kChoice, "before", "place of gathers in the forward part", {"before", "after"}},
        {"backward", kChoice, "after", "place of gathers in the backward part", {"after", "before"}}},
       Reorder,
       Takes::kUnits},
      {"overlap_update",
       "the optimizer step of a unit runs when its gradient is complete, not after the last micro-batch (without "
       "clipping)",
       {},
       OverlapUpdate,
       Takes::kUnits,
       kKeepsPending},
      {"reposition_update",
       "the optimizer step of a unit runs in the next step, just before the unit is first needed there (Mist)",
       {{"ahead", kCount, "1", "zero1: first uses between the start of a gather and its wait", {}, 0},
        {"share", kNumber, "1",
         "of the parameters; less than all: spread evenly, and overlap_update may move the others"}},
       RepositionUpdate,
       Takes::kAny,
       kKeepsPending},
      {"host_update",
       "the optimizer steps of units are made on the host, where their states lie; gradients go there, weights come "
       "back",
       {{"units", kText, "all", "all that can, or those of a list u0+u3"},
        {"share", kNumber, "1", "with all: of their bytes, those that a step needs last"}},
       HostUpdate,
       Takes::kNumbers,
       kKeepsPending},
      {"offload",
       "storages leave memory where the limit asks for it, and are back in time; copies run beside the compute lane",
       {kLimitOption,
        {"kinds", kText, "states+gradients+master", "what may leave, in order: states, gradients, master, activations"},
        {"window", kBytes, "none", "room that is kept for copies under way; none: tried by simulation"},
        {"slack", kNumber, "1.2", "times a copy's own time between its start and its wait"},
        {"host",
         kChoice,
         "never",
         "steps made on the host: none, as many as make the step shortest by simulation, all",
         {"never", "auto", "always"}},
        kClusterOption,
        kProfileOption},
       Offload,
       Takes::kNumbers,
       kKeepsPending},
      {"offload_deepcompile",
       "optimizer states leave memory during forward and backward (DeepCompile, Algorithm 2)",
       {kLimitOption, {"fragment", kBytes, "64MiB", "states that go together"}, kClusterOption, kProfileOption},
       OffloadDeepCompile,
       Takes::kNumbers,
       kKeepsPending},
      {"offload_sync",
       "everything leaves memory after each use and comes back before the next, waited for at once; to compare with",
       {{"kinds", kText, "states+gradients+master", "what leaves: states, gradients, master, activations"},
        kClusterOption,
        kProfileOption},
       OffloadSync,
       Takes::kNumbers,
       kKeepsPending},
      {"search",
       "decides buckets, positions and kept units together by simulation, within the limit; never worse than the "
       "heuristics",
       {kClusterOption,
        kProfileOption,
        kLimitOption,
        {"recompute",
         kChoice,
         "auto",
         "also decide what runs again in the backward part, or leave that as it is",
         {"auto", "none"}},
        {"breadth_first",
         kChoice,
         "auto",
         "also decide how many micro-batches run side by side, or leave that as it is",
         {"auto", "none"}},
        {"offload",
         kChoice,
         "none",
         "storages may leave memory where nothing else fits; host: and steps be made there",
         {"none", "auto", "host"}},
        {"reposition", kChoice, "none", "with offload: some updates may be left to the next step", {"none", "auto"}},
        {"evaluations", kCount, "0", "simulations at most; 0: by the size of the program", {}, 0},
        {"seconds", kNumber, "0", "stop after so long with the best until then; 0: no such stop"}},
       Search,
       Takes::kUnits,
       false,
       SearchesCaptured,
       SearchCaptured},
  };
  return table;
}

const PassInfo* FindPass(std::string_view name) {
  for (const PassInfo& pass : PassTable()) {
    if (pass.name == name) return &pass;
  }
  return nullptr;
}

std::string PassTableText() {
  std::ostringstream out;
  for (const PassInfo& pass : PassTable()) {
    out << pass.name << "\n    " << pass.help << "\n";
    for (const OptionInfo& option : pass.options) {
      out << "    " << option.name << "=";
      if (option.kind == OptionKind::kChoice) {
        for (size_t i = 0; i < option.choices.size(); ++i) out << (i ? "|" : "") << option.choices[i];
      } else {
        static constexpr std::string_view kForms[] = {"N", "X|none", "", "NAME", "TEXT", "BYTES|none", "X"};  // by kind
        out << kForms[static_cast<size_t>(option.kind)];
      }
      out << "  " << option.help << (option.missing.empty() ? " (required" : " (default ") << option.missing << ")\n";
    }
  }
  return out.str();
}

}  // namespace interlace
