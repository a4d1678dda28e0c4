#include "passes/pass_table.h"

#include <sstream>

#include "passes/cost_options.h"
#include "passes/host_update.h"
#include "passes/offload.h"
#include "passes/passes.h"
#include "passes/schedule.h"
#include "passes/search.h"

namespace interlace {
namespace {

// Whether a pass runs where updates stand before the first use of what they update (ir/pending.h).
enum class Pending : uint8_t { kRefused, kKept };

PassInfo Row(std::string_view name, Result<bool> (*run)(Program&, const PassOptions&), Takes takes, Pending pending,
             std::string_view help, std::vector<OptionInfo> options, bool (*goes_back)(const PassOptions&) = nullptr,
             Result<bool> (*run_again)(Program&, const Origin&, const PassOptions&) = nullptr) {
  return {name, help, std::move(options), run, takes, pending == Pending::kKept, goes_back, run_again};
}

// The first choice is the default.
OptionInfo Choice(std::string_view name, std::vector<std::string_view> choices, std::string_view help) {
  return {name, OptionKind::kChoice, choices[0], help, choices};
}

OptionInfo Count(std::string_view name, std::string_view missing, int64_t min, std::string_view help) {
  return {name, OptionKind::kCount, missing, help, {}, min};
}

}  // namespace

std::span<const PassInfo> PassTable() {
  using enum OptionKind;
  static const OptionInfo kAxis = {"axis", kAxes, "dp", "mesh axis that the ranks form, or several, joined by +"};
  static const OptionInfo kRanks = {
      "ranks", kCount, "of the mesh", "size of the axis; needed where no mesh was declared", {}, 1};
  static const OptionInfo kReplicas = {"replicas", kAxes, "none",
                                       "axes, joined by +, whose ranks hold the same and add up their gradients"};
  static const OptionInfo kWait = Choice("wait", {"next", "now"},
                                         "wait for a reduce-scatter before the next one starts (a bias rides along "
                                         "with its weight; replicate: before more "
                                         "than 8 MiB of gradients are under way), or at once");
  static const std::vector<PassInfo> table = {
      Row("canonicalize", Canonicalize, Takes::kAny, Pending::kKept,
          "views become views of their storage, dead and repeated ops go, identities vanish", {}),
      Row("stack_products", StackProducts, Takes::kCaptured, Pending::kRefused,
          "a sum of products of few rows each, such as a recurrent net's gradients, is one product of all rows",
          {Count("least", "4", 2, "products of a sum")}),
      Row("mesh", DeclareMesh, Takes::kCaptured, Pending::kRefused,
          "declares the axes of the ranks and their sizes, the last fastest",
          {OptionInfo{"axes", kText, "", "NAME:RANKS, joined by +, such as replica:2+dp:4"},
           OptionInfo{
               "stages", kText, "none",
               "ranks of each stage of a pipeline, joined by +, where they differ: the first axis then has all of "
               "them, the others are of one stage"},
           OptionInfo{"stage", kCount, "0", "with stages=, which of them this is", {}, 0}}),
      Row("tensor", Tensor, Takes::kCaptured, Pending::kRefused,
          "tensor parallelism: weights are cut over the ranks of an axis, and what follows from that is propagated "
          "through the whole program",
          {OptionInfo{"axis", kName, "tp", "mesh axis over whose ranks is cut"},
           OptionInfo{
               "plan", kText, "auto",
               "which weights are cut how: auto (found by search), model (as the program's meta line says), or a "
               "file"},
           Choice("sequence", {"true", "false"}, "between the products a rank has a part of the rows"),
           Choice("regather", {"false", "true"},
                  "what the forward part gathered is gathered again for the backward part: memory for time"),
           Count("bucket", "262144", 0, "bytes of a whole weight's gradient from which it is summed by itself"),
           kLimitOption, kClusterOption, kProfileOption}),
      Row("split", Split, Takes::kCaptured, Pending::kRefused,
          "a micro-batch runs as several parts side by side: one is computed while activations of another travel",
          {Count("parts", "2", 1, "of a micro-batch's samples")}),
      Row("overlap", Overlap, Takes::kCaptured, Pending::kRefused,
          "orders a micro-batch's ops so that its activations travel while something else is computed",
          {OptionInfo{"window", kNumber, "0.125", "share of a part's compute time that an op is put off by at most"},
           kClusterOption, kProfileOption}),
      Row("borders", Borders, Takes::kCaptured, Pending::kRefused,
          "before tensor, of stages that cut products unlike: notes where every op runs, and copies what crosses",
          {OptionInfo{"axis", kName, "pp", "mesh axis over whose ranks stages are dealt"},
           OptionInfo{"at", kText, "auto", "where stages begin, as of pipeline"},
           Count("chunks", "1", 1, "stages of each rank, dealt in turns (interleaved)"),
           OptionInfo{"data", kText, "none", "how many ranks of each stage have batches of their own, joined by +"},
           kClusterOption, kProfileOption}),
      Row("pipeline", Pipeline, Takes::kCaptured, Pending::kRefused,
          "keeps one stage of a model that is cut along its layers, with messages to the others",
          {OptionInfo{"axis", kName, "pp", "mesh axis over whose ranks stages are dealt"},
           OptionInfo{"stage", kCount, "0", "the index along it whose program this becomes", {}, 0},
           OptionInfo{"at", kText, "auto",
                      "where stages begin: auto (balanced), model (as the program's meta line says), or parameters or "
                      "modules joined by +"},
           Count("chunks", "1", 1, "stages of each rank, dealt in turns (interleaved)"),
           Choice("deal", {"turns", "v", "auto"},
                  "which rank has which stages: in turns, there and back, or what ends first of one each and that"),
           Choice("gathers", {"once", "again", "auto"},
                  "rows for gradients of weights: kept from before, gathered again, or what ends first (deal=auto)"),
           Count("micro_batches", "0", 0, "of a step, for deal=auto"),
           Choice("backward", {"whole", "split"},
                  "gradients of weights with those of inputs, or in a phase of their own"),
           OptionInfo{
               "data", kText, "none",
               "of stages with unlike ranks (pass mesh): how many of each have batches of their own, joined by +"},
           kLimitOption, kClusterOption, kProfileOption}),
      Row("order", Order, Takes::kAny, Pending::kKept,
          "when a stage runs which part of which micro-batch: the run lines of a schedule",
          {Choice("schedule", {"1f1b", "gpipe", "interleaved", "zero_bubble", "v", "auto"}, "of the pipeline")}),
      Row("precision", Precision, Takes::kCaptured, Pending::kRefused,
          "narrower transfers: casts of parameters move onto their shards, gradients are reduced in another dtype",
          {Choice("param", {"none", "bf16", "f16", "auto"},
                  "dtype that parameters are cast to before they are gathered"),
           Choice("reduce", {"none", "f32", "bf16", "f16"}, "dtype that gradients are reduced in")}),
      Row("fuse", Fuse, Takes::kCaptured, Pending::kRefused,
          "elementwise ops, norms and softmax become regions, which run as one op each",
          {Count("min", "2", 1, "ops of a region at least"),
           OptionInfo{"modules", kText, "all", "paths, joined by +, in which regions are made"},
           Choice("recompute", {"true", "false"},
                  "the backward part makes again what costs less than keeping it from the forward part")}),
      Row("rematerialize", Rematerialize, Takes::kCaptured, Pending::kRefused,
          "in front of pipeline: the choice of fuse(recompute=true), what is kept for the backward part",
          {Count("min", "2", 1, "ops of a region at least"),
           OptionInfo{"modules", kText, "all", "paths, joined by +, in which regions are made"}}),
      Row("recompute", Recompute, Takes::kCaptured, Pending::kRefused,
          "activation checkpointing: forward ops run again just before the backward ops that need them",
          {Choice("mode", {"full", "selective", "budget"},
                  "everything inside blocks, all but expensive ops, or as little as fits"),
           OptionInfo{"blocks", kText, "elements of lists", "paths of modules, joined by +, that are a block each"},
           OptionInfo{"save", kText, "products and attention", "selective: ops, joined by +, that do not run again"},
           Choice("keep", {"products", "second", "all"}, "selective: every second product, all but attention's scores"),
           OptionInfo{"whole", kText, "none", "selective: blocks, joined by +, in which everything runs again"},
           OptionInfo{"bytes", kBytes, "none", "budget: what may be kept for the backward part"},
           OptionInfo{"cluster", kText, "local-1", "budget: preset whose kernel times count"}}),
      Row("breadth_first", BreadthFirst, Takes::kCaptured, Pending::kRefused,
          "several micro-batches run side by side, layer by layer: transfers hide behind all of them, for their "
          "activations' memory",
          {Count("micro_batches", "2", 1, "that run side by side")}),
      Row("shard", Shard, Takes::kCaptured, Pending::kRefused,
          "ZeRO-3: parameters live in shards, are gathered before and released after each stretch of uses",
          {kAxis, kRanks, kReplicas, kWait, Count("ahead", "1", 0, "gathers in flight ahead of the one waited for"),
           Choice("states", {"shard", "all", "auto"},
                  "what replicas have of gradients and optimizer states: those of their shard, a part each, or auto: a "
                  "part each unless an optimizer needs more")}),
      Row("replicate", Replicate, Takes::kCaptured, Pending::kRefused,
          "data parallel: parameters and optimizer states are whole on every rank", {kAxis, kRanks, kReplicas, kWait}),
      Row("zero1", Zero1, Takes::kCaptured, Pending::kRefused,
          "parameters are whole on every rank, gradients and optimizer states live in shards",
          {kAxis, kRanks, kReplicas, kWait}),
      Row("accumulate", Accumulate, Takes::kUnits, Pending::kRefused,
          "an optimizer step runs several micro-batches and adds up their gradients",
          {Count("steps", "", 1, "micro-batches of a step"),
           Choice("mode", {"reduce_each", "reduce_last"}, "reduce every micro-batch's gradients, or their sum once")}),
      Row("update", Update, Takes::kUnits, Pending::kRefused,
          "adds the optimizer step, with clipping by the global norm",
          {OptionInfo{"clip", kPositiveOrNone, "none", "largest global norm of the gradient"},
           Choice("norm", {"auto", "always"}, "compute the norm: auto (when clipping) or always"),
           Choice("momentum", {"true", "false"}, "give sgd a momentum buffer")}),
      Row("forward_only", ForwardOnly, Takes::kAny, Pending::kRefused,
          "what the outputs need and nothing else, on the same units and states: for evaluation",
          {OptionInfo{"out", kText, "none",
                      "states that lie in the tier if nothing here uses them: u0.exp_avg+u3.exp_avg, or all"}}),
      Row("schedule", SchedulePass, Takes::kUnits, Pending::kRefused,
          "carries out a schedule that was written down or found by search; units as u0+u3, buckets as u1+u2:AHEAD;u3",
          {OptionInfo{"keep", kText, "none", "units that stay gathered through the step, or all"},
           OptionInfo{"forward", kText, "none",
                      "gathers of the forward part: coalesced units and the steps they are issued ahead"},
           OptionInfo{"backward", kText, "none", "the same of the backward part"},
           OptionInfo{"reduce", kText, "none",
                      "coalesced reductions and how many later ones start before each is waited for"}}),
      Row("bucket", Bucket, Takes::kUnits, Pending::kRefused,
          "gathers and reductions of several units become one call each (SimpleFSDP)",
          {Choice("mode", {"manual", "greedy"}, "buckets by module, or found greedily"),
           OptionInfo{"modules", kText, "required",
                      "manual: paths of modules joined by +, * for any one component: embed+layers.*"},
           Choice("pack", {"flat", "copy"},
                  "one coalesced call, or one buffer with copies in and out as peers have it"),
           Choice("time", {"faithful", "model"}, "greedy: one latency and one rate, or the cost model"), kLimitOption,
           kClusterOption, kProfileOption}),
      Row("prefetch", Prefetch, Takes::kUnits, Pending::kRefused,
          "gathers start as early as memory allows, small neighbours as one call (DeepCompile)",
          {kLimitOption, OptionInfo{"prefetch", kBytes, "2GB", "bytes under way or waiting at one time"},
           OptionInfo{"alpha", kNumber, "1.5",
                      "two calls become one when together they take more than this many times the one"},
           kClusterOption, kProfileOption}),
      Row("unshard", Unshard, Takes::kUnits, Pending::kRefused,
          "units stay gathered through a step where memory allows (DeepCompile)",
          {OptionInfo{"units", kText, "auto", "auto, all, none, or those of a list u0+u3 whatever the limit"},
           kLimitOption, kClusterOption, kProfileOption}),
      Row("reorder", Reorder, Takes::kUnits, Pending::kRefused,
          "a gather starts before or after the wait for the one before it (SimpleFSDP)",
          {Choice("forward", {"before", "after"}, "place of gathers in the forward part"),
           Choice("backward", {"after", "before"}, "place of gathers in the backward part")}),
      Row("overlap_update", OverlapUpdate, Takes::kUnits, Pending::kKept,
          "the optimizer step of a unit runs when its gradient is complete, not after the last micro-batch (without "
          "clipping)",
          {}),
      Row("transient_gradients", TransientGradients, Takes::kUnits, Pending::kKept,
          "gradients that one op makes and the optimizer step takes in the same step lie where activations lay, not in "
          "states (one micro-batch, one rank)",
          {}),
      Row("reposition_update", RepositionUpdate, Takes::kAny, Pending::kKept,
          "the optimizer step of a unit runs in the next step, just before the unit is first needed there (Mist)",
          {Count("ahead", "1", 0, "zero1: first uses between the start of a gather and its wait"),
           OptionInfo{"share", kNumber, "1",
                      "of the parameters; less than all: spread evenly, and overlap_update may move the others"}}),
      Row("host_update", HostUpdate, Takes::kNumbers, Pending::kKept,
          "the optimizer steps of units are made on the host, where their states lie; gradients go there, weights come "
          "back",
          {OptionInfo{"units", kText, "all", "all that can, or those of a list u0+u3"},
           OptionInfo{"share", kNumber, "1", "with all: of their bytes, those that a step needs last"}}),
      Row("offload", Offload, Takes::kNumbers, Pending::kKept,
          "storages leave memory where the limit asks for it, and are back in time; copies run beside the compute lane",
          {kLimitOption,
           OptionInfo{"kinds", kText, "states+gradients+master",
                      "what may leave, in order: states, gradients, master, activations"},
           OptionInfo{"window", kBytes, "none", "room that is kept for copies under way; none: tried by simulation"},
           OptionInfo{"slack", kNumber, "1.2", "times a copy's own time between its start and its wait"},
           Choice("host", {"never", "auto", "always"},
                  "steps made on the host: none, as many as make the step shortest by simulation, all"),
           kClusterOption, kProfileOption}),
      Row("offload_deepcompile", OffloadDeepCompile, Takes::kNumbers, Pending::kKept,
          "optimizer states leave memory during forward and backward (DeepCompile, Algorithm 2)",
          {kLimitOption, OptionInfo{"fragment", kBytes, "64MiB", "states that go together"}, kClusterOption,
           kProfileOption}),
      Row("offload_sync", OffloadSync, Takes::kNumbers, Pending::kKept,
          "everything leaves memory after each use and comes back before the next, waited for at once; to compare with",
          {OptionInfo{"kinds", kText, "states+gradients+master", "what leaves: states, gradients, master, activations"},
           kClusterOption, kProfileOption}),
      Row("search", Search, Takes::kUnits, Pending::kRefused,
          "decides buckets, positions and kept units together by simulation, within the limit; never worse than the "
          "heuristics",
          {kClusterOption, kProfileOption, kLimitOption,
           Choice("recompute", {"auto", "none"},
                  "also decide what runs again in the backward part, or leave that as it is"),
           Choice("breadth_first", {"auto", "none"},
                  "also decide how many micro-batches run side by side, or leave that as it is"),
           Choice(
               "accumulate", {"none", "auto"},
               "also decide when gradients are reduced: after each micro-batch, as the program says, or once a step"),
           Choice("offload", {"none", "auto", "host"},
                  "storages may leave memory where nothing else fits; host: and steps be made there"),
           Choice("reposition", {"none", "auto"},
                  "updates may be left to the next step: some with offload, or those of parts that replicas gather"),
           Choice("transient", {"false", "true"},
                  "pass transient_gradients runs behind: memory is judged as it makes it"),
           Count("evaluations", "0", 0, "simulations at most; 0: by the size of the program"),
           OptionInfo{"seconds", kNumber, "0", "stop after so long with the best until then; 0: no such stop"}},
          SearchesCaptured, SearchCaptured),
  };
  return table;
}

const PassInfo* FindPass(std::string_view name) {
  for (const PassInfo& pass : PassTable()) {
    if (pass.name == name) return &pass;
  }
  return nullptr;
}

namespace {

std::string_view Form(OptionKind kind) {
  switch (kind) {
    case OptionKind::kCount:
      return "N";
    case OptionKind::kPositiveOrNone:
      return "X|none";
    case OptionKind::kChoice:
      break;  // its choices are listed
    case OptionKind::kName:
      return "NAME";
    case OptionKind::kAxes:
      return "AXIS+AXIS";
    case OptionKind::kText:
      return "TEXT";
    case OptionKind::kBytes:
      return "BYTES|none";
    case OptionKind::kNumber:
      return "X";
  }
  return "";
}

}  // namespace

std::string PassTableText() {
  std::ostringstream out;
  for (const PassInfo& pass : PassTable()) {
    out << pass.name << "\n    " << pass.help << "\n";
    for (const OptionInfo& option : pass.options) {
      out << "    " << option.name << "=";
      if (option.kind == OptionKind::kChoice) {
        for (size_t i = 0; i < option.choices.size(); ++i) out << (i ? "|" : "") << option.choices[i];
      } else {
        out << Form(option.kind);
      }
      out << "  " << option.help << (option.missing.empty() ? " (required" : " (default ") << option.missing << ")\n";
    }
  }
  return out.str();
}

}  // namespace interlace
