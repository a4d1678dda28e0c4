#include "passes/pass_table.h"

#include <sstream>

#include "passes/accumulate.h"
#include "passes/canonicalize.h"
#include "passes/precision.h"
#include "passes/replicate.h"
#include "passes/shard.h"
#include "passes/update.h"
#include "passes/zero1.h"

namespace interlace {

std::span<const PassInfo> PassTable() {
  using enum OptionKind;
  static const OptionInfo kAxis = {"axis", kName, "dp", "mesh axis that the ranks form"};
  static const OptionInfo kRanks = {"ranks", kCount, "", "size of the axis", {}, 1};
  static const OptionInfo kWait = {"wait",
                                   kChoice,
                                   "next",
                                   "wait for a reduce-scatter just before the next one starts, or at once",
                                   {"next", "now"}};
  static const std::vector<PassInfo> table = {
      {"canonicalize",
       "views become views of their storage, dead and repeated ops go, identities vanish",
       {},
       Canonicalize},
      {"precision",
       "narrower transfers: casts of parameters move onto their shards, gradients are reduced in another dtype",
       {{"param", kChoice, "none", "dtype that parameters are cast to before they are gathered", {"none", "bf16", "f16", "auto"}},
        {"reduce", kChoice, "none", "dtype that gradients are reduced in", {"none", "f32", "bf16", "f16"}}},
       Precision},
      {"shard",
       "ZeRO-3: parameters live in shards, are gathered before and released after each stretch of uses",
       {kAxis, kRanks, kWait, {"ahead", kCount, "1", "gathers in flight ahead of the one waited for", {}, 0}},
       Shard},
      {"replicate",
       "data parallel: parameters and optimizer states are whole on every rank",
       {kAxis, kRanks, kWait},
       Replicate},
      {"zero1",
       "parameters are whole on every rank, gradients and optimizer states live in shards",
       {kAxis, kRanks, kWait},
       Zero1},
      {"accumulate",
       "an optimizer step runs several micro-batches and adds up their gradients",
       {{"steps", kCount, "", "micro-batches of a step", {}, 1},
        {"mode",
         kChoice,
         "reduce_each",
         "reduce every micro-batch's gradients, or their sum once",
         {"reduce_each", "reduce_last"}}},
       Accumulate},
      {"update",
       "adds the optimizer step, with clipping by the global norm",
       {{"clip", kPositiveOrNone, "none", "largest global norm of the gradient"},
        {"norm", kChoice, "auto", "compute the norm: auto (when clipping) or always", {"auto", "always"}},
        {"momentum", kChoice, "true", "give sgd a momentum buffer", {"true", "false"}}},
       Update},
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
